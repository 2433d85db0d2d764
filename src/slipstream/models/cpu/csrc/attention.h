/* Attention of new tokens over the KV cache of their slots, for layer.c and blocks/float_layer.c.
 *
 * The query heads of a few neighbouring tokens that share a key head go through the cache together, 32 positions at a
 * time, with a running maximum and sum of the exponentials (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
 * 2022, arXiv:2205.14135, section 3.1). Positions are divided at multiples of 32 and masked ones count 0, so the bits
 * of a query depend neither on its neighbours nor on the length of the cache.
 *
 * To be defined before: `number`, of the cache and of heads; layer_type and cache_type; NUMBERS_ARE_FLOATS; LOWEST, the
 * exponent of the smallest weight; load_number and store_number, of 16 numbers.
 */
#include <math.h>
#include <string.h>

enum {
    KEYS = 32,     /* positions at a time */
    QUERIES = 48,  /* of a group, at most, unless one token has more */
    TOGETHER = 4   /* queries whose products are computed side by side */
};

/* The positions that a group sees: from `fork` on those at the places of `path`, before it those of their own number. */
struct branch {
    int64_t fork;
    const int64_t *path;
};

/* Copies numbers [size] of positions `start` to `last`, at most KEYS of them, from where they stand. */
static inline void collect(const number *from, struct branch branch, int64_t start, int64_t last, int64_t size, number *to) {
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t position = start + i;
        if (position > last)
            memset(to + i * size, 0, size * sizeof *to);
        else
            memcpy(to + i * size, from + (position < branch.fork ? position : branch.path[position - branch.fork]) * size,
                   size * sizeof *to);
    }
}

#if defined(__AVX512BF16__) && !NUMBERS_ARE_FLOATS
#include "attention_pairs.h"
#else
#include "attention_floats.h"
#endif

/* Softmax weights of the positions from `start` on for one query with these products; earlier sums are rescaled. */
static void update_softmax(struct query *q, int64_t start, int64_t size, floats left, floats right) {
    int64_t from = q->first - start, to = q->last - start;
    if (to < 0 || from >= KEYS) {
        memset(q->weights, 0, sizeof q->weights);
        return;
    }
    int begins = (int)(from < 0 ? 0 : from), ends = (int)(to < KEYS - 1 ? to : KEYS - 1);
    floats none = all_floats(-INFINITY), zero = all_floats(0);
    left = only_lanes(left, begins, ends, none), right = only_lanes(right, begins - 16, ends - 16, none);
    float most = largest(max_floats(left, right));
    if (!(most > q->most)) most = q->most;
    floats lowest = all_floats(LOWEST), top = all_floats(most);
    /* of a number and NaN `max_floats` gives the second: a score that is NaN makes the result NaN, too */
    left = exponential(max_floats(lowest, subtract_floats(left, top)));
    right = exponential(max_floats(lowest, subtract_floats(right, top)));
    left = only_lanes(left, begins, ends, zero), right = only_lanes(right, begins - 16, ends - 16, zero);
    floats rest = exponential(max_floats(lowest, all_floats(q->most - most)));
    float first[16];
    store_floats(first, rest);
    q->sum = q->sum * first[0] + sum_of(add_floats(left, right));
    q->most = most;
    store_weights(q, left, right);
    for (int64_t i = 0; i < size; i += 16) store_floats(q->out + i, multiply_floats(load_floats(q->out + i), rest));
}

/* Whether each of some queries sees all `there` positions from `start` on. */
static int all_see(int count, const struct query *q, int64_t start, int64_t there) {
    for (int i = 0; i < count; i++)
        if (q[i].first > start || q[i].last + 1 < start + there) return 0;
    return 1;
}

/* `gather_values` of each query by itself, from no other positions than those it sees: 0 times infinity is not 0. */
static __attribute__((noinline)) void gather_seen(int count, struct query *q, int64_t start, int64_t there, int64_t size,
                                                  const struct tile *tile) {
    struct tile seen;
    for (int i = 0; i < count; i++) {
        copy_values(tile, there, size, &seen);
        for (int64_t key = 0; key < there; key++)
            if (start + key < q[i].first || start + key > q[i].last) clear_values(&seen, key, size);
        gather_values(1, q + i, there, size, &seen);
    }
}

/* Products of some queries with 32 keys, the weights that follow, and the weighted values of the first `there`. */
ALWAYS void attend_tile(const int count, struct query *q, int64_t start, int64_t there, int64_t size,
                        const struct tile *tile, int all_finite, float scaling) {
    floats sum[TOGETHER][2], by = all_floats(scaling);
    score(count, q, size, tile, sum);
    for (int i = 0; i < count; i++)
        update_softmax(q + i, start, size, multiply_floats(sum[i][0], by), multiply_floats(sum[i][1], by));
    if (all_finite || all_see(count, q, start, there))
        gather_values(count, q, there, size, tile);
    else
        gather_seen(count, q, start, there, size, tile);
}

