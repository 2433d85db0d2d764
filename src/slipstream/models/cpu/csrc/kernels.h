/* Shared by the kernels for bfloat16 weights. */
#pragma once

#include <string.h>

#include "bfloat16.h"
#include "structs.h"
#include "team.h"

/* out [tokens][outputs] = x [tokens][inputs] times the weights, plus the bias. space: SPACE * tokens * (the inputs,
 * rounded up to a multiple of BLOCK) numbers. */
void multiply(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint16_t *space);

void attend(const struct layer *layer, const struct kv_cache *m, const uint16_t *heads, int64_t tokens, uint16_t *out,
            void *space);

/* The panels of a product that a thread multiplies. Each item of `take_item` is `at_a_time` successive panels. */
struct panels {
    const struct member *me;
    struct shares *shares;
    int64_t count, at_a_time, tried, next, end;
};

static inline struct panels panels_of(const struct member *me, struct shares *shares, const struct linear *w) {
    int64_t count = (w->outputs + PANEL - 1) / PANEL;
    return (struct panels){me, shares, count, taken_together(me, w->inputs / 4 * QUAD, count), 0, 0, 0};
}

/* The next panel, `count` if there is none. */
static inline int64_t next_panel(struct panels *of) {
    if (of->next == of->end) {
        int64_t items = (of->count + of->at_a_time - 1) / of->at_a_time;
        of->next = take_item(of->me, of->shares, items, &of->tried) * of->at_a_time;
        if (of->next >= of->count) return of->next = of->end = of->count;
        of->end = least(of->next + of->at_a_time, of->count);
    }
    return of->next++;
}

/* Stores the sums [rows][PANEL] of a panel plus the bias, rounded once. */
static inline void store_with_bias(const struct linear *w, const float *sums, int64_t rows, int64_t panel, uint16_t *out) {
    int64_t first = panel * PANEL, there = least(PANEL, w->outputs - first);
    uint16_t bias[PANEL] = {0}, rounded[PANEL];
    if (w->bias) memcpy(bias, w->bias + first, there * sizeof *bias);
    for (int64_t i = 0; i < rows; i++) {
        uint16_t *to = out + i * w->outputs + first, *into = there == PANEL ? to : rounded;
        store_bf16(into, add_floats(load_floats(sums + i * PANEL), load_bf16(bias)));
        store_bf16(into + 16, add_floats(load_floats(sums + i * PANEL + 16), load_bf16(bias + 16)));
        if (there < PANEL) memcpy(to, rounded, there * sizeof *to);
    }
}
