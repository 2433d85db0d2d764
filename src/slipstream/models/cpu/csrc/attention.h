/* Attention of a forward's tokens over the KV cache of their slots, for layer.c and blocks/float_layer.c.
 *
 * The query heads of a few neighboring tokens that share a key head go through the cache together, 32 positions at a
 * time, with a running maximum and sum of the exponentials (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
 * 2022, arXiv:2205.14135, section 3.1). Each stretch of 512 positions is summed on its own, and the sums are joined in
 * order, so that threads can share a long text (Dao et al. 2023, "Flash-Decoding"). Positions are divided at multiples
 * of 32 and of 512 and masked ones count 0, so the bits of a query depend neither on its neighbors, nor on the length
 * of the cache, nor on the number of threads.
 *
 * The file that includes this one defines before: `number`, the type of the numbers in heads; layer_type;
 * NUMBERS_ARE_FLOATS, whether it is float32, with a cache of float16, or else bfloat16, as in the cache; LOWEST, the
 * exponent of the smallest weight; load_number and store_number, of 16 numbers.
 */
#include <math.h>
#include <string.h>

enum {
    KEYS = 32,            /* positions at a time */
    STRETCH = 512,        /* positions that are summed on their own, a multiple of KEYS */
    QUERIES = 48,         /* most queries of a group, unless one token has more */
    TOGETHER = 4,         /* queries whose products are computed side by side */
    UNITS = 8,            /* units of work per thread: if groups times key heads are as many, threads share no text */
    LOADED = 2,           /* loading the keys and values of a group takes as long as this many queries */
    MOST_SUMS = 1 << 22   /* most numbers kept of the stretches' sums, 16 MB; with more, threads share no text */
};

/* Numbers of a head's values, and of its keys in the cache before those that are in the place of values; see `latent`. */
static inline int64_t values_of(const layer_type *layer) { return layer->latent ? layer->latent->rank : layer->size; }

/* Heads of a token's numbers: queries, then keys and values or, of latent attention, one key; queries alone where those
 * of another layer are read. */
static inline int64_t heads_of_token(const layer_type *layer) {
    return layer->heads + (layer->reuses_keys ? 0 : layer->latent ? 1 : 2 * layer->key_heads);
}

/* The places of the positions that a group sees: from `fork` on those in `path`, before it the position itself. */
struct branch {
    int64_t fork;
    const int64_t *path;
};

static inline int64_t place_of(int64_t position, struct branch branch) {
    return branch.path && position >= branch.fork ? branch.path[position - branch.fork] : position;
}

/* 16 numbers of the cache, and the numbers [size] of a head to be kept there. */
#if NUMBERS_ARE_FLOATS
static inline floats load_cached(const uint16_t *from) { return load_halves((const uint8_t *)from); }
static inline void to_cache(uint16_t *to, const float *head, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store_halves(to + i, load_floats(head + i));
}
#else
static inline floats load_cached(const uint16_t *from) { return load_bf16(from); }
static inline void to_cache(uint16_t *to, const uint16_t *head, int64_t size) { memcpy(to, head, size * sizeof *to); }
#endif

/* Prefetches a line of 64 bytes into the core's L2 cache: computing with 32 positions takes about as long as fetching the
 * next 32. The line may lie past the last position. */
static inline void prefetch_line(const uint16_t *from, int64_t number) { __builtin_prefetch(from + number * 32, 0, 2); }

#if defined(__AVX512BF16__) && !NUMBERS_ARE_FLOATS
#include "attention_pairs.h"
#else
#include "attention_floats.h"
#endif

/* Computes a query's softmax weights of KEYS positions, from `start` on, from its products with their keys, and
 * rescales its sums of earlier positions. */
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
    /* if one number is NaN, `max_floats` returns the second: so a score that is NaN makes the result NaN */
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

/* `gather_values` for each query by itself, over no positions but those it sees: 0 times infinity is not 0. */
static __attribute__((noinline)) void gather_seen(int count, struct query *q, int64_t start, int64_t there, int64_t size,
                                                  const struct tile *tile, const uint16_t *next) {
    struct tile seen;
    for (int i = 0; i < count; i++) {
        copy_values(tile, there, size, &seen);
        for (int64_t key = 0; key < there; key++)
            if (start + key < q[i].first || start + key > q[i].last) clear_values(&seen, key, size);
        gather_values(1, q + i, there, size, &seen, next);
    }
}

