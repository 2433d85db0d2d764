/* Recurrent layers between their projections: a causal convolution, then heads whose states fade and take in tokens.
 *
 * Every token takes the same operations in the same order, so its bits depend neither on its neighbours nor on where a
 * forward begins. The specification is recurrence.py.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

enum { ABREAST = 8 /* registers of a state's row that are computed together */ };

struct row { /* a row's numbers in memory */
    const uint16_t *halves;
    const float *numbers;
};

static inline struct row row_at(const struct recurrence *r, const void *from, long index) {
    struct row row = {(const uint16_t *)from + index, (const float *)from + index};
    if (r->is_float) row.halves = 0;
    return row;
}

static inline __m512 lanes(struct row row, long i) { return row.halves ? load(row.halves + i) : _mm512_loadu_ps(row.numbers + i); }

static inline float number(struct row row, long i) {
    if (!row.halves) return row.numbers[i];
    uint32_t bits = (uint32_t)row.halves[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline __m512 rounded(const struct recurrence *r, __m512 x) { return r->is_float ? x : round_bf16(x); }
static inline float rounded_number(const struct recurrence *r, float x) {
    return _mm512_cvtss_f32(rounded(r, _mm512_set1_ps(x)));
}

/* The inputs at a position: of the forward, of the ring before it, none before the text. */
static int inputs_at(const struct recurrence *r, const struct segment *s, const void *x, const void *ring, long position,
                     struct row *row) {
    if (position < 0) return 0;
    long old = s->slot * r->ring + position % r->ring;
    *row = position < s->start ? row_at(r, ring, old * r->inputs) : row_at(r, x, (position - s->start) * r->inputs);
    return 1;
}

/* The convolution of `count` channels, from number `first` on. */
static void convolve(const struct recurrence *r, const struct row *seen, const int *there, long first, long count,
                     float *out) {
    for (long i = first; i < first + count; i += LANES) {
        __m512 sum = _mm512_setzero_ps();
        for (long tap = 0; tap < r->taps; tap++)
            if (there[tap]) sum = _mm512_fmadd_ps(lanes(seen[tap], i), _mm512_loadu_ps(r->weight + tap * r->channels + i), sum);
        if (r->bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(r->bias + i));
        sum = rounded(r, sum);
        if (r->heads) { /* SiLU */
            __m512 z = _mm512_max_ps(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), sum), _mm512_set1_ps(88)), _mm512_set1_ps(-88));
            sum = rounded(r, _mm512_div_ps(sum, _mm512_add_ps(_mm512_set1_ps(1), exponential(z))));
        }
        _mm512_storeu_ps(out + i - first, sum);
    }
}

static void normalise(float *x, long size, float scale) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i), squares);
    __m512 factor = _mm512_set1_ps(scale / sqrtf(_mm512_reduce_add_ps(squares) + 1e-6f));
    for (long i = 0; i < size; i += LANES) _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* How much of a head's state stays, and how much of the token is taken in. */
static void gate(const struct recurrence *r, struct row now, long head, float *stays, float *takes) {
    if (r->corrects) {
        *takes = rounded_number(r, 1 / (1 + expf(-number(now, r->channels + head))));
        *stays = expf(r->rate[head] * softplus(number(now, r->channels + r->heads + head) + r->shift[head]));
    } else {
        float step = rounded_number(r, number(now, r->channels + head) + rounded_number(r, r->shift[head]));
        *takes = rounded_number(r, softplus(step));
        *stays = expf(r->rate[head] * *takes);
    }
}

/* A token's update of `wide` registers of each of the state's rows [keys][values], from `state` on. */
static inline __attribute__((always_inline)) void update(const struct recurrence *r, const int wide, float *state,
        const float *key, const float *query, const float *value, float stays, float takes, float *out) {
    __m512 fade = _mm512_set1_ps(stays), sum[ABREAST], taken[ABREAST];
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) sum[j] = _mm512_setzero_ps();
    if (r->corrects)
        for (long i = 0; i < r->key_size; i++)
            #pragma GCC unroll 8
            for (int j = 0; j < wide; j++) {
                __m512 faded = _mm512_mul_ps(fade, _mm512_loadu_ps(state + i * r->value_size + j * LANES));
                sum[j] = _mm512_fmadd_ps(faded, _mm512_set1_ps(key[i]), sum[j]);
            }
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) {
        taken[j] = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(value + j * LANES), sum[j]), _mm512_set1_ps(takes));
        sum[j] = _mm512_setzero_ps();
    }
    for (long i = 0; i < r->key_size; i++) {
        __m512 k = _mm512_set1_ps(key[i]), q = _mm512_set1_ps(query[i]);
        #pragma GCC unroll 8
        for (int j = 0; j < wide; j++) {
            float *at = state + i * r->value_size + j * LANES;
            __m512 now = _mm512_fmadd_ps(k, taken[j], _mm512_mul_ps(fade, _mm512_loadu_ps(at)));
            _mm512_storeu_ps(at, now);
            sum[j] = _mm512_fmadd_ps(now, q, sum[j]);
        }
    }
    #pragma GCC unroll 8
    for (int j = 0; j < wide; j++) _mm512_storeu_ps(out + j * LANES, sum[j]);
}

