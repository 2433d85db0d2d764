/* Products of a block of 12-bit weights by the instruction for pairs of bfloat16 numbers, for compressed.c. */

enum {
    CHUNK = 248,   /* tokens whose sums are accumulated while a panel is read */
    ROWS = 12,     /* tokens whose sums are in registers */
    BESIDE_MOST = 10, BESIDE_MANY = 8, /* tokens while the next block is expanded: all of them up to 10, else 8 */
};
/* How many quads of the next block `add` expands beside so many tokens. */
#define EXPANDED(rows, quads) (quads)
#define EVERY_BESIDE(of) of(1); of(2); of(3); of(4); of(5); of(6); of(7); of(8); of(9); of(10);
#define EVERY_ROWS(of) EVERY_BESIDE(of) of(11); of(12);

static void copy_inputs(const uint16_t *x, int64_t count, input *to) { memcpy(to, x, count * sizeof *x); }

/* Adds a block's products to the sums. `next` is expanded in between, so that neither waits for the other. */
ALWAYS void add(const int rows, const struct tokens *of, const uint16_t *block, int quads,
                const struct compressed_block *next) {
    __m512 sum[ROWS][2];
    const input *inputs = of->inputs;
    #pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sum[i][0] = of->begin ? _mm512_setzero_ps() : _mm512_load_ps(of->sums + i * PANEL);
        sum[i][1] = of->begin ? _mm512_setzero_ps() : _mm512_load_ps(of->sums + i * PANEL + 16);
    }
    for (int quad = 0; quad < quads; quad++) {
        if (next && quad < next->quads) expand_quad(next, quad);
        #pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            __m512bh left = (__m512bh)_mm512_load_si512(block + pair * 64);
            __m512bh right = (__m512bh)_mm512_load_si512(block + pair * 64 + 32);
            #pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                __m512bh both = pair_at(inputs + i * BLOCK + pair * 2);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, left);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, right);
            }
        }
        block += 128, inputs += 4;
    }
    #pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_store_ps(of->sums + i * PANEL, sum[i][0]);
        _mm512_store_ps(of->sums + i * PANEL + 16, sum[i][1]);
    }
}
