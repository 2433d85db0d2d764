/* Attention of new tokens over the KV cache of their slots.
 *
 * The query heads of a few neighbouring tokens that share a key head go through the cache together, 32 positions at a
 * time, with a running maximum and sum of the exponentials (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
 * 2022, arXiv:2205.14135, section 3.1). Positions are divided at multiples of 32 and masked ones count 0, so the bits
 * of a query depend neither on its neighbours nor on the length of the cache.
 */
#include "kernels.h"

#include <omp.h>
#include <string.h>

enum {
    KEYS = 32,     /* positions at a time */
    QUERIES = 48,  /* of a group, at most, unless one token has more */
    TOGETHER = 4   /* queries whose products are computed side by side */
};

struct query {
    const uint16_t *numbers;
    long first, last; /* positions it sees */
    float most, sum;
    _Alignas(64) float out[MAX_HEAD_SIZE];
    _Alignas(64) uint16_t weights[KEYS];
};

/* Keys [KEYS][size] to [size / 2][KEYS] pairs. */
static void transpose(const uint16_t *keys, long size, uint32_t *to) {
    for (int half = 0; half < KEYS; half += LANES)
        for (long i = 0; i < size; i += 32) {
            __m512i square[16];
            #pragma GCC unroll 16
            for (int row = 0; row < 16; row++) square[row] = _mm512_loadu_si512(keys + (half + row) * size + i);
            transpose_16x16(square);
            #pragma GCC unroll 16
            for (int row = 0; row < 16; row++) _mm512_store_si512(to + (i / 2 + row) * KEYS + half, square[row]);
        }
}

/* Values [KEYS][size] to [KEYS / 2][size] pairs of positions, in the order that unpacking leaves. From number `there`
 * on they count as 0: an earlier text may have left infinities, and 0 times infinity is not 0. */
static void interleave(const uint16_t *values, long there, long size, uint16_t *to) {
    __m512i none = _mm512_setzero_si512();
    for (long pair = 0; pair < KEYS / 2; pair++)
        for (long i = 0; i < size; i += 32) {
            __m512i a = pair * 2 < there ? _mm512_loadu_si512(values + pair * 2 * size + i) : none;
            __m512i b = pair * 2 + 1 < there ? _mm512_loadu_si512(values + (pair * 2 + 1) * size + i) : none;
            _mm512_store_si512(to + (pair * size + i) * 2, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + (pair * size + i) * 2 + 32, _mm512_unpackhi_epi16(a, b));
        }
}

static inline __m512bh pair_at(const uint16_t *from) {
    int both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* Softmax weights of the positions from `begin` on for one query with these products; earlier sums are rescaled. */
static void update_softmax(struct query *q, long begin, long size, __m512 left, __m512 right) {
    __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    long from = q->first - begin, to = q->last - begin;
    if (to < 0 || from >= KEYS) {
        memset(q->weights, 0, sizeof q->weights);
        return;
    }
    __m512i low = _mm512_set1_epi32((int)(from < 0 ? 0 : from)), high = _mm512_set1_epi32((int)min_long(to, KEYS - 1));
    __m512i behind = _mm512_add_epi32(place, _mm512_set1_epi32(LANES));
    __mmask16 seen = _mm512_cmpge_epi32_mask(place, low) & _mm512_cmple_epi32_mask(place, high);
    __mmask16 seen_too = _mm512_cmpge_epi32_mask(behind, low) & _mm512_cmple_epi32_mask(behind, high);
    __m512 none = _mm512_set1_ps(-__builtin_inff());
    left = _mm512_mask_blend_ps(seen, none, left), right = _mm512_mask_blend_ps(seen_too, none, right);
    float most = _mm512_reduce_max_ps(_mm512_max_ps(left, right));
    if (most < q->most) most = q->most;
    __m512 lowest = _mm512_set1_ps(-87), top = _mm512_set1_ps(most);
    left = exponential(_mm512_max_ps(_mm512_sub_ps(left, top), lowest));
    right = exponential(_mm512_max_ps(_mm512_sub_ps(right, top), lowest));
    left = _mm512_maskz_mov_ps(seen, left), right = _mm512_maskz_mov_ps(seen_too, right);
    __m512 rest = exponential(_mm512_max_ps(_mm512_set1_ps(q->most - most), lowest));
    q->sum = q->sum * _mm512_cvtss_f32(rest) + _mm512_reduce_add_ps(_mm512_add_ps(left, right));
    q->most = most;
    store(q->weights, left), store(q->weights + LANES, right);
    for (long i = 0; i < size; i += LANES) _mm512_store_ps(q->out + i, _mm512_mul_ps(_mm512_load_ps(q->out + i), rest));
}

/* Products of some queries with 32 keys, and the weights that follow. */
static inline __attribute__((always_inline)) void score(const int count, struct query *q, long begin, long size,
                                                        const uint32_t *keys, __m512 scaling) {
    __m512 sum[TOGETHER][2];
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (long pair = 0; pair < size / 2; pair++) {
        __m512bh left = (__m512bh)_mm512_load_si512(keys + pair * KEYS);
        __m512bh right = (__m512bh)_mm512_load_si512(keys + pair * KEYS + LANES);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            __m512bh own = pair_at(q[i].numbers + pair * 2);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], own, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], own, right);
        }
    }
    for (int i = 0; i < count; i++)
        update_softmax(q + i, begin, size, _mm512_mul_ps(sum[i][0], scaling), _mm512_mul_ps(sum[i][1], scaling));
}