/* Attention of all queries of a group over the positions that any of them sees. */
static void attend_positions(struct query *group, int count, const number *keys, const number *values, int64_t size,
                             float scaling, struct branch branch) {
    struct tile tile;
    int64_t first = group[0].first, last = group[count - 1].last;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        int64_t there = last + 1 - start < KEYS ? last + 1 - start : KEYS;
        fill_tile(&tile, keys, values, branch, start, last, size);
        int all_finite = all_see(count, group, start, there) || values_are_finite(&tile, there, size);
        for (int i = 0; i < count; i += TOGETHER)
            switch (count - i) {
                case 1: attend_tile(1, group + i, start, there, size, &tile, all_finite, scaling); break;
                case 2: attend_tile(2, group + i, start, there, size, &tile, all_finite, scaling); break;
                case 3: attend_tile(3, group + i, start, there, size, &tile, all_finite, scaling); break;
                default: attend_tile(4, group + i, start, there, size, &tile, all_finite, scaling);
            }
    }
}

/* A forward's attention. groups: [count] first token and number of tokens; next: the unit that nobody has taken yet. */
struct attention {
    const layer_type *layer;
    const cache_type *cache;
    const number *heads;
    int64_t tokens, count;
    number *out;
    int64_t *groups;
    _Atomic int64_t next;
};

/* Attention of `count` tokens from number `token` on, neighbours in one slot, for one key head. */
static void attend_group(const struct attention *of, int64_t token, int64_t count, int64_t head) {
    const layer_type *layer = of->layer;
    const cache_type *m = of->cache;
    int64_t size = layer->size, repeats = layer->heads / layer->key_heads, all = layer->heads + 2 * layer->key_heads;
    struct query group[QUERIES > (int)MAX_SHARED_HEADS ? QUERIES : (int)MAX_SHARED_HEADS];
    for (int64_t t = 0; t < count; t++)
        for (int64_t r = 0; r < repeats; r++) {
            struct query *q = group + t * repeats + r;
            int64_t position = m->positions[token + t];
            set_numbers(q, of->heads + ((token + t) * all + head * repeats + r) * size, size);
            q->first = m->window && position >= m->window ? position - m->window + 1 : 0, q->last = position;
            q->most = -INFINITY, q->sum = 0;
            memset(q->out, 0, size * sizeof *q->out);
        }
    int64_t start = (m->slots[token] * layer->key_heads + head) * m->length * size;
    struct branch branch = {0, NULL};
    if (m->forks && m->forks[token] <= m->positions[token + count - 1])
        branch.fork = m->forks[token], branch.path = m->paths + m->begins[token];
    attend_positions(group, (int)(count * repeats), m->keys + start, m->values + start, size, m->scaling, branch);
    for (int64_t t = 0; t < count; t++)
        for (int64_t r = 0; r < repeats; r++)
            store_head(group + t * repeats + r, size, of->out + ((token + t) * layer->heads + head * repeats + r) * size);
}

static void write_token(const struct attention *of, int64_t t) {
    const cache_type *m = of->cache;
    int64_t shared = of->layer->key_heads, heads = of->layer->heads, size = of->layer->size;
    for (int64_t h = 0; h < shared; h++) {
        int64_t to = ((m->slots[t] * shared + h) * m->length + m->places[t]) * size;
        const number *own = of->heads + (t * (heads + 2 * shared) + heads + h) * size;
        memcpy(m->keys + to, own, size * sizeof *own);
        memcpy(m->values + to, own + shared * size, size * sizeof *own);
    }
}

static void attend_in_team(const struct member *me, void *given) {
    struct attention *of = given;
    int64_t shared = of->layer->key_heads, end = share_of(me, of->tokens, me->number + 1);
    for (int64_t t = share_of(me, of->tokens, me->number); t < end; t++) write_token(of, t);
    wait_for_team(me);
    for (int64_t unit; (unit = take(&of->next)) < of->count * shared;) {
        const int64_t *group = of->groups + unit / shared * 2;
        attend_group(of, group[0], group[1], unit % shared);
    }
}

/* Writes the keys and values of new tokens to the cache and attends. heads [tokens][heads + 2 * key_heads][size] as
 * `project_qkv_rope` makes them -> out [tokens][heads][size]. groups: space for 2 * tokens numbers. */
void attend(const layer_type *layer, const cache_type *m, const number *heads, int64_t tokens, number *out,
            int64_t *groups) {
    int64_t most = QUERIES * layer->key_heads / layer->heads > 1 ? QUERIES * layer->key_heads / layer->heads : 1;
    int64_t count = 0;
    for (int64_t t = 0; t < tokens; t++) {
        int64_t *now = groups + 2 * count;
        int follows = t && m->slots[t] == m->slots[t - 1] && m->positions[t] == m->positions[t - 1] + 1 &&
                      (!m->forks || (m->forks[t] == m->forks[t - 1] && m->begins[t] == m->begins[t - 1]));
        if (count && now[-1] < most && follows)
            now[-1]++;
        else
            now[0] = t, now[1] = 1, count++;
    }
    struct attention attention = {layer, m, heads, tokens, count, out, groups, 0};
    in_team(attend_in_team, &attention);
}
