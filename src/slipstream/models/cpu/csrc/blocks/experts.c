/* The feed-forward part of a mixture of experts, from the router to the sum.
 *
 * A token's bits depend on nothing but the token: logits are added in the order of the inputs; of equal logits that of
 * the smaller number comes first; what the experts give is added in ascending order of their numbers, and the shared
 * expert's last. Each expert that some token has chosen is read once, for all its tokens.
 *
 * Threads wait for each other after the logits, after the choice (and, for several tokens, after their inputs are
 * copied to the tiles of their experts, and after experts that are not in memory are packed), and between the two
 * products. 32 outputs of gate and up are quantized by the
 * thread that has computed them.
 */
#include <math.h>

#include "blocks.h"

enum {
    FEW = 8,               /* tokens whose experts are chosen by one thread, while the others wait */
    MOST_TOGETHER = 1024   /* tokens; scratch memory grows with them */
};

/* An expert and the tokens that use it, `count` from row `first` on. x, plain: their inputs as integers and as numbers;
 * gated, plain_gated: what enters the down projection. */
struct turn {
    const struct expert_set *of;
    int64_t expert, first, count;
    struct tiling tiling;
    const uint8_t *x;
    const float *plain;
    uint8_t *gated;
    float *plain_gated;
};

/* A forward of tokens, `before` of which come earlier. routed: what the router reads. absent: the experts that must be packed first. logits, scores:
 * [tokens][count, rounded up to 16], then the factor of the shared expert: [tokens]. weights, chosen: [tokens][used].
 * quantized: the tokens in tiles of one each. turns: of the routed experts, ascending, and of the shared
 * one. gathered, plain_gathered, gated, plain_gated: memory for all turns. */
struct forward {
    const struct experts *of;
    const float *x, *routed;
    int64_t tokens, before;
    int32_t *chosen;
    float *out;
    float *logits, *scores, *weights, *shared;
    int64_t *begins, *absent, num_absent, num_routed, num_turns;
    struct token_row *rows;
    struct turn *turns;
    uint8_t *quantized, *gathered, *gated;
    float *plain_gathered, *plain_gated;
    struct shares of_router, of_packing, of_inner, of_outputs;
};

static int reads_integers(const struct expert_set *of) { return !has_numbers(of->gate.format) || !has_numbers(of->up.format); }
static int reads_numbers(const struct expert_set *of) { return has_numbers(of->gate.format) || has_numbers(of->up.format); }

/* Bytes that `count` rows of inputs take in any number of tiles: with 5 or 7 tokens, a tile has a place more. */
static int64_t tile_bytes(int64_t inputs, int64_t count, int64_t planes) {
    return inputs / GROUP * group_bytes(planes, count + count / 5);
}

/* Gives a forward its scratch memory, in which every part begins at a multiple of 64; returns how many bytes it is. */
static int64_t lay_out(struct forward *f, uint8_t *space) {
    const struct experts *of = f->of;
    int64_t padded = f->tokens * round_up(of->count, LANES), routed = f->tokens * of->used, at = 0;
    int64_t shared = of->shared.inner ? f->tokens : 0, rows = routed + shared;
#define TAKE(to, bytes) (to) = (void *)(space + at), at += round_up((int64_t)(bytes), 64)
    TAKE(f->logits, padded * 4);
    TAKE(f->scores, padded * 4);
    TAKE(f->weights, routed * 4);
    TAKE(f->chosen, routed * 4);
    TAKE(f->shared, shared * 4);
    TAKE(f->begins, (of->count + 1) * 8);
    TAKE(f->absent, (of->stored ? least(of->count, routed) : 0) * 8);
    TAKE(f->rows, rows * (int64_t)sizeof *f->rows);
    TAKE(f->turns, (least(of->count, routed) + 1) * (int64_t)sizeof *f->turns);
    TAKE(f->quantized, of->hidden / GROUP * group_bytes(of->planes, f->tokens));
    TAKE(f->gathered, tile_bytes(of->hidden, rows, of->planes));
    TAKE(f->plain_gathered, rows * of->hidden * 4);
    TAKE(f->gated, tile_bytes(of->routed.inner, routed, of->planes) + tile_bytes(of->shared.inner, shared, of->planes));
    TAKE(f->plain_gated, (routed * of->routed.inner + shared * of->shared.inner) * 4);
#undef TAKE
    return at;
}