/* Products with keys after the layer's cap: cap * tanh(x / cap). NaN stays NaN. */
static floats capped(floats x, float cap) {
    floats z = max_floats(all_floats(-86), min_floats(all_floats(88), multiply_floats(x, all_floats(2 / cap))));
    floats rest = divide_floats(all_floats(2), add_floats(all_floats(1), exponential(z)));
    return multiply_floats(all_floats(cap), subtract_floats(all_floats(1), rest));
}

/* A head's keys and values in the cache. size, values_size: numbers of a key and of a value. If latent, keys hold the
 * values, which are the beginning of each key, and values the rest of each key. */
struct cached {
    const uint16_t *keys, *values;
    int64_t size, values_size;
    int latent;
};

static void fill_tile(struct tile *tile, const struct cached *of, struct branch branch, int64_t start, int64_t last) {
    int64_t size = of->size, first = of->values_size, rest = size - first;
    if (of->latent) {
        fill_keys(tile, of->keys, branch, start, last, first, 0);
        fill_keys(tile, of->values, branch, start, last, rest, first);
        fill_values(tile, of->keys, branch, start, last, first);
    } else {
        fill_keys(tile, of->keys, branch, start, last, size, 0);
        fill_values(tile, of->values, branch, start, last, size);
    }
}

/* Adds 32 positions, of which the first `there` exist, to the sums of some queries: products with keys, then weights,
 * then weighted values. */
ALWAYS void attend_tile(const int count, struct query *q, int64_t start, int64_t there, const struct cached *of,
                        const struct tile *tile, int all_finite, float scaling, float cap) {
    floats sum[TOGETHER][2], by = all_floats(scaling);
    int64_t size = of->values_size, key_size = of->latent ? size : of->size, value_size = of->latent ? of->size - size : size;
    const uint16_t *next_keys = of->keys + (start + KEYS) * key_size, *next_values = of->values + (start + KEYS) * value_size;
    score(count, q, of->size, tile, next_keys, sum);
    for (int i = 0; i < count; i++) {
        floats left = multiply_floats(sum[i][0], by), right = multiply_floats(sum[i][1], by);
        if (cap != 0) left = capped(left, cap), right = capped(right, cap);
        update_softmax(q + i, start, size, left, right);
    }
    if (all_finite || all_see(count, q, start, there))
        gather_values(count, q, there, size, tile, next_values);
    else
        gather_seen(count, q, start, there, size, tile, next_values);
}

/* Attention of all queries of a group over the positions from `first` to `last`. */
static void attend_positions(struct query *group, int count, const struct cached *of, float scaling, float cap,
                             struct branch branch, int64_t first, int64_t last) {
    struct tile tile;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        int64_t there = last + 1 - start < KEYS ? last + 1 - start : KEYS;
        fill_tile(&tile, of, branch, start, last);
        int all_finite = all_see(count, group, start, there) || values_are_finite(&tile, there, of->values_size);
        for (int i = 0; i < count; i += TOGETHER)
            switch (count - i) {
                case 1: attend_tile(1, group + i, start, there, of, &tile, all_finite, scaling, cap); break;
                case 2: attend_tile(2, group + i, start, there, of, &tile, all_finite, scaling, cap); break;
                case 3: attend_tile(3, group + i, start, there, of, &tile, all_finite, scaling, cap); break;
                default: attend_tile(4, group + i, start, there, of, &tile, all_finite, scaling, cap);
            }
    }
}

/* Numbers of a query's sums of a stretch: the weighted values, the largest score and the sum of the weights. */
static int64_t sums_of(int64_t size) { return size + 16; }

static void keep_sums(const struct query *q, int64_t size, float *to) {
    memcpy(to, q->out, size * sizeof *to);
    to[size] = q->most, to[size + 1] = q->sum;
}

static void restore_sums(struct query *q, int64_t size, const float *from) {
    memcpy(q->out, from, size * sizeof *from);
    q->most = from[size], q->sum = from[size + 1];
}

/* Adds the sums of a later stretch to those of all before. */
static void join_sums(float *whole, const float *later, int64_t size) {
    float most = whole[size] > later[size] ? whole[size] : later[size], first[16], second[16];
    floats lowest = all_floats(LOWEST);
    floats by = exponential(max_floats(lowest, all_floats(whole[size] - most)));
    floats by_later = exponential(max_floats(lowest, all_floats(later[size] - most)));
    for (int64_t i = 0; i < size; i += 16) {
        floats one = multiply_floats(load_floats(whole + i), by), other = multiply_floats(load_floats(later + i), by_later);
        store_floats(whole + i, add_floats(one, other));
    }
    store_floats(first, by), store_floats(second, by_later);
    whole[size + 1] = whole[size + 1] * first[0] + later[size + 1] * second[0];
    whole[size] = most;
}

