/* Queries and 32 positions as pairs of bfloat16 numbers, which one instruction multiplies, for attention.h. */

struct query {
    const uint16_t *numbers;
    int64_t first, last; /* positions it sees */
    float most, sum;
    _Alignas(64) float out[MAX_HEAD_SIZE];
    _Alignas(64) uint16_t weights[KEYS];
};

/* Keys [size / 2][KEYS] pairs; values [KEYS / 2][size] pairs of positions, in the order that unpacking leaves. */
struct tile {
    _Alignas(64) uint32_t keys[MAX_HEAD_SIZE / 2 * KEYS];
    _Alignas(64) uint16_t values[MAX_HEAD_SIZE * KEYS];
    _Alignas(64) uint16_t own[MAX_HEAD_SIZE * KEYS]; /* keys or values that are not at their positions' places */
};

static void set_numbers(struct query *q, const uint16_t *numbers, int64_t size) {
    (void)size;
    q->numbers = numbers;
}

/* Keys [KEYS][size] to [size / 2][KEYS] pairs. */
static void transpose_keys(const uint16_t *keys, int64_t size, uint32_t *to) {
    for (int half = 0; half < KEYS; half += 16)
        for (int64_t i = 0; i < size; i += 32)
            transpose_words(keys + half * size + i, size, to + i / 2 * KEYS + half, KEYS);
}

/* Values [KEYS][size] to pairs of positions. Positions from number `there` on become 0: an earlier text may have left
 * infinities there, and 0 times infinity is not 0. */
static void interleave(const uint16_t *values, int64_t there, int64_t size, uint16_t *to) {
    __m512i none = _mm512_setzero_si512();
    for (int64_t pair = 0; pair < KEYS / 2; pair++)
        for (int64_t i = 0; i < size; i += 32) {
            __m512i a = pair * 2 < there ? _mm512_loadu_si512(values + pair * 2 * size + i) : none;
            __m512i b = pair * 2 + 1 < there ? _mm512_loadu_si512(values + (pair * 2 + 1) * size + i) : none;
            _mm512_store_si512(to + (pair * size + i) * 2, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + (pair * size + i) * 2 + 32, _mm512_unpackhi_epi16(a, b));
        }
}

/* Copies the numbers [size] of KEYS positions, from `start` on, from their places; zeros for those behind `last`. */
static inline void collect(const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t size,
                           uint16_t *to) {
    for (int64_t i = 0; i < KEYS; i++)
        if (start + i > last) memset(to + i * size, 0, size * sizeof *to);
        else memcpy(to + i * size, from + place_of(start + i, branch) * size, size * sizeof *to);
}

/* The numbers [KEYS][size] of 32 positions, from `start` on: in the cache or, if their places differ, in tile->own. */
static const uint16_t *rows_of(struct tile *tile, const uint16_t *from, struct branch branch, int64_t start, int64_t last,
                               int64_t size) {
    if (!branch.path || start + KEYS <= branch.fork) return from + start * size;
    collect(from, branch, start, last, size, tile->own);
    return tile->own;
}

/* `count` numbers of each key, from number `first` of its own on. */
static void fill_keys(struct tile *tile, const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t count,
                      int64_t first) {
    transpose_keys(rows_of(tile, from, branch, start, last, count), count, tile->keys + first / 2 * KEYS);
}

static void fill_values(struct tile *tile, const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t size) {
    interleave(rows_of(tile, from, branch, start, last, size), last + 1 - start, size, tile->values);
}

/* Whether no value is infinite or NaN; those behind the last position are 0. */
static int values_are_finite(const struct tile *tile, int64_t there, int64_t size) {
    (void)there;
    uint16_t most = 0;
    for (int64_t i = 0; i < KEYS * size; i++) {
        uint16_t bits = tile->values[i] & 0x7f80;
        most = bits > most ? bits : most;
    }
    return most < 0x7f80;
}

static void copy_values(const struct tile *from, int64_t there, int64_t size, struct tile *to) {
    (void)there;
    memcpy(to->values, from->values, KEYS * size * sizeof *from->values);
}

static void clear_values(struct tile *tile, int64_t key, int64_t size) {
    uint16_t *pairs = tile->values + key / 2 * 2 * size;
    for (int64_t i = key % 2; i < 2 * size; i += 2) pairs[i] = 0;
}

static void store_weights(struct query *q, floats left, floats right) {
    store_bf16(q->weights, left), store_bf16(q->weights + 16, right);
}

/* next: the cached keys after the tile's. */
ALWAYS void score(const int count, const struct query *q, int64_t size, const struct tile *tile, const uint16_t *next,
                  floats sum[TOGETHER][2]) {
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = all_floats(0);
    for (int64_t pair = 0; pair < size / 2; pair++) {
        prefetch_line(next, pair * 2), prefetch_line(next, pair * 2 + 1);
        __m512bh left = (__m512bh)_mm512_load_si512(tile->keys + pair * KEYS);
        __m512bh right = (__m512bh)_mm512_load_si512(tile->keys + pair * KEYS + 16);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            __m512bh own = pair_at(q[i].numbers + pair * 2);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], own, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], own, right);
        }
    }
}

/* Adds 32 weighted values, 16 * vectors numbers of a head from `part` on. */
ALWAYS void gather_part(const int count, const int vectors, struct query *q, int64_t part, int64_t size,
                        const struct tile *tile, const uint16_t *next) {
    floats sum[TOGETHER][4];
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = _mm512_load_ps(q[i].out + part + j * 16);
    for (int64_t pair = 0; pair < KEYS / 2; pair++) {
        const uint16_t *from = tile->values + (pair * size + part) * 2;
        for (int j = 0; j < vectors; j++) prefetch_line(next, part + pair * vectors + j);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            __m512bh own = pair_at(q[i].weights + pair * 2);
            #pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                sum[i][j] = _mm512_dpbf16_ps(sum[i][j], own, (__m512bh)_mm512_load_si512(from + j * 32));
        }
    }
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++)
        for (int j = 0; j < vectors; j++) _mm512_store_ps(q[i].out + part + j * 16, sum[i][j]);
}

/* Adds 32 weighted values, 64 numbers of a head at a time, and at its end perhaps 32. next: the cached values after the
 * tile's. */
ALWAYS void gather_values(const int count, struct query *q, int64_t there, int64_t size, const struct tile *tile,
                          const uint16_t *next) {
    (void)there;
    int64_t part = 0;
    for (; part + 64 <= size; part += 64) gather_part(count, 4, q, part, size, tile, next);
    if (part < size) gather_part(count, 2, q, part, size, tile, next);
}

/* A head's result in its own order, rounded. Of 32 numbers unpacking left 0-3, 8-11, ... before 4-7, 12-15, ... */
static void store_head(const struct query *q, int64_t size, uint16_t *to) {
    __m512 sum = _mm512_set1_ps(q->sum);
    __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < size; i += 32) {
        __m512 a = _mm512_load_ps(q->out + i), b = _mm512_load_ps(q->out + i + 16);
        store_bf16(to + i, _mm512_div_ps(_mm512_permutex2var_ps(a, low, b), sum));
        store_bf16(to + i + 16, _mm512_div_ps(_mm512_permutex2var_ps(a, high, b), sum));
    }
}