int64_t experts_scratch(const struct experts *of, int64_t tokens) {
    struct forward f = {of, .tokens = least(tokens, MOST_TOGETHER)};
    return lay_out(&f, NULL);
}

/* A panel of the router times all tokens. */
static void route_panel(const struct forward *f, int64_t panel) {
    const struct experts *of = f->of;
    const struct tiling tiling = {TILE, 1, 0};
    int64_t padded = round_up(of->count, LANES), there = least(LANES, of->count - panel * LANES);
    const uint8_t *data = of->router.data + panel * panel_bytes(of->router.format, of->hidden);
    for (int64_t done = 0; done < f->tokens; done += TILE) {
        float sums[TILE * LANES];
        int64_t rows = least(TILE, f->tokens - done);
        panel_sums(of->router.format, data, of->hidden, rows, &tiling, NULL, f->routed + done * of->hidden, sums);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t expert = panel * LANES + lane;
                float bias = lane < there && of->router_bias ? of->router_bias[expert] : 0;
                f->logits[(done + i) * padded + expert] = lane < there ? sums[i * LANES + lane] + bias : -INFINITY;
            }
    }
}

/* Puts an expert among the `count` chosen before it, which are ascending. */
static void insert(int32_t *chosen, int64_t count, int32_t expert) {
    for (; count > 0 && chosen[count - 1] > expert; count--) chosen[count] = chosen[count - 1];
    chosen[count] = expert;
}

static int is_among(const int32_t *chosen, int64_t count, int64_t expert) {
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] == expert) return 1;
    return 0;
}

/* Powers of e [padded], relative to that of the logit `most`; returns their sum. */
static float exponentials(const float *logits, int64_t padded, float most, float *scores) {
    floats sums = all_floats(0);
    for (int64_t i = 0; i < padded; i += LANES) {
        floats z = subtract_floats(load_floats(logits + i), all_floats(most));
        floats score = exponential(max_floats(min_floats(z, all_floats(88)), all_floats(-88)));
        store_floats(scores + i, score);
        sums = add_floats(sums, score);
    }
    return sum_of(sums);
}

/* What decides which experts are chosen. */
static float key_of(const struct experts *of, const float *logits, const float *scores, int64_t expert) {
    return of->choice_bias ? scores[expert] + of->choice_bias[expert] : logits[expert];
}

/* The groups from which a token's experts are chosen, a bit for each. */
static uint64_t groups_used(const struct experts *of, const float *logits, const float *scores) {
    float sums[MAX_GROUPS];
    uint64_t used = 0;
    int64_t each = of->count / of->groups;
    for (int64_t g = 0; g < of->groups; g++) {
        float most = -INFINITY, second = -INFINITY;
        for (int64_t e = g * each; e < (g + 1) * each; e++) {
            float key = key_of(of, logits, scores, e);
            if (key > most) second = most, most = key;
            else if (key > second) second = key;
        }
        sums[g] = of->is_sigmoid ? most + second : most;
    }
    for (int64_t n = 0; n < of->used_groups; n++) {
        int64_t best = -1;
        for (int64_t g = 0; g < of->groups; g++)
            if (!(used >> g & 1) && (best < 0 || sums[g] > sums[best])) best = g;
        used |= (uint64_t)1 << best;
    }
    return used;
}

