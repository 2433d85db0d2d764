/* Attention of new tokens over the KV cache of their slots, in float32.
 *
 * As attention.c: the query heads of a few neighbouring tokens that share a key head go through the cache together, 32
 * positions at a time, with a running maximum and sum of the exponentials. Positions are divided at multiples of 32 and
 * masked ones count 0, so the bits of a query depend neither on its neighbours nor on the length of the cache.
 */
#include "blocks.h"

enum {
    KEYS = 32,     /* positions at a time */
    QUERIES = 48,  /* of a group, at most, unless one token has more */
    TOGETHER = 4   /* queries whose products are computed side by side */
};

struct query {
    const float *numbers;
    int64_t first, last; /* positions it sees */
    float most, sum;
    _Alignas(64) float out[MAX_HEAD];
    _Alignas(64) float weights[KEYS];
};

/* Softmax weights of the positions from `start` on for one query with these products; earlier sums are rescaled. */
static void update_softmax(struct query *q, int64_t start, int64_t size, floats left, floats right) {
    int64_t from = q->first - start, to = q->last - start;
    if (to < 0 || from >= KEYS) {
        memset(q->weights, 0, sizeof q->weights);
        return;
    }
    int begins = (int)(from < 0 ? 0 : from), ends = (int)least(to, KEYS - 1);
    floats none = all_floats(-INFINITY), zero = all_floats(0);
    left = only_lanes(left, begins, ends, none), right = only_lanes(right, begins - LANES, ends - LANES, none);
    float most = largest(max_floats(left, right));
    if (!(most > q->most)) most = q->most;
    floats lowest = all_floats(-86), top = all_floats(most);
    left = exponential(max_floats(subtract_floats(left, top), lowest));
    right = exponential(max_floats(subtract_floats(right, top), lowest));
    left = only_lanes(left, begins, ends, zero), right = only_lanes(right, begins - LANES, ends - LANES, zero);
    floats rest = exponential(max_floats(all_floats(q->most - most), lowest));
    float first[LANES];
    store_floats(first, rest);
    q->sum = q->sum * first[0] + sum_of(add_floats(left, right));
    q->most = most;
    store_floats(q->weights, left), store_floats(q->weights + LANES, right);
    for (int64_t i = 0; i < size; i += LANES) store_floats(q->out + i, multiply_floats(load_floats(q->out + i), rest));
}

/* Products of some queries with 32 keys [size][KEYS], and the weights that follow. */
ALWAYS void score(const int count, struct query *q, int64_t start, int64_t size, const float *keys, float scaling) {
    floats sum[TOGETHER][2];
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = all_floats(0);
    for (int64_t n = 0; n < size; n++) {
        floats left = load_floats(keys + n * KEYS), right = load_floats(keys + n * KEYS + LANES);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            floats own = all_floats(q[i].numbers[n]);
            sum[i][0] = add_product(sum[i][0], own, left), sum[i][1] = add_product(sum[i][1], own, right);
        }
    }
    floats by = all_floats(scaling);
    for (int i = 0; i < count; i++)
        update_softmax(q + i, start, size, multiply_floats(sum[i][0], by), multiply_floats(sum[i][1], by));
}

/* Adds the first `there` of 32 weighted values [KEYS][size], 32 numbers of a head at a time. */
ALWAYS void gather_values(const int count, struct query *q, int64_t there, int64_t size, const float *values) {
    for (int64_t part = 0; part < size; part += 2 * LANES) {
        floats sum[TOGETHER][2];
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 2; j++) sum[i][j] = load_floats(q[i].out + part + j * LANES);
        for (int64_t key = 0; key < there; key++) {
            floats left = load_floats(values + key * size + part);
            floats right = load_floats(values + key * size + part + LANES);
            #pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                floats own = all_floats(q[i].weights[key]);
                sum[i][0] = add_product(sum[i][0], own, left), sum[i][1] = add_product(sum[i][1], own, right);
            }
        }
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 2; j++) store_floats(q[i].out + part + j * LANES, sum[i][j]);
    }
}

/* The positions that a group sees: from `fork` on those at the places of `path`, before it those of their own number. */
struct sight {
    int64_t fork;
    const int64_t *path;
};

/* Copies numbers [size] of positions `start` to `last`, at most KEYS of them, from where they stand. */
static void collect(const float *from, struct sight sight, int64_t start, int64_t last, int64_t size, float *to) {
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t position = start + i;
        if (position > last)
            memset(to + i * size, 0, size * sizeof *to);
        else
            memcpy(to + i * size, from + (position < sight.fork ? position : sight.path[position - sight.fork]) * size,
                   size * sizeof *to);
    }
}

