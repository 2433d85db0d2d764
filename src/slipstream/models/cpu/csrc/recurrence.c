/* Recurrent layers between their projections: a causal convolution, then heads whose states fade and take in tokens.
 *
 * Every token takes the same operations in the same order, so its bits depend neither on its neighbors nor on where a
 * forward begins. The specification is recurrence.py.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

enum { ABREAST = 8 /* registers of a state's row that are computed together */ };

/* Numbers of a row in memory: bfloat16, or float32 where `halves` is NULL. */
struct row {
    const uint16_t *halves;
    const float *numbers;
};

static inline struct row row_at(const struct recurrence *r, const void *from, int64_t index) {
    struct row row = {(const uint16_t *)from + index, (const float *)from + index};
    if (r->is_float) row.halves = 0;
    return row;
}

ALWAYS floats lanes(struct row row, int64_t i) { return row.halves ? load_bf16(row.halves + i) : load_floats(row.numbers + i); }

static inline float number(struct row row, int64_t i) {
    if (!row.halves) return row.numbers[i];
    uint32_t bits = (uint32_t)row.halves[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ALWAYS floats rounded(const struct recurrence *r, floats x) { return r->is_float ? x : round_bf16(x); }
static inline float rounded_number(const struct recurrence *r, float x) {
    float all[LANES];
    store_floats(all, rounded(r, all_floats(x)));
    return all[0];
}

/* Finds the inputs at a position: in the forward or, before it, in the ring. Returns 0 before the text's beginning. */
static int inputs_at(const struct recurrence *r, const struct segment *s, const void *x, const void *ring, int64_t position,
                     struct row *row) {
    if (position < 0) return 0;
    int64_t old = s->slot * r->ring + position % r->ring;
    *row = position < s->start ? row_at(r, ring, old * r->inputs) : row_at(r, x, (position - s->start) * r->inputs);
    return 1;
}

/* The convolution of `count` channels, from number `first` on. */
static void convolve(const struct recurrence *r, const struct row *seen, const int *there, int64_t first, int64_t count,
                     float *out) {
    for (int64_t i = first; i < first + count; i += LANES) {
        floats sum = all_floats(0);
        for (int64_t tap = 0; tap < r->taps; tap++)
            if (there[tap]) sum = add_product(sum, lanes(seen[tap], i), load_floats(r->weight + tap * r->channels + i));
        if (r->bias) sum = add_floats(sum, load_floats(r->bias + i));
        sum = rounded(r, sum);
        if (r->heads) { /* SiLU */
            floats z = max_floats(min_floats(subtract_floats(all_floats(0), sum), all_floats(88)), all_floats(-88));
            sum = rounded(r, divide_floats(sum, add_floats(all_floats(1), exponential(z))));
        }
        store_floats(out + i - first, sum);
    }
}

static void normalize(float *x, int64_t size, float scale) {
    floats squares = all_floats(0);
    for (int64_t i = 0; i < size; i += LANES) squares = add_product(squares, load_floats(x + i), load_floats(x + i));
    floats factor = all_floats(scale / sqrtf(sum_of(squares) + 1e-6f));
    for (int64_t i = 0; i < size; i += LANES) store_floats(x + i, multiply_floats(load_floats(x + i), factor));
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Computes how much of a head's state stays, and how much of the token it takes in. */
static void gate(const struct recurrence *r, struct row now, int64_t head, float *stays, float *takes) {
    if (r->corrects) {
        *takes = rounded_number(r, 1 / (1 + expf(-number(now, r->channels + head))));
        *stays = expf(r->rate[head] * softplus(number(now, r->channels + r->heads + head) + r->shift[head]));
    } else {
        float step = rounded_number(r, number(now, r->channels + head) + rounded_number(r, r->shift[head]));
        *takes = rounded_number(r, fmaxf(softplus(step), r->least_step));
        *stays = expf(r->rate[head] * *takes);
    }
}

/* Takes a token into `wide` registers of each row of the state [keys][values], from `state` on; writes its output. */
ALWAYS void update(const struct recurrence *r, const int wide, float *state,
        const float *key, const float *query, const float *value, float stays, float takes, float *out) {
    floats fade = all_floats(stays), sum[ABREAST], taken[ABREAST];
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) sum[j] = all_floats(0);
    if (r->corrects)
        for (int64_t i = 0; i < r->key_size; i++)
            #pragma GCC unroll 8
            for (int j = 0; j < wide; j++) {
                floats faded = multiply_floats(fade, load_floats(state + i * r->value_size + j * LANES));
                sum[j] = add_product(sum[j], faded, all_floats(key[i]));
            }
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) {
        taken[j] = multiply_floats(subtract_floats(load_floats(value + j * LANES), sum[j]), all_floats(takes));
        sum[j] = all_floats(0);
    }
    for (int64_t i = 0; i < r->key_size; i++) {
        floats k = all_floats(key[i]), q = all_floats(query[i]);
        #pragma GCC unroll 8
        for (int j = 0; j < wide; j++) {
            float *at = state + i * r->value_size + j * LANES;
            floats now = add_product(multiply_floats(fade, load_floats(at)), k, taken[j]);
            store_floats(at, now);
            sum[j] = add_product(sum[j], now, q);
        }
    }
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) store_floats(out + j * LANES, sum[j]);
}