/* Chooses a token's experts, unless the choice is forced, and computes their weights: NaN if a logit is not finite. */
static void choose(const struct forward *f, int64_t t) {
    const struct experts *of = f->of;
    int64_t padded = round_up(of->count, LANES), used = of->used;
    const float *logits = f->logits + t * padded;
    float *scores = f->scores + t * padded, *weights = f->weights + t * used, spoiled = 0;
    int32_t *chosen = f->chosen + t * used;
    for (int64_t e = 0; e < of->count; e++) spoiled += logits[e] * 0;
    for (int64_t i = 0; of->is_sigmoid && i < padded; i += LANES)
        store_floats(scores + i, times_sigmoid(all_floats(1), load_floats(logits + i)));
    int needs_softmax = !of->is_sigmoid && of->choice_bias; /* which the bias is added to */
    if (needs_softmax) {
        float largest = logits[0];
        for (int64_t e = 1; e < of->count; e++) largest = logits[e] > largest ? logits[e] : largest;
        float sum = exponentials(logits, padded, largest, scores);
        for (int64_t e = 0; e < of->count; e++) scores[e] /= sum;
    }
    uint64_t groups = of->used_groups < of->groups ? groups_used(of, logits, scores) : 0;
    int64_t each = groups ? of->count / of->groups : of->count;
    for (int64_t n = 0; n < used; n++) {
        int64_t best = -1;
        float most = 0;
        if (of->forced) best = of->forced[(f->before + t) % of->num_forced * used + n];
        for (int64_t e = 0; e < of->count && !of->forced; e++) {
            float key = key_of(of, logits, scores, e);
            if (groups && !(groups >> e / each & 1)) continue;
            if ((best < 0 || key > most) && !is_among(chosen, n, e)) best = e, most = key;
        }
        insert(chosen, n, (int32_t)best);
    }
    float total = 0, most = -INFINITY;
    if (!of->is_sigmoid && !needs_softmax) { /* relative to the largest logit of those whose sum divides */
        for (int64_t i = 0; i < (of->normalizes ? used : of->count); i++) {
            float logit = logits[of->normalizes ? chosen[i] : i];
            if (logit > most) most = logit;
        }
        total = exponentials(logits, padded, most, scores);
    }
    if (of->normalizes) {
        total = 0;
        for (int64_t i = 0; i < used; i++) total += scores[chosen[i]];
        total += of->floor;
    } else if (of->is_sigmoid || needs_softmax) {
        total = 1;
    }
    for (int64_t i = 0; i < used; i++) weights[i] = scores[chosen[i]] / total * of->factor + spoiled;
}

/* The factor of a token's shared expert. */
static float shared_weight(const struct experts *of, const float *x) {
    if (!of->shared_gate) return 1;
    floats sums = all_floats(0);
    for (int64_t i = 0; i < of->hidden; i += LANES)
        sums = add_product(sums, load_floats(x + i), load_floats(of->shared_gate + i));
    float gate[LANES], logit = sum_of(sums);
    store_floats(gate, times_sigmoid(all_floats(1), all_floats(logit)));
    return gate[0] + logit * 0; /* NaN and infinite numbers stay visible */
}

static void choose_for(const struct forward *f, int64_t t) {
    choose(f, t);
    if (f->of->shared.inner) f->shared[t] = shared_weight(f->of, f->x + t * f->of->hidden);
}

/* Where the memory for the next turn begins. */
struct memory {
    uint8_t *x, *gated;
    float *plain, *plain_gated;
};

/* Adds the turn of an expert, whose rows are there already. A single token's inputs need not be copied. */
static void add_turn(struct forward *f, const struct expert_set *set, int64_t expert, int64_t first, int64_t count,
                     struct memory *next) {
    int64_t hidden = f->of->hidden, planes = f->of->planes, token = f->rows[first].token;
    struct turn turn = {set, expert, first, count, tiling_of(count, planes), next->x, next->plain, next->gated, next->plain_gated};
    if (count == 1) {
        turn.x = f->quantized + token * (hidden / GROUP) * group_bytes(planes, 1), turn.plain = f->x + token * hidden;
    } else {
        next->x += activation_bytes(hidden, count, planes), next->plain += count * hidden;
    }
    next->gated += activation_bytes(set->inner, count, planes), next->plain_gated += count * set->inner;
    f->turns[f->num_turns++] = turn;
}

/* Sorts the tokens by expert, and makes the turns. */
static void sort_rows(struct forward *f) {
    const struct experts *of = f->of;
    int64_t routed = f->tokens * of->used, *begins = f->begins;
    struct memory next = {f->gathered, f->gated, f->plain_gathered, f->plain_gated};
    memset(begins, 0, (size_t)(of->count + 1) * sizeof *begins);
    for (int64_t i = 0; i < routed; i++) begins[f->chosen[i] + 1]++;
    for (int64_t e = 0; e < of->count; e++) begins[e + 1] += begins[e];
    for (int64_t i = 0; i < routed; i++)
        f->rows[begins[f->chosen[i]]++] = (struct token_row){i / of->used, f->weights[i]};
    f->num_turns = 0;
    for (int64_t e = 0, first = 0; e < of->count; first = begins[e++])
        if (begins[e] > first) add_turn(f, &of->routed, e, first, begins[e] - first, &next);
    f->num_routed = f->num_turns;
    *of->reads += f->num_routed;
    if (!of->shared.inner) return;
    for (int64_t t = 0; t < f->tokens; t++) f->rows[routed + t] = (struct token_row){t, f->shared[t]};
    add_turn(f, &of->shared, 0, routed, f->tokens, &next);
}

