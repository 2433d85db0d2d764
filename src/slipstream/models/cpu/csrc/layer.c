/* A decoder layer in bfloat16: results are rounded where the model's own operators round. */
#include "kernels.h"

typedef uint16_t number;
typedef struct layer layer_type;
typedef struct kv_cache cache_type;
#define NUMBERS_ARE_FLOATS 0
#define LOWEST (-87)
#define load_number load_bf16
#define store_number store_bf16
#define round_number round_bf16

static inline int rounds_first(const struct norm *norm) { return norm->rounds_first; }

static void multiply_by(const struct layer *layer, const struct linear *w, const uint16_t *x, int64_t tokens,
                        uint16_t *out, uint16_t *space) {
    (void)layer;
    multiply(w, x, tokens, out, space);
}

/* In float32, rounded once. */
static void multiply_by_experts(const struct experts *experts, const uint16_t *x, const uint16_t *routed, int64_t tokens,
                                uint16_t *out, uint16_t *space) {
    int64_t count = tokens * experts->hidden;
    float *entering = (float *)from_64(space), *of_router = entering + count, *sums = of_router + count;
    for (int64_t i = 0; i < count; i += LANES) store_floats(entering + i, load_bf16(x + i));
    for (int64_t i = 0; routed && i < count; i += LANES) store_floats(of_router + i, load_bf16(routed + i));
    multiply_experts(experts, entering, routed ? of_router : NULL, tokens, NULL, sums, from_64(sums + count));
    for (int64_t i = 0; i < count; i += LANES) store_bf16(out + i, load_floats(sums + i));
}

/* RoPE [size]: each half of a head is rotated with the other. */
static void rotate(uint16_t *head, int64_t size, const uint16_t *cosines, const uint16_t *sines) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        floats left = load_bf16(head + i), right = load_bf16(head + half + i);
        floats a = round_bf16(multiply_floats(left, load_bf16(cosines + i)));
        floats b = round_bf16(multiply_floats(right, load_bf16(sines + i)));
        floats c = round_bf16(multiply_floats(right, load_bf16(cosines + half + i)));
        floats d = round_bf16(multiply_floats(left, load_bf16(sines + half + i)));
        store_bf16(head + i, subtract_floats(a, b));
        store_bf16(head + half + i, add_floats(c, d));
    }
}

#include "attention.h"
#include "layer_steps.h"

/* How many bfloat16 numbers of scratch space these functions need. length: of the cache; 0 for those without one. */
int64_t layer_scratch(const struct layer *layer, int64_t tokens, int64_t length) {
    int64_t of_product = tokens * SPACE * (widest(layer) + BLOCK), of_experts = 0;
    if (layer->experts) of_experts = tokens * layer->hidden * 6 + (experts_scratch(layer->experts, tokens) + 128) / 2;
    return numbers_needed(layer, tokens, length) + (of_experts > of_product ? of_experts : of_product);
}
