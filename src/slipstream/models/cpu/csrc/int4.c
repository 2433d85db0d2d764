/* Products of weights rounded to 4 bits, for few tokens: weight = code * scale + offset, per 32 inputs of an output.
 *
 * The codes of a group are multiplied and its sum is scaled once: sum of x * weight = scale * (sum of x * code) +
 * offset * sum of x. Where codes are multiplied as larger numbers, that much is taken off.
 *
 * Layout: data [panels][groups][640] bytes: 8 quads of 64 bytes, then 32 scales and 32 offsets. Word o * 2 + i
 * of a quad has 4 codes: bits 4 * (pair * 2 + side) belong to output side * 16 + o and input pair * 2 + i.
 */
#include "kernels.h"

enum { AHEAD = 2560 /* bytes prefetched */, FEW = 2 /* tokens up to which tiles are no faster */ };

#ifdef __AVX512BF16__
/* Products of 4-bit codes by the instruction for pairs of bfloat16 numbers: as the numbers 128 to 143, whose
 * bfloat16 form is 0x4300 + code. One or two tokens are summed in two chains, more in one, so bits depend on how many
 * there are; a draft's may. */
enum { SOME = 8 /* tokens multiplied at a time */, ADDED = 128 /* to every code */, PER_GROUP = GROUP };
#define EVERY_ROWS(of) of(1); of(2); of(3); of(4); of(5); of(6); of(7); of(8);

typedef uint16_t input;

/* part [rows][2 sides]: a group's sums of inputs times codes. */
ALWAYS void multiply_codes(const int rows, const uint8_t *record, const input *x, int64_t stride, floats part[SOME][2]) {
    __m512i one_code = _mm512_set1_epi16(0x000f), above = _mm512_set1_epi16(0x4300);
    floats chains[SOME][2][2];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        chains[i][0][0] = chains[i][0][1] = chains[i][1][0] = chains[i][1][1] = _mm512_setzero_ps();
    for (int quad = 0; quad < GROUP / 4; quad++) {
        __m512i codes = _mm512_loadu_si512(record + quad * 64);
        prefetch(record + quad * 80 + AHEAD);
        #pragma GCC unroll 2
        for (int pair = 0; pair < 2; pair++) {
            __m512i l = pair ? _mm512_srli_epi16(codes, 8) : codes, r = _mm512_srli_epi16(codes, pair ? 12 : 4);
            __m512bh left = (__m512bh)_mm512_ternarylogic_epi32(l, one_code, above, 0xEA); /* l & one_code | above */
            __m512bh right = (__m512bh)_mm512_ternarylogic_epi32(r, one_code, above, 0xEA);
            const int chain = rows > 2 ? 0 : pair; /* few tokens: more sums, so that none waits for the one before */
            #pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                __m512bh both = pair_at(x + i * stride + quad * 4 + pair * 2);
                chains[i][chain][0] = _mm512_dpbf16_ps(chains[i][chain][0], both, left);
                chains[i][chain][1] = _mm512_dpbf16_ps(chains[i][chain][1], both, right);
            }
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        for (int side = 0; side < 2; side++)
            part[i][side] = rows > 2 ? chains[i][0][side] : _mm512_add_ps(chains[i][0][side], chains[i][1][side]);
}

/* The inputs as the products take them: as they are. totals: the sum of each group. */
static const input *inputs_of(const uint16_t *x, int64_t groups, float *totals, void *space) {
    (void)space;
    for (int64_t g = 0; g < groups; g++) totals[g] = sum_of(add_floats(load_bf16(x + g * GROUP), load_bf16(x + g * GROUP + 16)));
    return x;
}

#else
/* Products of 4-bit codes with 8-bit activations, in integers: 32 inputs of a token share a scale, their
 * largest magnitude over 127. The bytes of a word are the codes of its inputs in the order 0, 2, 1, 3, of one side in
 * the low four bits, of the other in the high ones. */
enum { SOME = 8 /* tokens multiplied at a time */, ADDED = 0 /* to every code */, PER_GROUP = 1 };
#define EVERY_ROWS(of) of(1); of(2); of(3); of(4); of(5); of(6); of(7); of(8);

typedef struct {
    uint8_t words[GROUP];
    float scale;
} input; /* 32 inputs */

/* part [rows][2 sides]: a group's sums of inputs times codes. */
ALWAYS void multiply_codes(const int rows, const uint8_t *record, const input *x, int64_t stride, floats part[SOME][2]) {
    const int64_t step = stride * (int64_t)sizeof *x;
    for (int line = 0; line < RECORD; line += 64) prefetch(record + line + AHEAD);
    #pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        ints sums[SOME];
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sums[i] = all_ints(0);
        #pragma GCC unroll 2
        for (int quad = 0; quad < GROUP / 4; quad += 4) {
            bytes four[4];
            const uint8_t *words[4];
            #pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                bytes both = load_bytes(record + (quad + k) * 64);
                four[k] = side ? high_bits(both) : low_bits(both), words[k] = x->words + (quad + k) * 4;
            }
            add_four_vectors(4, rows, four, words, step, quad == 0, quad == 4, sums);
        }
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            part[i][side] = multiply_floats(to_floats(sums[i]), all_floats(x[i * stride].scale));
    }
}