/* Gives each routed expert of a forward that is not in memory a slot, and lists it. */
static void claim_slots(struct forward *f) {
    const struct expert_set *set = &f->of->routed;
    struct stored_experts *stored = f->of->stored;
    struct expert_store *store = stored->store;
    const struct expert_matrix *matrices[] = {&set->gate, &set->up, &set->down};
    int64_t now = ++store->forwards;
    for (int64_t i = 0; i < f->num_routed; i++) {
        int64_t place = stored->places[f->turns[i].expert];
        if (place >= 0) store->slots[place].used = now;
    }
    f->num_absent = 0;
    for (int64_t i = 0; i < f->num_routed; i++) {
        int64_t expert = f->turns[i].expert, oldest = 0;
        if (stored->places[expert] >= 0) continue;
        for (int64_t s = 1; s < store->count; s++)
            if (store->slots[s].used < store->slots[oldest].used) oldest = s;
        struct expert_slot *slot = store->slots + oldest;
        if (slot->owner) slot->owner->places[slot->expert] = -1;
        *slot = (struct expert_slot){stored, expert, now};
        stored->places[expert] = oldest;
        const uint8_t *at = store->memory + oldest * store->bytes;
        for (int m = 0; m < 3; m++) {
            int64_t outputs = m < 2 ? set->inner : f->of->hidden, inputs = m < 2 ? f->of->hidden : set->inner;
            ((const uint8_t **)matrices[m]->data)[expert] = at, at += outputs / LANES * panel_bytes(matrices[m]->format, inputs);
        }
        f->absent[f->num_absent++] = expert;
    }
    store->packed += f->num_absent;
}

/* Packs the listed experts. Once a file could not be read, all results are NaN. */
static void pack_absent(const struct member *me, struct forward *f) {
#ifndef _WIN32
    const struct expert_set *set = &f->of->routed;
    struct stored_experts *stored = f->of->stored;
    int64_t inner = set->inner / LANES, panels = 2 * inner + f->of->hidden / LANES, count = f->num_absent * panels, tried = 0;
    for (int64_t item; (item = take_item(me, &f->of_packing, count, &tried)) < count;) {
        int64_t expert = f->absent[item / panels], panel = item % panels, m = panel < inner ? 0 : panel < 2 * inner ? 1 : 2;
        const struct expert_matrix *of = m == 0 ? &set->gate : m == 1 ? &set->up : &set->down;
        const struct expert_rows *rows = m == 0 ? &stored->gate : m == 1 ? &stored->up : &stored->down;
        int64_t inputs = m < 2 ? f->of->hidden : set->inner;
        panel -= m * inner;
        struct file_piece piece = {
            of->format, LANES, inputs, rows->start + expert * rows->step + panel * LANES * row_bytes(of->format, inputs),
            (uint8_t *)of->data[expert] + panel * panel_bytes(of->format, inputs),
        };
        enum packed packed = pack_piece((int)rows->file, &piece);
        if (packed != PACKED) atomic_store(&stored->store->failed, packed == UNREAD ? 1 : 2);
    }
    wait_for_team(me);
#endif
    if (!atomic_load(&f->of->stored->store->failed)) return;
    int64_t routed = f->tokens * f->of->used, end = share_of(me, routed, me->number + 1);
    for (int64_t i = share_of(me, routed, me->number); i < end; i++) f->rows[i].weight = NAN;
    wait_for_team(me);
}

/* Copies the inputs of each turn to its own memory. */
static void gather_all(const struct member *me, const struct forward *f) {
    int64_t hidden = f->of->hidden, groups = hidden / GROUP;
    int64_t first = share_of(me, groups, me->number) * GROUP, end = share_of(me, groups, me->number + 1) * GROUP;
    for (const struct turn *turn = f->turns; turn < f->turns + f->num_turns; turn++) {
        const struct token_row *rows = f->rows + turn->first;
        if (turn->count == 1) continue;
        if (reads_integers(turn->of))
            gather(me, f->quantized, hidden, rows, turn->count, &turn->tiling, (uint8_t *)turn->x);
        for (int64_t i = 0; i < turn->count && reads_numbers(turn->of); i++)
            memcpy((float *)turn->plain + i * hidden + first, f->x + rows[i].token * hidden + first, (size_t)(end - first) * 4);
    }
    wait_for_team(me);
}

