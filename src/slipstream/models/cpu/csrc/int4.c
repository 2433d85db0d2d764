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
#include "int4_pairs.h"
#else
#include "int4_dots.h"
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
    const struct product *of = given;
    int64_t panels = (of->w->outputs + PANEL - 1) / PANEL, end = share_of(me, panels, me->number + 1);
    for (int64_t panel = share_of(me, panels, me->number); panel < end; panel++) multiply_panel(of, panel);
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
    struct product product = {w, inputs_of(x, groups, totals, totals + groups), totals, tokens, out};
    in_team(multiply_in_team, &product);
}