/* The inputs as the products take them, and the sum of each group; `space` is where there is room for them. */
static const input *inputs_of(const uint16_t *x, int64_t groups, float *totals, void *space) {
    const float smallest = 1e-30f; /* of a magnitude that is not taken for 0, whose inverse would be infinite */
    input *to = space;
    for (int64_t g = 0; g < groups; g++, x += GROUP) {
        floats halves[2] = {load_bf16(x), load_bf16(x + 16)};
        float most = largest_magnitude(halves[0], halves[1]);
        floats times = all_floats(most > smallest && most < INFINITY ? 127 / most : 0);
        uint8_t narrow[GROUP];
        for (int half = 0; half < 2; half++)
            store_narrow(narrow + half * 16, to_ints(multiply_floats(halves[half], times)));
        for (int i = 0; i < GROUP; i += 4)
            to[g].words[i] = narrow[i], to[g].words[i + 1] = narrow[i + 2], to[g].words[i + 2] = narrow[i + 1],
            to[g].words[i + 3] = narrow[i + 3];
        to[g].scale = most / 127;
        totals[g] = sum_of(add_floats(halves[0], halves[1]));
    }
    return to;
}
#endif

/* Adds one panel's group to the sums of some tokens. totals: the sum of each token's inputs in the group. */
ALWAYS void add_group(const int rows, const uint8_t *record, const input *x, int64_t stride, const float *totals,
                      int64_t groups, floats sum[SOME][2]) {
    floats part[SOME][2];
    multiply_codes(rows, record, x, stride, part);
    prefetch(record + 576 + AHEAD);
    #pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        floats scale = load_bf16((const uint16_t *)(record + 512) + side * 16);
        floats offset = load_bf16((const uint16_t *)(record + 576) + side * 16);
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            floats total = all_floats(totals[i * groups]), whole = part[i][side];
            if (ADDED) whole = take_product(whole, total, all_floats(ADDED));
            sum[i][side] = add_product(sum[i][side], whole, scale);
            sum[i][side] = add_product(sum[i][side], total, offset);
        }
    }
}

/* One panel for some tokens. x: [rows][groups][PER_GROUP]; totals: [rows][groups]; sums: [rows][PANEL]. */
ALWAYS void add_panel(const int rows, const struct linear *w, int64_t panel, const input *x, const float *totals,
                      float *sums) {
    int64_t groups = w->inputs / GROUP;
    const uint8_t *record = w->data + panel * groups * RECORD;
    floats sum[SOME][2];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = all_floats(0);
    for (int64_t g = 0; g < groups; g++)
        add_group(rows, record + g * RECORD, x + g * PER_GROUP, groups * PER_GROUP, totals + g, groups, sum);
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        store_floats(sums + i * PANEL, sum[i][0]);
        store_floats(sums + i * PANEL + 16, sum[i][1]);
    }
}

/* A product that a team computes. totals [tokens][groups]: see add_group. */
struct product {
    const struct linear *w;
    const input *x;
    const float *totals;
    int64_t tokens;
    uint16_t *out;
    struct shares shares;
};

#define ROWS_CASE(rows) case rows: add_panel(rows, of->w, panel, x, totals, sums); break

static void multiply_panel(const struct product *of, int64_t panel) {
    _Alignas(64) float sums[SOME * PANEL];
    for (int64_t done = 0; done < of->tokens; done += SOME) {
        int64_t rows = least(SOME, of->tokens - done);
        const int64_t groups = of->w->inputs / GROUP;
        const input *x = of->x + done * groups * PER_GROUP;
        const float *totals = of->totals + done * groups;
        switch (rows) { EVERY_ROWS(ROWS_CASE) }
        store_with_bias(of->w, sums, rows, panel, of->out + done * of->w->outputs);
    }
}

static void multiply_in_team(const struct member *me, void *given) {
    struct product *of = given;
    struct panels panels = panels_of(me, &of->shares, of->w);
    for (int64_t panel; (panel = next_panel(&panels)) < panels.count;) multiply_panel(of, panel);
}

/* As `multiply`; space: [tokens][groups] floats, and the inputs as they are multiplied. */
void multiply_int4(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint16_t *space) {
#ifdef __AMX_BF16__
    if (tokens > FEW) {
        multiply_int4_by_tiles(w, x, tokens, out, space);
        return;
    }
#endif
    int64_t groups = tokens * (w->inputs / GROUP);
    float *totals = (float *)space;
    struct product product = {w, inputs_of(x, groups, totals, totals + groups), totals, tokens, out, {{0}}};
    in_team(multiply_in_team, &product);
}