/* Attention of all queries of a group over the positions that any of them sees. */
static void attend_positions(struct query *group, int count, const float *keys, const float *values, int64_t size,
                             float scaling, struct sight sight) {
    _Alignas(64) float transposed[MAX_HEAD * KEYS], own_keys[MAX_HEAD * KEYS], own_values[MAX_HEAD * KEYS];
    int64_t first = group[0].first, last = group[count - 1].last;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        const float *these_keys = keys + start * size, *these_values = values + start * size;
        if (sight.path && start + KEYS > sight.fork) {
            collect(keys, sight, start, last, size, own_keys), these_keys = own_keys;
            collect(values, sight, start, last, size, own_values), these_values = own_values;
        }
        for (int half = 0; half < KEYS; half += LANES)
            for (int64_t i = 0; i < size; i += LANES)
                transpose(these_keys + half * size + i, size, transposed + i * KEYS + half, KEYS);
        int64_t there = least(KEYS, last + 1 - start);
        for (int i = 0; i < count; i += TOGETHER) {
            switch (count - i) {
                case 1: score(1, group + i, start, size, transposed, scaling); break;
                case 2: score(2, group + i, start, size, transposed, scaling); break;
                case 3: score(3, group + i, start, size, transposed, scaling); break;
                default: score(4, group + i, start, size, transposed, scaling);
            }
            switch (count - i) {
                case 1: gather_values(1, group + i, there, size, these_values); break;
                case 2: gather_values(2, group + i, there, size, these_values); break;
                case 3: gather_values(3, group + i, there, size, these_values); break;
                default: gather_values(4, group + i, there, size, these_values);
            }
        }
    }
}

/* Attention of `count` tokens from number `token` on, neighbours in one slot, for one key head. */
static void attend_group(const struct float_layer *layer, const struct float_cache *m, const float *heads, int64_t token,
                         int64_t count, int64_t head, float *out) {
    int64_t size = layer->size, repeats = layer->heads / layer->key_heads, all = layer->heads + 2 * layer->key_heads;
    struct query group[QUERIES > (int)MAX_REPEATS ? QUERIES : (int)MAX_REPEATS];
    for (int64_t t = 0; t < count; t++)
        for (int64_t r = 0; r < repeats; r++) {
            struct query *q = group + t * repeats + r;
            int64_t position = m->positions[token + t];
            q->numbers = heads + ((token + t) * all + head * repeats + r) * size;
            q->first = m->window && position >= m->window ? position - m->window + 1 : 0, q->last = position;
            q->most = -INFINITY, q->sum = 0;
            memset(q->out, 0, size * sizeof *q->out);
        }
    int64_t start = (m->slots[token] * layer->key_heads + head) * m->length * size;
    struct sight sight = {0, NULL};
    if (m->forks && m->forks[token] <= m->positions[token + count - 1])
        sight.fork = m->forks[token], sight.path = m->paths + m->begins[token];
    attend_positions(group, (int)(count * repeats), m->keys + start, m->values + start, size, m->scaling, sight);
    for (int64_t t = 0; t < count; t++)
        for (int64_t r = 0; r < repeats; r++) {
            const struct query *q = group + t * repeats + r;
            float *to = out + ((token + t) * layer->heads + head * repeats + r) * size;
            for (int64_t i = 0; i < size; i += LANES)
                store_floats(to + i, divide_floats(load_floats(q->out + i), all_floats(q->sum)));
        }
}

/* Writes the keys and values of new tokens to the cache and attends. heads [tokens][heads + 2 * key_heads][size] as
 * `project_heads` makes them -> out [tokens][heads][size]. groups: space for 2 * tokens numbers. */
void attend_float(const struct float_layer *layer, const struct float_cache *m, const float *heads, int64_t tokens,
                  float *out, int64_t *groups) {
    int64_t size = layer->size, all = layer->heads + 2 * layer->key_heads, shared = layer->key_heads, count = 0;
    int64_t most = QUERIES * shared / layer->heads > 1 ? QUERIES * shared / layer->heads : 1;
    for (int64_t t = 0; t < tokens; t++) {
        int64_t *now = groups + 2 * count;
        int follows = t && m->slots[t] == m->slots[t - 1] && m->positions[t] == m->positions[t - 1] + 1 &&
                      (!m->forks || (m->forks[t] == m->forks[t - 1] && m->begins[t] == m->begins[t - 1]));
        if (count && now[-1] < most && follows)
            now[-1]++;
        else
            now[0] = t, now[1] = 1, count++;
    }
    #pragma omp parallel
    {
        #pragma omp for
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < shared; h++) {
                int64_t to = ((m->slots[t] * shared + h) * m->length + m->places[t]) * size;
                memcpy(m->keys + to, heads + (t * all + layer->heads + h) * size, size * sizeof *heads);
                memcpy(m->values + to, heads + (t * all + layer->heads + shared + h) * size, size * sizeof *heads);
            }
        #pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < count * shared; unit++)
            attend_group(layer, m, heads, groups[unit / shared * 2], groups[unit / shared * 2 + 1], unit % shared, out);
    }
}