/* Adds 32 weighted values, 64 numbers of a head at a time. */
static inline __attribute__((always_inline)) void gather_values(const int count, struct query *q, long size,
                                                                const uint16_t *values) {
    for (long part = 0; part < size; part += 64) {
        __m512 sum[TOGETHER][4];
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 4; j++) sum[i][j] = _mm512_load_ps(q[i].out + part + j * LANES);
        for (long pair = 0; pair < KEYS / 2; pair++) {
            const uint16_t *from = values + (pair * size + part) * 2;
            #pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                __m512bh own = pair_at(q[i].weights + pair * 2);
                #pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    sum[i][j] = _mm512_dpbf16_ps(sum[i][j], own, (__m512bh)_mm512_load_si512(from + j * 32));
            }
        }
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 4; j++) _mm512_store_ps(q[i].out + part + j * LANES, sum[i][j]);
    }
}

/* The positions that a group sees: from `fork` on those at the places of `path`, before it those of their own number. */
struct sight {
    long fork;
    const int64_t *path;
};

/* Copies numbers [size] of positions `begin` to `last`, at most KEYS of them, from where they stand. */
static void collect(const uint16_t *from, struct sight sight, long begin, long last, long size, uint16_t *to) {
    for (long i = 0; i < KEYS; i++) {
        long position = begin + i;
        if (position > last)
            memset(to + i * size, 0, size * sizeof *to);
        else
            memcpy(to + i * size, from + (position < sight.fork ? position : sight.path[position - sight.fork]) * size,
                   size * sizeof *to);
    }
}

/* Attention of all queries of a group over the positions that any of them sees. */
static void attend_positions(struct query *group, int count, const uint16_t *keys, const uint16_t *values, long size,
                             float scaling, struct sight sight) {
    _Alignas(64) uint32_t transposed[MAX_HEAD_SIZE / 2 * KEYS];
    _Alignas(64) uint16_t paired[MAX_HEAD_SIZE * KEYS], own_keys[MAX_HEAD_SIZE * KEYS], own_values[MAX_HEAD_SIZE * KEYS];
    long first = group[0].first, last = group[count - 1].last;
    for (long begin = first / KEYS * KEYS; begin <= last; begin += KEYS) {
        const uint16_t *these_keys = keys + begin * size, *these_values = values + begin * size;
        if (sight.path && begin + KEYS > sight.fork) {
            collect(keys, sight, begin, last, size, own_keys), these_keys = own_keys;
            collect(values, sight, begin, last, size, own_values), these_values = own_values;
        }
        transpose(these_keys, size, transposed);
        interleave(these_values, last + 1 - begin, size, paired);
        for (int i = 0; i < count; i += TOGETHER) {
            switch (count - i) {
                case 1: score(1, group + i, begin, size, transposed, _mm512_set1_ps(scaling)); break;
                case 2: score(2, group + i, begin, size, transposed, _mm512_set1_ps(scaling)); break;
                case 3: score(3, group + i, begin, size, transposed, _mm512_set1_ps(scaling)); break;
                default: score(4, group + i, begin, size, transposed, _mm512_set1_ps(scaling));
            }
            switch (count - i) {
                case 1: gather_values(1, group + i, size, paired); break;
                case 2: gather_values(2, group + i, size, paired); break;
                case 3: gather_values(3, group + i, size, paired); break;
                default: gather_values(4, group + i, size, paired);
            }
        }
    }
}

