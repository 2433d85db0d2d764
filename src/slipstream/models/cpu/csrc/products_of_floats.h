/* Products of a block of 12-bit weights in float32, for compressed.c: input by input, each a fused multiply-add. */

enum {
    CHUNK = 248,   /* tokens whose sums are accumulated while a panel is read */
    ROWS = 6,      /* tokens whose sums are in registers */
    BOTH = 3,      /* tokens up to which registers hold the sums of all 32 outputs; beyond, those of 16 at a time */
    BESIDE_MOST = ROWS, BESIDE_MANY = ROWS
};
/* Most tokens beside which the next block is expanded. clang runs out of registers with more than one. */
#if defined(__clang__) && defined(__AVX2__)
#define MEANWHILE 1
#else
#define MEANWHILE BOTH
#endif
/* How many quads of the next block `add` expands beside so many tokens. */
#define EXPANDED(rows, quads) ((rows) <= MEANWHILE ? (quads) : 0)
#define EVERY_BESIDE(of) of(1); of(2); of(3); of(4); of(5); of(6);
#define EVERY_ROWS EVERY_BESIDE

static void copy_inputs(const uint16_t *x, int64_t count, input *to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store_floats(to + i, load_bf16(x + i));
    if (i == count) return;
    uint16_t rest[16] = {0};
    memcpy(rest, x + i, (count - i) * sizeof *x);
    store_floats(to + i, load_bf16(rest));
}

/* Adds to the sums of `tokens` the products of two inputs of each, x [tokens][BLOCK], and 16 pairs of weights. */
ALWAYS void add_pairs_plainly(const int tokens, floats *sums, const float *x, const uint16_t *pairs) {
    #pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        floats weights = n ? load_second_of_pairs(pairs) : load_first_of_pairs(pairs);
        #pragma GCC unroll 6
        for (int i = 0; i < tokens; i++) {
            sums[i] = add_product(sums[i], all_floats(x[i * BLOCK + n]), weights);
            SETTLED(sums[i]);
        }
    }
}
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
/* The products of 1 to 6 tokens by AVX2.
 *
 * In assembly, since 12 sums, the weights and an input take 15 of 16 registers: compilers keep a sum in memory, and
 * each of its additions then waits until the one before has been stored.
 */
_Static_assert(BLOCK == 128, "INPUT_OF contains the number of inputs from one token to the next");

/* Adds the products of input n of token i with the weights of 16 outputs. */
#define INPUT_OF(i, n)                                                                                               \
    "vbroadcastss 4*(" #i "*128+" #n ")(%[x]), %[one]\n\t"                                                           \
    "vfmadd231ps %[left], %[one], %[a" #i "]\n\tvfmadd231ps %[right], %[one], %[b" #i "]\n\t"
#define INPUTS_1(n) INPUT_OF(0, n)
#define INPUTS_2(n) INPUTS_1(n) INPUT_OF(1, n)
#define INPUTS_3(n) INPUTS_2(n) INPUT_OF(2, n)
#define INPUTS_4(n) INPUTS_3(n) INPUT_OF(3, n)
#define INPUTS_5(n) INPUTS_4(n) INPUT_OF(4, n)
#define INPUTS_6(n) INPUTS_5(n) INPUT_OF(5, n)
#define SUM(i) [a##i] "+x"(sums[i].a), [b##i] "+x"(sums[i].b)
#define ADD_PAIRS(inputs, ...)                                                                                       \
    __asm__ volatile("vmovdqa (%[pairs]), %[left]\n\tvmovdqa 32(%[pairs]), %[right]\n\t"                             \
                     "vpslld $16, %[left], %[left]\n\tvpslld $16, %[right], %[right]\n\t" inputs(0)                  \
                     "vmovdqa %[upper], %[right]\n\t"                                                                \
                     "vpand (%[pairs]), %[right], %[left]\n\tvpand 32(%[pairs]), %[right], %[right]\n\t" inputs(1)   \
                     : __VA_ARGS__, [left] "=&x"(left), [right] "=&x"(right), [one] "=&x"(one)                       \
                     : [x] "r"(x), [pairs] "r"(pairs), [upper] "m"(UPPER)                                            \
                     : "memory")
#define EIGHT(bits) {bits, bits, bits, bits, bits, bits, bits, bits}
static const uint32_t UPPER[8] __attribute__((aligned(32))) = EIGHT(0xffff0000);

/* As `add_pairs_plainly`. */
ALWAYS void add_pairs(const int tokens, floats *sums, const float *x, const uint16_t *pairs) {
    __m256 left, right, one;
    switch (tokens) {
    case 1: ADD_PAIRS(INPUTS_1, SUM(0)); break;
    case 2: ADD_PAIRS(INPUTS_2, SUM(0), SUM(1)); break;
    case 3: ADD_PAIRS(INPUTS_3, SUM(0), SUM(1), SUM(2)); break;
    case 4: ADD_PAIRS(INPUTS_4, SUM(0), SUM(1), SUM(2), SUM(3)); break;
    case 5: ADD_PAIRS(INPUTS_5, SUM(0), SUM(1), SUM(2), SUM(3), SUM(4)); break;
    case 6: ADD_PAIRS(INPUTS_6, SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5)); break;
    }
}
#else
#define add_pairs add_pairs_plainly
#endif

/* Adds the products of `sides` times 16 outputs from number 16 * `side` on. */
ALWAYS void add_sides(const int rows, const int side, const int sides, const struct tokens *of, const uint16_t *block,
                      int quads, const struct compressed_block *next) {
    floats sum[2][ROWS];
    #pragma GCC unroll 2
    for (int j = 0; j < sides; j++)
        #pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            sum[j][i] = of->begin ? all_floats(0) : load_floats(of->sums + i * PANEL + (side + j) * 16);
    const int expands = next && rows <= MEANWHILE; /* products are in C then: compilers do not interleave assembly */
    for (int pair = 0; pair < 2 * quads; pair++) {
        if (expands && pair % 2 == 0 && pair / 2 < next->quads) expand_quad(next, pair / 2);
        if (next && !expands) {
            #pragma GCC unroll 2
            for (int j = 0; j < sides; j++)
                prefetch_later(next->data + AHEAD + ((side + j) * 2 * quads + pair) * (QUAD / 4));
        }
        const float *x = of->inputs + 2 * pair;
        #pragma GCC unroll 2
        for (int j = 0; j < sides; j++) {
            const uint16_t *pairs = block + pair * 64 + (side + j) * 32;
            if (expands) add_pairs_plainly(rows, sum[j], x, pairs);
            else add_pairs(rows, sum[j], x, pairs);
        }
    }
    #pragma GCC unroll 2
    for (int j = 0; j < sides; j++)
        #pragma GCC unroll 6
        for (int i = 0; i < rows; i++) store_floats(of->sums + i * PANEL + (side + j) * 16, sum[j][i]);
}

/* Adds a block's products to the sums. In between, `next` is expanded if there are few tokens; if not, the memory
 * behind it is prefetched, so that memory is read all the time. */
ALWAYS void add(const int rows, const struct tokens *of, const uint16_t *block, int quads,
                const struct compressed_block *next) {
    if (rows <= BOTH) {
        add_sides(rows, 0, 2, of, block, quads, next);
    } else {
        add_sides(rows, 0, 1, of, block, quads, next);
        add_sides(rows, 1, 1, of, block, quads, next);
    }
}