static floats activated(const struct experts *of, floats gate, floats up) {
    floats limit = all_floats(of->limit), lowest = all_floats(-of->limit);
    gate = min_floats(limit, gate), up = max_floats(lowest, min_floats(limit, up)); /* NaN, if the second, stays */
    floats z = multiply_floats(gate, add_product(all_floats(of->slope), multiply_floats(gate, gate), all_floats(of->cubic)));
    return multiply_floats(times_sigmoid(gate, z), add_floats(up, all_floats(of->shift)));
}

/* Sums of a tile [rows][LANES] with a panel of an expert's matrix, plus the bias. */
static void multiply_tile(const struct expert_matrix *of, int64_t outputs, int64_t inputs, int64_t panel, int64_t rows,
                          const struct turn *turn, const uint8_t *x, const float *plain, float *sums) {
    const uint8_t *data = of->data[turn->expert] + panel * panel_bytes(of->format, inputs);
    panel_sums(of->format, data, inputs, rows, &turn->tiling, x, plain, sums);
    scale_sums(of->scales ? of->scales + turn->expert : NULL, rows, sums);
    if (!of->bias) return;
    floats bias = load_floats(of->bias + turn->expert * outputs + panel * LANES);
    for (int64_t i = 0; i < rows; i++) store_floats(sums + i * LANES, add_floats(load_floats(sums + i * LANES), bias));
}

/* Computes 32 of the numbers that enter an expert's down projection, for all its tokens. */
static void gate_group(const struct forward *f, const struct turn *turn, int64_t group) {
    static const float none[GROUP] = {0};
    const struct expert_set *set = turn->of;
    const struct tiling *tiling = &turn->tiling;
    int64_t inner = set->inner, hidden = f->of->hidden;
    for (int64_t done = 0; done < turn->count; done += tiling->tokens) {
        float gates[2 * TILE * LANES], ups[2 * TILE * LANES], gated[2 * TILE * GROUP];
        const uint8_t *x = turn->x + bytes_before(tiling, hidden, done);
        const float *plain = turn->plain + done * hidden;
        int64_t rows = least(tiling->tokens, turn->count - done);
        for (int64_t half = 0; half < 2; half++) {
            multiply_tile(&set->gate, inner, hidden, 2 * group + half, rows, turn, x, plain, gates);
            multiply_tile(&set->up, inner, hidden, 2 * group + half, rows, turn, x, plain, ups);
            for (int64_t i = 0; i < rows; i++)
                store_floats(gated + i * GROUP + half * LANES,
                             activated(f->of, load_floats(gates + i * LANES), load_floats(ups + i * LANES)));
        }
        if (has_numbers(set->down.format)) {
            for (int64_t i = 0; i < rows; i++)
                memcpy(turn->plain_gated + (done + i) * inner + group * GROUP, gated + i * GROUP, GROUP * sizeof *gated);
            continue;
        }
        int64_t all = tiling->in_rows ? tiling->tokens : places(rows);
        int64_t bytes = tiling->in_rows ? tile_group_bytes(all) : group_bytes(tiling->planes, all);
        uint8_t *to = turn->gated + bytes_before(tiling, inner, done) + group * bytes;
        for (int64_t i = 0; i < all; i++)
            quantize_group((struct numbers){i < rows ? gated + i * GROUP : none, NULL}, 0, tiling, (int)i, (int)all, to);
    }
}

/* How many groups of a set's inner numbers a thread takes together, and how many such portions there are. */
struct portions {
    int64_t groups, each, count;
};
static struct portions portions_of(const struct member *me, const struct forward *f, const struct expert_set *of, int64_t turns) {
    int64_t groups = of->inner / GROUP;
    int64_t bytes = 2 * (panel_bytes(of->gate.format, f->of->hidden) + panel_bytes(of->up.format, f->of->hidden));
    int64_t each = taken_together(me, bytes, groups * turns);
    return (struct portions){groups, each, round_up(groups, each) / each};
}

static void gate_all(const struct member *me, struct forward *f) {
    struct portions routed = portions_of(me, f, &f->of->routed, f->num_routed), shared = {0, 1, 0};
    if (f->of->shared.inner) shared = portions_of(me, f, &f->of->shared, 1);
    int64_t before = f->num_routed * routed.count, count = before + shared.count, tried = 0;
    for (int64_t item; (item = take_item(me, &f->of_inner, count, &tried)) < count;) {
        const struct turn *turn = f->turns + (item < before ? item / routed.count : f->num_routed);
        const struct portions *in = item < before ? &routed : &shared;
        int64_t first = (item < before ? item % routed.count : item - before) * in->each, end = least(in->groups, first + in->each);
        if (turn->tiling.in_rows) begin_tiles(turn->tiling.tokens);
        for (int64_t group = first; group < end; group++) gate_group(f, turn, group);
        if (turn->tiling.in_rows) end_tiles();
    }
    wait_for_team(me);
}