/* A head's result in its own order, rounded. Of 32 numbers unpacking left 0-3, 8-11, ... before 4-7, 12-15, ... */
static void store_head(const struct query *q, long size, uint16_t *to) {
    __m512 sum = _mm512_set1_ps(q->sum);
    __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (long i = 0; i < size; i += 32) {
        __m512 a = _mm512_load_ps(q->out + i), b = _mm512_load_ps(q->out + i + LANES);
        store(to + i, _mm512_div_ps(_mm512_permutex2var_ps(a, low, b), sum));
        store(to + i + LANES, _mm512_div_ps(_mm512_permutex2var_ps(a, high, b), sum));
    }
}

/* Attention of `count` tokens from number `token` on, neighbours in one slot, for one key head. */
static void attend_group(const struct layer *layer, const struct kv_cache *m, const uint16_t *heads, long token,
                         long count, long head, uint16_t *out) {
    long size = layer->size, repeats = layer->heads / layer->key_heads, all = layer->heads + 2 * layer->key_heads;
    struct query group[QUERIES > (int)MAX_SHARED_HEADS ? QUERIES : (int)MAX_SHARED_HEADS];
    for (long t = 0; t < count; t++)
        for (long r = 0; r < repeats; r++) {
            struct query *q = group + t * repeats + r;
            long position = m->positions[token + t];
            q->numbers = heads + ((token + t) * all + head * repeats + r) * size;
            q->first = m->window && position >= m->window ? position - m->window + 1 : 0, q->last = position;
            q->most = -__builtin_inff(), q->sum = 0;
            memset(q->out, 0, size * sizeof *q->out);
        }
    long begin = (m->slots[token] * layer->key_heads + head) * m->length * size;
    struct sight sight = {0, NULL};
    if (m->forks && m->forks[token] <= m->positions[token + count - 1])
        sight.fork = m->forks[token], sight.path = m->paths + m->begins[token];
    attend_positions(group, (int)(count * repeats), m->keys + begin, m->values + begin, size, m->scaling, sight);
    for (long t = 0; t < count; t++)
        for (long r = 0; r < repeats; r++)
            store_head(group + t * repeats + r, size, out + ((token + t) * layer->heads + head * repeats + r) * size);
}

/* Writes the keys and values of new tokens to the cache and attends. heads [tokens][heads + 2 * key_heads][size] as
 * `project_qkv_rope` makes them -> out [tokens][heads][size]. groups: space for 2 * tokens numbers. */
void attend(const struct layer *layer, const struct kv_cache *m, const uint16_t *heads, long tokens, uint16_t *out,
            int64_t *groups) {
    long size = layer->size, all = layer->heads + 2 * layer->key_heads, shared = layer->key_heads;
    long most = QUERIES * shared / layer->heads > 1 ? QUERIES * shared / layer->heads : 1, count = 0;
    for (long t = 0; t < tokens; t++) {
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
        for (long t = 0; t < tokens; t++)
            for (long h = 0; h < shared; h++) {
                long to = ((m->slots[t] * shared + h) * m->length + m->places[t]) * size;
                memcpy(m->keys + to, heads + (t * all + layer->heads + h) * size, size * sizeof *heads);
                memcpy(m->values + to, heads + (t * all + layer->heads + shared + h) * size, size * sizeof *heads);
            }
        #pragma omp for schedule(dynamic, 1)
        for (long unit = 0; unit < count * shared; unit++)
            attend_group(layer, m, heads, groups[unit / shared * 2], groups[unit / shared * 2 + 1], unit % shared, out);
    }
}
