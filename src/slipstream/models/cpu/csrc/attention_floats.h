/* Queries and 32 positions as float32 numbers, for attention.h. */

struct query {
    int64_t first, last; /* positions it sees */
    float most, sum;
    _Alignas(64) float out[MAX_HEAD_SIZE];
    _Alignas(64) float weights[KEYS];
    _Alignas(64) float numbers[MAX_HEAD_SIZE];
};

/* Keys [size][KEYS] and values [KEYS][size]. */
struct tile {
    _Alignas(64) float keys[MAX_HEAD_SIZE * KEYS], values[MAX_HEAD_SIZE * KEYS], keys_in_rows[MAX_HEAD_SIZE * KEYS];
};

static void set_numbers(struct query *q, const number *numbers, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store_floats(q->numbers + i, load_number(numbers + i));
}

/* The numbers [KEYS][size] of 32 positions, from `start` on; zeros for those after `last`. */
static void widen(const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t size, float *to) {
    for (int64_t position = start; position < start + KEYS; position++, to += size) {
        const uint16_t *own = from + place_of(position <= last ? position : last, branch) * size;
        for (int64_t i = 0; i < size; i += 16) store_floats(to + i, position <= last ? load_cached(own + i) : all_floats(0));
    }
}

/* `count` numbers of each key, from number `first` of its own on. */
static void fill_keys(struct tile *tile, const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t count,
                      int64_t first) {
    widen(from, branch, start, last, count, tile->keys_in_rows);
    for (int half = 0; half < KEYS; half += 16)
        for (int64_t i = 0; i < count; i += 16)
            transpose(tile->keys_in_rows + half * count + i, count, tile->keys + (first + i) * KEYS + half, KEYS);
}

static void fill_values(struct tile *tile, const uint16_t *from, struct branch branch, int64_t start, int64_t last, int64_t size) {
    widen(from, branch, start, last, size, tile->values);
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
    memcpy(to->values, from->values, there * size * sizeof *from->values);
}

static void clear_values(struct tile *tile, int64_t key, int64_t size) {
    memset(tile->values + key * size, 0, size * sizeof *tile->values);
}

static void store_weights(struct query *q, floats left, floats right) {
    store_floats(q->weights, left), store_floats(q->weights + 16, right);
}

/* next: the cached keys after the tile's. */
ALWAYS void score(const int count, const struct query *q, int64_t size, const struct tile *tile, const uint16_t *next,
                  floats sum[TOGETHER][2]) {
    #pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = all_floats(0);
    for (int64_t n = 0; n < size; n++) {
        prefetch_line(next, n);
        floats left = load_floats(tile->keys + n * KEYS), right = load_floats(tile->keys + n * KEYS + 16);
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            floats own = all_floats(q[i].numbers[n]);
            sum[i][0] = add_product(sum[i][0], own, left), sum[i][1] = add_product(sum[i][1], own, right);
        }
    }
}

/* Adds the first `there` weighted values, 32 numbers of a head at a time. next: the cached values after the tile's. */
ALWAYS void gather_values(const int count, struct query *q, int64_t there, int64_t size, const struct tile *tile,
                          const uint16_t *next) {
    for (int64_t part = 0; part < size; part += 32) {
        floats sum[TOGETHER][2];
        #pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 2; j++) sum[i][j] = load_floats(q[i].out + part + j * 16);
        for (int64_t key = 0; key < there; key++) {
            const float *values = tile->values + key * size + part;
            prefetch_line(next, part + key);
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