static void update_all(const struct recurrence *r, float *state, const float *key, const float *query,
                       const float *value, float stays, float takes, float *out) {
    int64_t at = 0;
    for (; at + ABREAST * LANES <= r->value_size; at += ABREAST * LANES)
        update(r, ABREAST, state + at, key, query, value + at, stays, takes, out + at);
    for (; at < r->value_size; at += LANES)
        update(r, 1, state + at, key, query, value + at, stays, takes, out + at);
}

/* One head of one row. x: the row's inputs; out: its outputs [count][heads][value_size]. */
static void head_of_row(const struct recurrence *r, const struct segment *s, int64_t head, const void *x, const void *ring,
                        float *kept, float *out) {
    _Alignas(64) float state[MAX_STATE], query[MAX_HEAD_SIZE], key[MAX_HEAD_SIZE], value[MAX_HEAD_SIZE];
    _Alignas(64) float result[MAX_HEAD_SIZE];
    int64_t shared = head / (r->heads / r->key_heads), numbers = r->key_size * r->value_size;
    if (s->known) memcpy(state, kept, numbers * sizeof(float));
    else memset(state, 0, numbers * sizeof(float));
    for (int64_t position = s->known; position < s->start + s->count; position++) {
        struct row seen[MAX_TAPS];
        int there[MAX_TAPS];
        for (int64_t tap = 0; tap < r->taps; tap++)
            there[tap] = inputs_at(r, s, x, ring, position - r->taps + 1 + tap, seen + tap);
        convolve(r, seen, there, r->queries + shared * r->key_size, r->key_size, query);
        convolve(r, seen, there, r->keys + shared * r->key_size, r->key_size, key);
        convolve(r, seen, there, r->values + head * r->value_size, r->value_size, value);
        if (r->normalized) {
            normalize(query, r->key_size, 1 / sqrtf((float)r->key_size));
            normalize(key, r->key_size, 1);
        }
        float stays, takes;
        gate(r, seen[r->taps - 1], head, &stays, &takes);
        update_all(r, state, key, query, value, stays, takes, result);
        if (position >= s->start) {
            float *to = out + ((position - s->start) * r->heads + head) * r->value_size;
            floats skip = all_floats(r->skip ? r->skip[head] : 0);
            for (int64_t i = 0; i < r->value_size; i += LANES)
                store_floats(to + i, add_product(load_floats(result + i), skip, load_floats(value + i)));
        }
        if (position + 1 == s->keep) memcpy(kept, state, numbers * sizeof(float));
    }
}

/* A layer without heads: out [count][channels]. */
static void channels_of_row(const struct recurrence *r, const struct segment *s, const void *x, const void *ring, float *out) {
    for (int64_t position = s->start; position < s->start + s->count; position++) {
        struct row seen[MAX_TAPS];
        int there[MAX_TAPS];
        for (int64_t tap = 0; tap < r->taps; tap++)
            there[tap] = inputs_at(r, s, x, ring, position - r->taps + 1 + tap, seen + tap);
        convolve(r, seen, there, 0, r->channels, out + (position - s->start) * r->channels);
    }
}

/* A forward's rows. next: the task, a head of a row, that no thread has taken yet. */
struct forward {
    const struct recurrence *r;
    const struct segment *segments;
    int64_t rows;
    const void *x, *ring;
    float *states, *out;
    _Atomic int64_t next;
};

static void compute_head(const struct forward *of, int64_t task) {
    const struct recurrence *r = of->r;
    int64_t row = r->heads ? task / r->heads : task, head = r->heads ? task % r->heads : 0;
    int64_t outputs = r->heads ? r->heads * r->value_size : r->channels, state = r->key_size * r->value_size;
    const struct segment *s = of->segments + row;
    const char *own = (const char *)of->x + row * s->count * r->inputs * (r->is_float ? 4 : 2);
    float *to = of->out + row * s->count * outputs;
    if (r->heads) head_of_row(r, s, head, own, of->ring, of->states + (s->slot * r->heads + head) * state, to);
    else channels_of_row(r, s, own, of->ring, to);
}

static void compute_heads(const struct member *me, void *given) {
    struct forward *of = given;
    (void)me;
    int64_t tasks = of->rows * (of->r->heads ? of->r->heads : 1);
    for (int64_t task; (task = take(&of->next)) < tasks;) compute_head(of, task);
}

void advance_states(const struct recurrence *r, const struct segment *segments, int64_t rows, const void *x, void *ring,
                    float *states, float *out) {
    int64_t bytes = r->inputs * (r->is_float ? 4 : 2);
    struct forward forward = {r, segments, rows, x, ring, states, out, 0};
    in_team(compute_heads, &forward);
    for (int64_t i = 0; i < rows; i++) {
        const struct segment *s = segments + i;
        int64_t first = s->count > r->ring ? s->count - r->ring : 0;
        for (int64_t t = first; t < s->count; t++)
            memcpy((char *)ring + (s->slot * r->ring + (s->start + t) % r->ring) * bytes,
                   (const char *)x + (i * s->count + t) * bytes, bytes);
    }
}