static void update_all(const struct recurrence *r, float *state, const float *key, const float *query,
                       const float *value, float stays, float takes, float *out) {
    long at = 0;
    for (; at + ABREAST * LANES <= r->value_size; at += ABREAST * LANES)
        update(r, ABREAST, state + at, key, query, value + at, stays, takes, out + at);
    for (; at < r->value_size; at += LANES)
        update(r, 1, state + at, key, query, value + at, stays, takes, out + at);
}

/* One head of one row. x: the row's inputs; out: its outputs [count][heads][value_size]. */
static void head_of_row(const struct recurrence *r, const struct segment *s, long head, const void *x, const void *ring,
                        float *kept, float *out) {
    _Alignas(64) float state[MAX_STATE], query[MAX_HEAD_SIZE], key[MAX_HEAD_SIZE], value[MAX_HEAD_SIZE];
    _Alignas(64) float result[MAX_HEAD_SIZE];
    long shared = head / (r->heads / r->key_heads), numbers = r->key_size * r->value_size;
    if (s->known) memcpy(state, kept, numbers * sizeof(float));
    else memset(state, 0, numbers * sizeof(float));
    for (long position = s->known; position < s->start + s->count; position++) {
        struct row seen[MAX_TAPS];
        int there[MAX_TAPS];
        for (long tap = 0; tap < r->taps; tap++)
            there[tap] = inputs_at(r, s, x, ring, position - r->taps + 1 + tap, seen + tap);
        convolve(r, seen, there, r->queries + shared * r->key_size, r->key_size, query);
        convolve(r, seen, there, r->keys + shared * r->key_size, r->key_size, key);
        convolve(r, seen, there, r->values + head * r->value_size, r->value_size, value);
        if (r->normalised) {
            normalise(query, r->key_size, 1 / sqrtf((float)r->key_size));
            normalise(key, r->key_size, 1);
        }
        float stays, takes;
        gate(r, seen[r->taps - 1], head, &stays, &takes);
        update_all(r, state, key, query, value, stays, takes, result);
        if (position >= s->start) {
            float *to = out + ((position - s->start) * r->heads + head) * r->value_size;
            __m512 skip = _mm512_set1_ps(r->skip ? r->skip[head] : 0);
            for (long i = 0; i < r->value_size; i += LANES)
                _mm512_storeu_ps(to + i, _mm512_fmadd_ps(skip, _mm512_loadu_ps(value + i), _mm512_loadu_ps(result + i)));
        }
        if (position + 1 == s->keep) memcpy(kept, state, numbers * sizeof(float));
    }
}

/* A layer without heads: out [count][channels]. */
static void channels_of_row(const struct recurrence *r, const struct segment *s, const void *x, const void *ring, float *out) {
    for (long position = s->start; position < s->start + s->count; position++) {
        struct row seen[MAX_TAPS];
        int there[MAX_TAPS];
        for (long tap = 0; tap < r->taps; tap++)
            there[tap] = inputs_at(r, s, x, ring, position - r->taps + 1 + tap, seen + tap);
        convolve(r, seen, there, 0, r->channels, out + (position - s->start) * r->channels);
    }
}

/* Rows of a forward, each of segment.count tokens. x: [rows][count][inputs]; ring: [slots][r->ring][inputs];
 * states: [slots][heads][key_size][value_size]; out: [rows][count][outputs]. */
void advance(const struct recurrence *r, const struct segment *segments, long rows, const void *x, void *ring,
             float *states, float *out) {
    long bytes = r->inputs * (r->is_float ? 4 : 2), numbers = r->heads * r->key_size * r->value_size;
    long outputs = r->heads ? r->heads * r->value_size : r->channels;
    #pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < rows * (r->heads ? r->heads : 1); task++) {
        long i = r->heads ? task / r->heads : task, head = r->heads ? task % r->heads : 0;
        const struct segment *s = segments + i;
        const char *own = (const char *)x + i * s->count * bytes;
        float *to = out + i * s->count * outputs;
        if (r->heads) head_of_row(r, s, head, own, ring, states + s->slot * numbers + head * r->key_size * r->value_size, to);
        else channels_of_row(r, s, own, ring, to);
    }
    for (long i = 0; i < rows; i++) {
        const struct segment *s = segments + i;
        long first = s->count > r->ring ? s->count - r->ring : 0;
        for (long t = first; t < s->count; t++)
            memcpy((char *)ring + (s->slot * r->ring + (s->start + t) % r->ring) * bytes,
                   (const char *)x + (i * s->count + t) * bytes, bytes);
    }
}