/* Whether a query sees positions of a stretch, and whether they are the first that it sees. */
static int sees(const struct query *q, int64_t stretch) { return q->first / STRETCH <= stretch && stretch <= q->last / STRETCH; }
static int is_first(const struct query *q, int64_t stretch) { return q->first / STRETCH == stretch; }

/* Neighboring tokens of one slot that go through the cache together, and the stretches of the positions that any of
 * them sees. before, sums_before: how many stretches and numbers of sums all earlier groups have. */
struct group {
    int64_t token, count, stretch, stretches, before, sums_before;
};

/* A forward's attention. next: the unit of work that no thread has taken yet. sums: of stretches, so that threads can
 * share a text, for each group [key heads][stretches][queries]; NULL if they are not kept. done [groups][key heads]:
 * how many stretches have their sums. shared: key heads or, of latent attention, parts of the query heads, which threads
 * share. */
struct attention {
    const layer_type *layer;
    const struct kv_cache *cache;
    const number *heads;
    int64_t tokens, count, shared;
    number *out;
    struct group *groups;
    float *sums;
    _Atomic int64_t *done, next;
};

/* The queries of a group that share a key head, and the keys and values that they attend to. */
struct work {
    struct query queries[QUERIES > (int)MAX_SHARED_HEADS ? QUERIES : (int)MAX_SHARED_HEADS];
    int count;
    struct cached cached;
    struct branch branch;
};

static void begin_work(const struct attention *of, const struct group *group, int64_t head, struct work *work) {
    const layer_type *layer = of->layer;
    const struct kv_cache *m = of->cache;
    int64_t size = layer->size, values = values_of(layer), repeats = layer->heads / of->shared, all = heads_of_token(layer);
    int64_t token = group->token, start = layer->latent ? m->slots[token] : m->slots[token] * of->shared + head;
    work->count = (int)(group->count * repeats);
    for (int64_t i = 0; i < work->count; i++) {
        struct query *q = work->queries + i;
        int64_t query_token = token + i / repeats, position = m->positions[query_token];
        set_numbers(q, of->heads + (query_token * all + head * repeats + i % repeats) * size, size);
        q->first = m->window && position >= m->window ? position - m->window + 1 : 0, q->last = position;
    }
    start *= m->length;
    work->cached = (struct cached){m->keys + start * values, m->values + start * (layer->latent ? size - values : size), size,
                                   values, layer->latent != NULL};
    work->branch = (struct branch){0, NULL};
    if (m->forks && m->forks[token] <= m->positions[token + group->count - 1])
        work->branch = (struct branch){m->forks[token], m->paths + m->begins[token]};
}

static void attend_stretch(const struct attention *of, struct work *work, int64_t stretch) {
    int64_t size = values_of(of->layer), first = work->queries[0].first, last = work->queries[work->count - 1].last;
    for (struct query *q = work->queries; q < work->queries + work->count; q++) {
        q->most = -INFINITY, q->sum = 0;
        memset(q->out, 0, size * sizeof *q->out);
    }
    if (first < stretch * STRETCH) first = stretch * STRETCH;
    if (last >= (stretch + 1) * STRETCH) last = (stretch + 1) * STRETCH - 1;
    attend_positions(work->queries, work->count, &work->cached, of->cache->scaling, of->layer->soft_cap, work->branch, first,
                     last);
}

/* Counts a head's sink among the scores: the sum of the weights grows, and the values' does not. */
static void add_sink(struct query *q, float sink, int64_t size) {
    float most = q->most > sink ? q->most : sink, first[16], second[16];
    floats lowest = all_floats(LOWEST), rest = exponential(max_floats(lowest, all_floats(q->most - most)));
    store_floats(first, rest), store_floats(second, exponential(max_floats(lowest, all_floats(sink - most))));
    q->sum = q->sum * first[0] + second[0];
    for (int64_t i = 0; i < size; i += 16) store_floats(q->out + i, multiply_floats(load_floats(q->out + i), rest));
}

