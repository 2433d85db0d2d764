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
    return numbers_needed(layer, tokens, length) + tokens * SPACE * (widest(layer) + BLOCK);
}
