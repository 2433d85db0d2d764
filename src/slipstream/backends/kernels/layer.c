/* A decoder layer around its attention: pre-norm, rotary positions, a gated feed-forward part.
 *
 * Everything here treats tokens one by one, so a token gets the same bits whatever tokens are beside it. Results are
 * rounded to bfloat16 where the model's own operators round.
 */
#include "kernels.h"

enum { LANES = 16, FEW = 8 /* tokens that one thread is done with before a second one has begun */ };

/* Root mean square norm. weight: [size], NULL where there is no norm. rounds_first: before the weight, not behind. */
struct norm {
    const float *weight;
    float eps;
    int rounds_first;
};

/* heads: of queries; behind theirs come key_heads each of keys and values. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))): SiLU, or GELU by its tanh formula. */
struct layer {
    struct linear qkv, out, gate_up, down;
    struct norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward;
    long hidden, inner, heads, key_heads, size;
    float slope, cubic;
};

static __m512 load(const uint16_t *from) { return widened(_mm256_loadu_si256((const void *)from)); }
static __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static void store(uint16_t *to, __m512 x) { _mm256_storeu_si256((void *)to, narrowed(x)); }
static __m512 rounded(__m512 x) { return widened(narrowed(x)); }

static void normalise(const struct norm *norm, const uint16_t *x, long size, uint16_t *out) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
    float mean = _mm512_reduce_add_ps(squares) / (float)size;
    __m512 scale = _mm512_set1_ps(1 / __builtin_sqrtf(mean + norm->eps));
    for (long i = 0; i < size; i += LANES) {
        __m512 y = _mm512_mul_ps(load(x + i), scale);
        store(out + i, _mm512_mul_ps(norm->rounds_first ? rounded(y) : y, _mm512_loadu_ps(norm->weight + i)));
    }
}

/* Rotary positions [size]: each half of a head turns with the other. */
static void turn(uint16_t *head, long size, const uint16_t *cosines, const uint16_t *sines) {
    long half = size / 2;
    for (long i = 0; i < half; i += LANES) {
        __m512 left = load(head + i), right = load(head + half + i);
        __m512 a = rounded(_mm512_mul_ps(left, load(cosines + i)));
        __m512 b = rounded(_mm512_mul_ps(right, load(sines + i)));
        __m512 c = rounded(_mm512_mul_ps(right, load(cosines + half + i)));
        __m512 d = rounded(_mm512_mul_ps(left, load(sines + half + i)));
        store(head + i, _mm512_sub_ps(a, b));
        store(head + half + i, _mm512_add_ps(c, d));
    }
}

/* e to the x, for x from -88 to 88: 2^n times a polynomial of degree 6, within 2 units of the last place. */
static __m512 exponential(__m512 x) {
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* The activation of the gate [inner] times what is behind it [inner]. */
static void gate(const struct layer *layer, const uint16_t *both, uint16_t *out) {
    __m512 one = _mm512_set1_ps(1), slope = _mm512_set1_ps(layer->slope), cubic = _mm512_set1_ps(layer->cubic);
    __m512 most = _mm512_set1_ps(88), least = _mm512_set1_ps(-88);
    for (long i = 0; i < layer->inner; i += LANES) {
        __m512 x = load(both + i), up = load(both + layer->inner + i);
        __m512 z = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(x, x), cubic, slope));
        z = _mm512_max_ps(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), z), most), least);
        store(out + i, _mm512_mul_ps(rounded(_mm512_div_ps(x, _mm512_add_ps(one, exponential(z)))), up));
    }
}

/* out = x + y, all [size]; y goes through the norm first if there is one. */
static void add_up(const struct norm *norm, const uint16_t *x, uint16_t *y, long size, uint16_t *out) {
    if (norm->weight) normalise(norm, y, size, y);
    for (long i = 0; i < size; i += LANES) store(out + i, _mm512_add_ps(load(x + i), load(y + i)));
}

/* From hidden [tokens][hidden] to queries, keys and values [tokens][heads + 2 * key_heads][size] for attention.
 * cosines, sines: [tokens][size]. space: as many numbers as `space_for` says. */
void enter(const struct layer *layer, const uint16_t *hidden, long tokens, const uint16_t *cosines,
           const uint16_t *sines, uint16_t *out, uint16_t *space) {
    long size = layer->size, all = layer->heads + 2 * layer->key_heads;
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++)
        normalise(&layer->before_attention, hidden + t * layer->hidden, layer->hidden, space + t * layer->hidden);
    multiply(&layer->qkv, space, tokens, out, space + tokens * layer->hidden);
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < layer->heads + layer->key_heads; h++) {
            const struct norm *norm = h < layer->heads ? &layer->queries : &layer->keys;
            uint16_t *head = out + (t * all + h) * size;
            if (norm->weight) normalise(norm, head, size, head);
            turn(head, size, cosines + t * size, sines + t * size);
        }
}

/* From hidden [tokens][hidden] and what attention found [tokens][heads][size] to the next layer's hidden. */
void leave(const struct layer *layer, const uint16_t *hidden, const uint16_t *found, long tokens, uint16_t *out,
           uint16_t *space) {
    long width = layer->hidden, inner = layer->inner;
    uint16_t *normed = space, *both = normed + tokens * width, *gated = both + tokens * 2 * inner;
    uint16_t *rest = gated + tokens * inner;
    multiply(&layer->out, found, tokens, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++) {
        add_up(&layer->after_attention, hidden + t * width, normed + t * width, width, out + t * width);
        normalise(&layer->before_feed_forward, out + t * width, width, normed + t * width);
    }
    multiply(&layer->gate_up, normed, tokens, both, rest);
    #pragma omp parallel for if (tokens > 1)
    for (long t = 0; t < tokens; t++) gate(layer, both + t * 2 * inner, gated + t * inner);
    multiply(&layer->down, gated, tokens, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++)
        add_up(&layer->after_feed_forward, out + t * width, normed + t * width, width, out + t * width);
}

/* How many bfloat16 numbers of space `enter` and `leave` need per token. */
long space_for(const struct layer *layer) {
    long widest = layer->inner > layer->heads * layer->size ? layer->inner : layer->heads * layer->size;
    if (layer->hidden > widest) widest = layer->hidden;
    return layer->hidden + 3 * layer->inner + widest + 128; /* the last two: a padded copy of a product's inputs */
}
