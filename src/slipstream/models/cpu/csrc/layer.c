/* A decoder layer around its attention: pre-norm, rotary positions, a gated feed-forward part.
 *
 * Everything here treats each token alone, so with 12-bit weights its bits do not depend on its neighbours.
 * Results are rounded to bfloat16 where the model's own operators round.
 */
#include "kernels.h"

enum { FEW = 8 /* tokens that one thread finishes before a second one has started */ };

static void normalise(const struct norm *norm, const uint16_t *x, long size, uint16_t *out) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
    float mean = _mm512_reduce_add_ps(squares) / (float)size;
    __m512 scale = _mm512_set1_ps(1 / __builtin_sqrtf(mean + norm->eps));
    for (long i = 0; i < size; i += LANES) {
        __m512 y = _mm512_mul_ps(load(x + i), scale);
        store(out + i, _mm512_mul_ps(norm->rounds_first ? round_bf16(y) : y, _mm512_loadu_ps(norm->weight + i)));
    }
}

/* RoPE [size]: each half of a head is rotated with the other. */
static void rotate(uint16_t *head, long size, const uint16_t *cosines, const uint16_t *sines) {
    long half = size / 2;
    for (long i = 0; i < half; i += LANES) {
        __m512 left = load(head + i), right = load(head + half + i);
        __m512 a = round_bf16(_mm512_mul_ps(left, load(cosines + i)));
        __m512 b = round_bf16(_mm512_mul_ps(right, load(sines + i)));
        __m512 c = round_bf16(_mm512_mul_ps(right, load(cosines + half + i)));
        __m512 d = round_bf16(_mm512_mul_ps(left, load(sines + half + i)));
        store(head + i, _mm512_sub_ps(a, b));
        store(head + half + i, _mm512_add_ps(c, d));
    }
}

/* The activation of the gate [inner] times the up projection [inner] that follows it. */
static void activate_gate(const struct layer *layer, const uint16_t *both, uint16_t *out) {
    __m512 one = _mm512_set1_ps(1), slope = _mm512_set1_ps(layer->slope), cubic = _mm512_set1_ps(layer->cubic);
    __m512 most = _mm512_set1_ps(88), least = _mm512_set1_ps(-88);
    for (long i = 0; i < layer->inner; i += LANES) {
        __m512 x = load(both + i), up = load(both + layer->inner + i);
        __m512 z = _mm512_mul_ps(x, _mm512_fmadd_ps(_mm512_mul_ps(x, x), cubic, slope));
        z = _mm512_max_ps(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), z), most), least);
        store(out + i, _mm512_mul_ps(round_bf16(_mm512_div_ps(x, _mm512_add_ps(one, exponential(z)))), up));
    }
}

/* out = x + y, all [size]; y goes through the norm first if there is one. */
static void add_residual(const struct norm *norm, const uint16_t *x, uint16_t *y, long size, uint16_t *out) {
    if (norm->weight) normalise(norm, y, size, y);
    for (long i = 0; i < size; i += LANES) store(out + i, _mm512_add_ps(load(x + i), load(y + i)));
}

/* From hidden [tokens][hidden] to queries, keys and values [tokens][heads + 2 * key_heads][size] for attention.
 * cosines, sines: [tokens][size]. space: as many numbers as `scratch_per_token` says. */
void project_qkv_rope(const struct layer *layer, const uint16_t *hidden, long tokens, const uint16_t *cosines,
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
            rotate(head, size, cosines + t * size, sines + t * size);
        }
}

/* From hidden [tokens][hidden] and attention's output [tokens][heads][size] to the next layer's hidden. */
void residual_mlp(const struct layer *layer, const uint16_t *hidden, const uint16_t *attended, long tokens, uint16_t *out,
           uint16_t *space) {
    long width = layer->hidden, inner = layer->inner;
    uint16_t *normed = space, *both = normed + tokens * width, *gated = both + tokens * 2 * inner;
    uint16_t *rest = gated + tokens * inner;
    multiply(&layer->out, attended, tokens, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++) {
        add_residual(&layer->after_attention, hidden + t * width, normed + t * width, width, out + t * width);
        normalise(&layer->before_feed_forward, out + t * width, width, normed + t * width);
    }
    multiply(&layer->gate_up, normed, tokens, both, rest);
    #pragma omp parallel for if (tokens > 1)
    for (long t = 0; t < tokens; t++) activate_gate(layer, both + t * 2 * inner, gated + t * inner);
    multiply(&layer->down, gated, tokens, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (long t = 0; t < tokens; t++)
        add_residual(&layer->after_feed_forward, out + t * width, normed + t * width, width, out + t * width);
}

/* The whole layer, attention included: from hidden [tokens][hidden] to the next layer's. */
void whole_layer(const struct layer *layer, const struct kv_cache *memory, const uint16_t *hidden, long tokens,
             const uint16_t *cosines, const uint16_t *sines, uint16_t *out, uint16_t *space) {
    int64_t *groups = (int64_t *)space;
    uint16_t *heads = space + tokens * 8, *attended = heads + tokens * (layer->heads + 2 * layer->key_heads) * layer->size;
    uint16_t *rest = attended + tokens * layer->heads * layer->size;
    project_qkv_rope(layer, hidden, tokens, cosines, sines, heads, rest);
    attend(layer, memory, heads, tokens, attended, groups);
    residual_mlp(layer, hidden, attended, tokens, out, rest);
}

/* How many bfloat16 numbers of space these functions need per token. */
long scratch_per_token(const struct layer *layer) {
    long heads = layer->heads * layer->size, widest = layer->inner > heads ? layer->inner : heads;
    if (layer->hidden > widest) widest = layer->hidden;
    long attention = 8 + (2 * layer->heads + 2 * layer->key_heads) * layer->size;
    return attention + layer->hidden + 3 * layer->inner + widest + 128; /* the last two: a padded copy of inputs */
}
