/* A decoder layer around its attention in float32, with the weights of a quantised file.
 *
 * As layer.c, without its roundings: pre-norm, rotary positions, a gated feed-forward part. Each token is treated alone.
 */
#include "blocks.h"

enum { FEW = 8 /* tokens that one thread finishes before a second one has started */ };

static void normalise(const struct float_norm *norm, const float *x, int64_t size, float *out) {
    floats squares = all_floats(0);
    for (int64_t i = 0; i < size; i += LANES) squares = add_product(squares, load_floats(x + i), load_floats(x + i));
    floats scale = all_floats(1 / sqrtf(sum_of(squares) / (float)size + norm->eps));
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = multiply_floats(load_floats(x + i), scale);
        store_floats(out + i, multiply_floats(y, load_floats(norm->weight + i)));
    }
}

/* RoPE [size]: each half of a head is rotated with the other. */
static void rotate(float *head, int64_t size, const float *cosines, const float *sines) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        floats left = load_floats(head + i), right = load_floats(head + half + i);
        floats a = multiply_floats(left, load_floats(cosines + i));
        floats b = multiply_floats(right, load_floats(cosines + half + i));
        store_floats(head + i, take_product(a, right, load_floats(sines + i)));
        store_floats(head + half + i, add_product(b, left, load_floats(sines + half + i)));
    }
}

/* The activation of the gate [inner] times the up projection [inner] that follows it. */
static void activate_gate(const struct float_layer *layer, const float *both, float *out) {
    floats one = all_floats(1), slope = all_floats(layer->slope), cubic = all_floats(layer->cubic);
    for (int64_t i = 0; i < layer->inner; i += LANES) {
        floats x = load_floats(both + i), up = load_floats(both + layer->inner + i);
        floats z = multiply_floats(x, add_product(slope, multiply_floats(x, x), cubic));
        z = max_floats(min_floats(subtract_floats(all_floats(0), z), all_floats(88)), all_floats(-86));
        store_floats(out + i, multiply_floats(divide_floats(x, add_floats(one, exponential(z))), up));
    }
}

/* out = x + y, all [size]; y goes through the norm first if there is one. */
static void add_residual(const struct float_norm *norm, const float *x, float *y, int64_t size, float *out) {
    if (norm->weight) normalise(norm, y, size, y);
    for (int64_t i = 0; i < size; i += LANES) store_floats(out + i, add_floats(load_floats(x + i), load_floats(y + i)));
}

/* From hidden [tokens][hidden] to queries, keys and values [tokens][heads + 2 * key_heads][size] for attention.
 * cosines, sines: [tokens][size]. space: `float_scratch` numbers. */
void project_heads(const struct float_layer *layer, const float *hidden, int64_t tokens, const float *cosines,
                   const float *sines, float *out, float *space) {
    int64_t size = layer->size, all = layer->heads + 2 * layer->key_heads;
    #pragma omp parallel for if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++)
        normalise(&layer->before_attention, hidden + t * layer->hidden, layer->hidden, space + t * layer->hidden);
    multiply_blocks(&layer->qkv, space, tokens, layer->planes, out, (uint8_t *)(space + tokens * layer->hidden));
    #pragma omp parallel for if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < layer->heads + layer->key_heads; h++) {
            const struct float_norm *norm = h < layer->heads ? &layer->queries : &layer->keys;
            float *head = out + (t * all + h) * size;
            if (norm->weight) normalise(norm, head, size, head);
            rotate(head, size, cosines + t * size, sines + t * size);
        }
}

/* From hidden [tokens][hidden] and attention's output [tokens][heads][size] to the next layer's hidden. */
void feed_forward(const struct float_layer *layer, const float *hidden, const float *attended, int64_t tokens,
                  float *out, float *space) {
    int64_t width = layer->hidden, inner = layer->inner;
    float *normed = space, *both = normed + tokens * width, *gated = both + tokens * 2 * inner;
    uint8_t *rest = (uint8_t *)(gated + tokens * inner);
    multiply_blocks(&layer->out, attended, tokens, layer->planes, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        add_residual(&layer->after_attention, hidden + t * width, normed + t * width, width, out + t * width);
        normalise(&layer->before_feed_forward, out + t * width, width, normed + t * width);
    }
    multiply_blocks(&layer->gate_up, normed, tokens, layer->planes, both, rest);
    #pragma omp parallel for if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) activate_gate(layer, both + t * 2 * inner, gated + t * inner);
    multiply_blocks(&layer->down, gated, tokens, layer->planes, normed, rest);
    #pragma omp parallel for if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++)
        add_residual(&layer->after_feed_forward, out + t * width, normed + t * width, width, out + t * width);
}

/* The whole layer, attention included: from hidden [tokens][hidden] to the next layer's. */
void whole_float_layer(const struct float_layer *layer, const struct float_cache *memory, const float *hidden,
                       int64_t tokens, const float *cosines, const float *sines, float *out, float *space) {
    int64_t *groups = (int64_t *)space;
    float *heads = space + tokens * 4, *attended = heads + tokens * (layer->heads + 2 * layer->key_heads) * layer->size;
    float *rest = attended + tokens * layer->heads * layer->size;
    project_heads(layer, hidden, tokens, cosines, sines, heads, rest);
    attend_float(layer, memory, heads, tokens, attended, groups);
    feed_forward(layer, hidden, attended, tokens, out, rest);
}

/* How many numbers of space these functions need. */
int64_t float_scratch(const struct float_layer *layer, int64_t tokens) {
    int64_t heads = layer->heads * layer->size, widest = layer->inner > heads ? layer->inner : heads;
    if (layer->hidden > widest) widest = layer->hidden;
    int64_t own = 4 + (2 * layer->heads + 2 * layer->key_heads) * layer->size + layer->hidden + 3 * layer->inner;
    return tokens * own + activation_bytes(widest, tokens, layer->planes) / 4 + LANES;
}