static void end_work(const struct attention *of, const struct group *group, int64_t head, struct work *work) {
    int64_t size = values_of(of->layer), heads = of->layer->heads, repeats = heads / of->shared;
    for (int64_t i = 0; i < work->count; i++) {
        int64_t query_head = head * repeats + i % repeats, place = (group->token + i / repeats) * heads + query_head;
        if (of->layer->sinks) add_sink(work->queries + i, of->layer->sinks[query_head], size);
        store_head(work->queries + i, size, of->out + place * size);
    }
}

/* All stretches of a group, for one key head. */
static void attend_group(const struct attention *of, const struct group *group, int64_t head) {
    struct work work;
    float whole[sizeof work.queries / sizeof *work.queries][MAX_HEAD_SIZE + 16], now[MAX_HEAD_SIZE + 16];
    int64_t size = values_of(of->layer), end = group->stretch + group->stretches;
    begin_work(of, group, head, &work);
    for (int64_t stretch = group->stretch; stretch < end; stretch++) {
        attend_stretch(of, &work, stretch);
        for (int i = 0; i < work.count && group->stretches > 1; i++) {
            struct query *q = work.queries + i;
            if (!sees(q, stretch)) continue;
            keep_sums(q, size, is_first(q, stretch) ? whole[i] : now);
            if (!is_first(q, stretch)) join_sums(whole[i], now, size);
        }
    }
    for (int i = 0; i < work.count && group->stretches > 1; i++) restore_sums(work.queries + i, size, whole[i]);
    end_work(of, group, head, &work);
}

/* One stretch of a group for one key head; `part` counts them head by head. The thread that completes the last stretch
 * of a head joins them all. */
static void attend_part(const struct attention *of, const struct group *group, int64_t part) {
    struct work work;
    int64_t size = values_of(of->layer), head = part / group->stretches, stretch = part % group->stretches;
    begin_work(of, group, head, &work);
    int64_t of_query = sums_of(size), of_stretch = work.count * of_query;
    float *all = of->sums + group->sums_before + head * group->stretches * of_stretch, *own = all + stretch * of_stretch;
    attend_stretch(of, &work, group->stretch + stretch);
    for (int i = 0; i < work.count; i++) keep_sums(work.queries + i, size, own + i * of_query);
    _Atomic int64_t *done = of->done + (group - of->groups) * of->shared + head;
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < group->stretches) return;
    for (int i = 0; i < work.count; i++) {
        struct query *q = work.queries + i;
        float *whole = all + (q->first / STRETCH - group->stretch) * of_stretch + i * of_query;
        for (int64_t later = q->first / STRETCH + 1; later <= q->last / STRETCH; later++)
            join_sums(whole, all + (later - group->stretch) * of_stretch + i * of_query, size);
        restore_sums(q, size, whole);
    }
    end_work(of, group, head, &work);
}

static void write_token(const struct attention *of, int64_t t) {
    const struct kv_cache *m = of->cache;
    int64_t shared = of->layer->key_heads, heads = of->layer->heads, size = of->layer->size;
    if (of->layer->latent) {
        int64_t to = m->slots[t] * m->length + m->places[t], rank = values_of(of->layer);
        const number *own = of->heads + (t * heads_of_token(of->layer) + heads) * size;
        to_cache(m->keys + to * rank, own, rank), to_cache(m->values + to * (size - rank), own + rank, size - rank);
        return;
    }
    for (int64_t h = 0; h < shared; h++) {
        int64_t to = ((m->slots[t] * shared + h) * m->length + m->places[t]) * size;
        const number *own = of->heads + (t * (heads + 2 * shared) + heads + h) * size;
        to_cache(m->keys + to, own, size);
        to_cache(m->values + to, own + shared * size, size);
    }
}

/* Divides the tokens into groups of at most `most`; returns the number of groups. */
static int64_t group_tokens(const layer_type *layer, const struct kv_cache *m, int64_t tokens, int64_t most, struct group *groups) {
    int64_t count = 0, before = 0, sums_before = 0;
    for (int64_t t = 0; t < tokens; t++) {
        int follows = t && m->slots[t] == m->slots[t - 1] && m->positions[t] == m->positions[t - 1] + 1 &&
                      (!m->forks || (m->forks[t] == m->forks[t - 1] && m->begins[t] == m->begins[t - 1]));
        if (count && groups[count - 1].count < most && follows) groups[count - 1].count++;
        else groups[count++] = (struct group){t, 1, 0, 0, 0, 0};
    }
    for (struct group *group = groups; group < groups + count; group++) {
        int64_t first = m->positions[group->token], last = first + group->count - 1;
        first = m->window && first >= m->window ? first - m->window + 1 : 0;
        group->stretch = first / STRETCH, group->stretches = last / STRETCH + 1 - group->stretch;
        group->before = before, group->sums_before = sums_before;
        before += group->stretches;
        sums_before += group->count * layer->heads * group->stretches * sums_of(values_of(layer));
    }
    return count;
}

