/* Products of each head's numbers with a matrix of its own, all heads together, by a team. A token's results depend on
 * nothing but the token, as in products.c. */
#include "../heads.h"
#include "blocks.h"

struct team_product {
    const struct heads_product *of;
    struct tiling tiling;
    struct shares shares;
};

static int64_t head_bytes(int64_t inputs, int64_t tokens, int64_t planes) {
    return round_up(activation_bytes(inputs, tokens, planes), 64);
}

int64_t heads_scratch(int64_t heads, int64_t inputs, int64_t tokens, int64_t planes) {
    return heads * head_bytes(inputs, tokens, planes);
}

static void multiply_panel(const struct team_product *all, int64_t head, int64_t panel) {
    const struct heads_product *of = all->of;
    const struct expert_matrix *w = of->of;
    int64_t inputs = of->inputs, tile = all->tiling.tokens;
    const uint8_t *data = w->data[head] + panel * panel_bytes(w->format, inputs);
    const uint8_t *x = of->space + head * head_bytes(inputs, of->tokens, of->planes);
    for (int64_t done = 0; done < of->tokens; done += tile) {
        float sums[2 * TILE * LANES];
        int64_t rows = least(tile, of->tokens - done);
        panel_sums(w->format, data, inputs, rows, &all->tiling, x + bytes_before(&all->tiling, inputs, done),
                   of->x + (head * of->tokens + done) * inputs, sums);
        scale_sums(w->scales ? w->scales + head : NULL, rows, sums);
        for (int64_t i = 0; i < rows; i++)
            memcpy(of->out + ((done + i) * of->heads + head) * of->outputs + panel * LANES, sums + i * LANES, LANES * sizeof *sums);
    }
}

static void multiply_in_team(const struct member *me, void *given) {
    struct team_product *all = given;
    const struct heads_product *of = all->of;
    int64_t bytes = panel_bytes(of->of->format, of->inputs), panels = of->outputs / LANES, total = of->heads * panels, tried = 0;
    int64_t each = taken_together(me, bytes, total), count = round_up(total, each) / each;
    for (int64_t h = share_of(me, of->heads, me->number); h < share_of(me, of->heads, me->number + 1); h++) {
        struct numbers x = {of->x + h * of->tokens * of->inputs, NULL};
        if (has_numbers(of->of->format)) break;
        quantize_groups(x, of->inputs, of->tokens, &all->tiling, 0, of->inputs / GROUP,
                        of->space + h * head_bytes(of->inputs, of->tokens, of->planes));
    }
    wait_for_team(me);
    if (all->tiling.in_rows) begin_tiles(all->tiling.tokens);
    for (int64_t item; (item = take_item(me, &all->shares, count, &tried)) < count;)
        for (int64_t panel = item * each; panel < least(total, (item + 1) * each); panel++)
            multiply_panel(all, panel / panels, panel % panels);
    if (all->tiling.in_rows) end_tiles();
}

void multiply_heads(const struct heads_product *of) {
    struct team_product all = {of, tiling_of(of->tokens, of->planes), {{0}}};
    in_team(multiply_in_team, &all);
}
