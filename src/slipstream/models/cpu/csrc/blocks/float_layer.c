/* A decoder layer in float32 with the weights of a quantized file. */
#include "blocks.h"

typedef float number;
typedef struct float_layer layer_type;
typedef struct kv_cache cache_type;
#define NUMBERS_ARE_FLOATS 1
#define LOWEST (-86)
#define load_number load_floats
#define store_number store_floats

static inline floats round_number(floats x) { return x; }
static inline int rounds_first(const struct norm *norm) { return (void)norm, 0; }

static void multiply_by(const struct float_layer *layer, const struct block_linear *w, const float *x, int64_t tokens,
                        float *out, float *space) {
    multiply_blocks(w, x, tokens, layer->planes, out, (uint8_t *)space);
}

static void multiply_by_experts(const struct experts *experts, const float *x, const float *routed, int64_t tokens,
                                float *out, float *space) {
    multiply_experts(experts, x, routed, tokens, NULL, out, from_64(space));
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

#include "../attention.h"
#include "../layer_steps.h"

/* How many numbers of scratch space these functions need. length: of the cache; 0 for functions without one. */
int64_t layer_scratch(const struct float_layer *layer, int64_t tokens, int64_t length) {
    int64_t bytes = activation_bytes(widest(layer), tokens, layer->planes);
    int64_t of_experts = layer->experts ? experts_scratch(layer->experts, tokens) + 64 : 0;
    return numbers_needed(layer, tokens, length) + (of_experts > bytes ? of_experts : bytes) / 4 + LANES;
}