/* 16 outputs of all tokens: the sum over their experts. */
static void sum_panel(const struct forward *f, int64_t panel) {
    int64_t hidden = f->of->hidden;
    for (int64_t t = 0; t < f->tokens; t++) store_floats(f->out + t * hidden + panel * LANES, all_floats(0));
    for (const struct turn *turn = f->turns; turn < f->turns + f->num_turns; turn++) {
        int64_t inner = turn->of->inner, tile = turn->tiling.tokens;
        if (turn->tiling.in_rows) begin_tiles(tile);
        for (int64_t done = 0; done < turn->count; done += tile) {
            float sums[2 * TILE * LANES];
            int64_t rows = least(tile, turn->count - done);
            multiply_tile(&turn->of->down, hidden, inner, panel, rows, turn, turn->gated + bytes_before(&turn->tiling, inner, done),
                          turn->plain_gated + done * inner, sums);
            for (int64_t i = 0; i < rows; i++) {
                const struct token_row *row = f->rows + turn->first + done + i;
                float *out = f->out + row->token * hidden + panel * LANES;
                store_floats(out, add_product(load_floats(out), load_floats(sums + i * LANES), all_floats(row->weight)));
            }
        }
        if (turn->tiling.in_rows) end_tiles();
    }
}

static void sum_all(const struct member *me, struct forward *f) {
    int64_t panels = f->of->hidden / LANES, bytes = 0, tried = 0;
    for (int64_t i = 0; i < f->num_turns; i++) bytes += panel_bytes(f->turns[i].of->down.format, f->turns[i].of->inner);
    int64_t each = taken_together(me, bytes, panels), count = round_up(panels, each) / each;
    for (int64_t item; (item = take_item(me, &f->of_outputs, count, &tried)) < count;)
        for (int64_t panel = item * each; panel < least(panels, (item + 1) * each); panel++) sum_panel(f, panel);
}

static void compute_experts(const struct member *me, void *given) {
    struct forward *f = given;
    int64_t panels = round_up(f->of->count, LANES) / LANES, tried = 0;
    for (int64_t item; (item = take_item(me, &f->of_router, panels, &tried)) < panels;) route_panel(f, item);
    if (reads_integers(&f->of->routed) || (f->of->shared.inner && reads_integers(&f->of->shared))) {
        const struct tiling singly = {1, f->of->planes, 0};
        quantize(me, (struct numbers){f->x, NULL}, f->of->hidden, f->tokens, &singly, f->quantized); /* waits at its end */
    } else {
        wait_for_team(me);
    }
    if (f->tokens > FEW) {
        int64_t end = share_of(me, f->tokens, me->number + 1);
        for (int64_t t = share_of(me, f->tokens, me->number); t < end; t++) choose_for(f, t);
        wait_for_team(me);
    }
    if (me->number == 0) {
        for (int64_t t = 0; t < f->tokens && f->tokens <= FEW; t++) choose_for(f, t);
        sort_rows(f);
        if (f->of->stored) claim_slots(f);
    }
    wait_for_team(me);
    if (f->of->stored && (f->num_absent || atomic_load(&f->of->stored->store->failed))) pack_absent(me, f);
    if (f->tokens > 1) gather_all(me, f);
    gate_all(me, f);
    sum_all(me, f);
}

void multiply_experts(const struct experts *of, const float *x, const float *routed, int64_t tokens, int32_t *chosen,
                      float *out, uint8_t *space) {
    routed = routed ? routed : x;
    for (int64_t done = 0; done < tokens; done += MOST_TOGETHER) {
        int64_t count = least(MOST_TOGETHER, tokens - done), start = done * of->hidden;
        struct forward f = {of, x + start, routed + start, .tokens = count, .before = done, .out = out + start};
        lay_out(&f, space);
        in_team(compute_experts, &f);
        if (chosen) memcpy(chosen + done * of->used, f.chosen, (size_t)(count * of->used) * sizeof *chosen);
    }
}