/* Divides the tokens into groups, smaller ones if large ones would be too few for all threads. */
static void begin_attention(struct attention *of, int64_t threads) {
    const layer_type *layer = of->layer;
    int64_t shared = of->shared, repeats = layer->heads / shared, most = QUERIES / repeats > 1 ? QUERIES / repeats : 1;
    int64_t count = group_tokens(layer, of->cache, of->tokens, most, of->groups), largest = 1, best = most, shortest = INT64_MAX;
    int64_t units = of->sums ? of->groups[count - 1].before + of->groups[count - 1].stretches : count;
    for (int64_t parts = 1; layer->latent && parts <= layer->heads; parts++) {
        int is_needed = layer->heads / shared > MAX_SHARED_HEADS, is_wanted = units * shared < threads;
        if (layer->heads % parts == 0 && (is_needed || (is_wanted && layer->heads / parts >= TOGETHER))) shared = parts;
    }
    of->shared = shared, repeats = layer->heads / shared, units *= shared;
    for (int64_t i = 0; i < count; i++) largest = of->groups[i].count > largest ? of->groups[i].count : largest;
    for (int64_t parts = 1; parts <= largest && units * parts < UNITS * threads; parts++) {
        int64_t tokens = (largest + parts - 1) / parts, time = (units * parts + threads - 1) / threads * (LOADED + tokens * repeats);
        if (time < shortest) best = tokens, shortest = time;
    }
    of->count = best < largest ? group_tokens(layer, of->cache, of->tokens, best, of->groups) : count;
    for (int64_t i = 0; i < of->count * shared; i++) atomic_init(of->done + i, 0);
}

static void attend_in_team(const struct member *me, void *given) {
    struct attention *of = given;
    int64_t end = of->layer->reuses_keys ? 0 : share_of(me, of->tokens, me->number + 1);
    if (me->number == 0) begin_attention(of, me->count);
    for (int64_t t = share_of(me, of->tokens, me->number); t < end; t++) write_token(of, t);
    wait_for_team(me);
    int64_t shared = of->shared;
    if (!of->sums || of->count * shared >= UNITS * me->count) {
        for (int64_t unit; (unit = take(&of->next)) < of->count * shared;)
            attend_group(of, of->groups + unit / shared, unit % shared);
        return;
    }
    const struct group *group = of->groups, *behind = group + of->count;
    for (;;) {
        int64_t unit = take(&of->next);
        while (group < behind && unit >= (group->before + group->stretches) * shared) group++;
        if (group == behind) return;
        if (group->stretches == 1) attend_group(of, group, unit - group->before * shared);
        else attend_part(of, group, unit - group->before * shared);
    }
}

/* Numbers of all stretches' sums for so many tokens that may see so many positions; 0 if the sums are not kept. */
static int64_t sums_kept(const layer_type *layer, int64_t tokens, int64_t positions) {
    int64_t count = tokens * layer->heads * ((positions + STRETCH - 1) / STRETCH) * sums_of(values_of(layer));
    return positions > STRETCH && count <= MOST_SUMS ? count : 0;
}

/* Bytes of scratch space that attention needs, a multiple of 64. length: of the cache. */
static int64_t attention_bytes(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t of_groups = tokens * (int64_t)(sizeof(struct group) + (uint64_t)(layer->latent ? layer->heads : layer->key_heads) * sizeof(int64_t));
    return sums_kept(layer, tokens, length) * (int64_t)sizeof(float) + (of_groups + 63) / 64 * 64;
}

/* Writes the tokens' keys and values to the cache and attends. heads [tokens][heads_of_token(layer)][size], as
 * `project_qkv_rope` returns them -> out [tokens][heads][values_of]. space: `attention_bytes`. */
void attend(const layer_type *layer, const struct kv_cache *m, const number *heads, int64_t tokens, number *out,
            void *space) {
    int64_t kept = sums_kept(layer, tokens, m->length);
    struct group *groups = (struct group *)((float *)space + kept);
    _Atomic int64_t *done = (_Atomic int64_t *)(groups + tokens);
    struct attention attention = {layer, m, heads, tokens, 0, layer->key_heads, out, groups, kept ? space : NULL, done, 0};
    in_team(attend_in_team, &attention);
}
