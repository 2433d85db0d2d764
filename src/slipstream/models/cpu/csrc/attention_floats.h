/* Queries and 32 positions as float32 numbers, for attention.h. */

struct query {
    const float *numbers;
    int64_t first, last; /* positions it sees */
    float most, sum;
    _Alignas(64) float out[MAX_HEAD_SIZE];
    _Alignas(64) float weights[KEYS];
#if !NUMBERS_ARE_FLOATS
    _Alignas(64) float own[MAX_HEAD_SIZE];
#endif
};

/* Keys [size][KEYS] and values [KEYS][size]; `values` points to the cache or to `own_values`. */
struct tile {
    const float *values;
    _Alignas(64) float keys[MAX_HEAD_SIZE * KEYS], own_values[MAX_HEAD_SIZE * KEYS], own_keys[MAX_HEAD_SIZE * KEYS];
};

#if NUMBERS_ARE_FLOATS
static void set_numbers(struct query *q, const float *numbers, int64_t size) {
    (void)size;
    q->numbers = numbers;
}

/* The numbers [KEYS][size] of 32 positions: in the cache if they follow each other there, else copied to `to`. */
static const float *in_order(const float *from, struct branch branch, int64_t start, int64_t last, int64_t size, float *to) {
    if (!branch.path || start + KEYS <= branch.fork) return from + start * size;
    collect(from, branch, start, last, size, to);
    return to;
}
#else
static void widen(const number *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += 16) store_floats(to + i, load_number(from + i));
}

static void set_numbers(struct query *q, const number *numbers, int64_t size) {
    widen(numbers, size, q->own);
    q->numbers = q->own;
}

static const float *in_order(const number *from, struct branch branch, int64_t start, int64_t last, int64_t size, float *to) {
    for (int64_t i = 0; i < KEYS; i++) {
        int64_t position = start + i, place = position;
        if (branch.path && position >= branch.fork && position <= last) place = branch.path[position - branch.fork];
        if (position <= last) widen(from + place * size, size, to + i * size);
        else memset(to + i * size, 0, size * sizeof *to);
    }
    return to;
}
#endif

static void fill_tile(struct tile *tile, const number *keys, const number *values, struct branch branch, int64_t start,
                      int64_t last, int64_t size) {
    const float *these = in_order(keys, branch, start, last, size, tile->own_keys);
    tile->values = in_order(values, branch, start, last, size, tile->own_values);
    for (int half = 0; half < KEYS; half += 16)
        for (int64_t i = 0; i < size; i += 16) transpose(these + half * size + i, size, tile->keys + i * KEYS + half, KEYS);
}

/* Whether no value of the first `there` positions is infinite or NaN. */
static int values_are_finite(const struct tile *tile, int64_t there, int64_t size) {
    uint32_t most = 0;
    for (int64_t i = 0; i < there * size; i++) {
        uint32_t bits;
        memcpy(&bits, tile->values + i, sizeof bits);
        bits &= 0x7f800000;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000;
}

static void copy_values(const struct tile *from, int64_t there, int64_t size, struct tile *to) {
    to->values = memcpy(to->own_values, from->values, there * size * sizeof *from->values);
}

static void clear_values(struct tile *tile, int64_t key, int64_t size) {
    memset(tile->own_values + key * size, 0, size * sizeof *tile->own_values);
}

static void store_weights(struct query *q, floats left, floats right) {
    store_floats(q->weights, left), store_floats(q->weights + 16, right);
}

ALWAYS void score(const int count, const struct query *q, int64_t size, const struct tile *tile, floats sum[TOGETHER][2]) {
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = all_floats(0);
    for (int64_t n = 0; n < size; n++) {
        floats left = load_floats(tile->keys + n * KEYS), right = load_floats(tile->keys + n * KEYS + 16);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            floats own = all_floats(q[i].numbers[n]);
            sum[i][0] = add_product(sum[i][0], own, left), sum[i][1] = add_product(sum[i][1], own, right);
        }
    }
}

/* Adds the first `there` weighted values, 32 numbers of a head at a time. */
ALWAYS void gather_values(const int count, struct query *q, int64_t there, int64_t size, const struct tile *tile) {
    for (int64_t part = 0; part < size; part += 32) {
        floats sum[TOGETHER][2];
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 2; j++) sum[i][j] = load_floats(q[i].out + part + j * 16);
        for (int64_t key = 0; key < there; key++) {
            const float *values = tile->values + key * size + part;
            floats left = load_floats(values), right = load_floats(values + 16);
            #pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                floats own = all_floats(q[i].weights[key]);
                sum[i][0] = add_product(sum[i][0], own, left), sum[i][1] = add_product(sum[i][1], own, right);
            }
        }
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 2; j++) store_floats(q[i].out + part + j * 16, sum[i][j]);
    }
}

static void store_head(const struct query *q, int64_t size, number *to) {
    floats sum = all_floats(q->sum);
    for (int64_t i = 0; i < size; i += 16) store_number(to + i, divide_floats(load_floats(q->out + i), sum));
}
