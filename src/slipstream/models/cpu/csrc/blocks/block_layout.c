/* Sizes and offsets of the structs of block_structs.h, and its constants; as layout.c. */
#include "block_structs.h"

#include <stddef.h>

struct entry {
    const char *name;
    int64_t value;
};

#define SIZE_OF(type) {"sizeof " #type, sizeof(struct type)}
#define OFFSET(type, field) {#type "." #field, offsetof(struct type, field)}
#define CONSTANT(name) {#name, name}

/* Ends with an entry without a name. */
const struct entry layout[] = {
    SIZE_OF(block_part), OFFSET(block_part, format), OFFSET(block_part, outputs), OFFSET(block_part, data),

    SIZE_OF(file_piece), OFFSET(file_piece, format), OFFSET(file_piece, rows), OFFSET(file_piece, inputs),
    OFFSET(file_piece, start), OFFSET(file_piece, to),

    SIZE_OF(block_linear), OFFSET(block_linear, inputs), OFFSET(block_linear, outputs),
    OFFSET(block_linear, num_parts), OFFSET(block_linear, parts), OFFSET(block_linear, bias),

    SIZE_OF(float_norm), OFFSET(float_norm, weight), OFFSET(float_norm, eps),

    SIZE_OF(float_layer), OFFSET(float_layer, qkv), OFFSET(float_layer, out), OFFSET(float_layer, gate_up),
    OFFSET(float_layer, down), OFFSET(float_layer, before_attention), OFFSET(float_layer, queries),
    OFFSET(float_layer, keys), OFFSET(float_layer, after_attention), OFFSET(float_layer, before_feed_forward),
    OFFSET(float_layer, after_feed_forward), OFFSET(float_layer, hidden), OFFSET(float_layer, inner),
    OFFSET(float_layer, heads), OFFSET(float_layer, key_heads), OFFSET(float_layer, size),
    OFFSET(float_layer, planes), OFFSET(float_layer, slope), OFFSET(float_layer, cubic),

    SIZE_OF(float_cache), OFFSET(float_cache, keys), OFFSET(float_cache, values), OFFSET(float_cache, length),
    OFFSET(float_cache, window), OFFSET(float_cache, scaling), OFFSET(float_cache, slots),
    OFFSET(float_cache, positions), OFFSET(float_cache, places), OFFSET(float_cache, forks),
    OFFSET(float_cache, begins), OFFSET(float_cache, paths),

    SIZE_OF(stacked_layer), OFFSET(stacked_layer, layer), OFFSET(stacked_layer, keys), OFFSET(stacked_layer, values),
    OFFSET(stacked_layer, length), OFFSET(stacked_layer, window), OFFSET(stacked_layer, rotation),
    OFFSET(stacked_layer, scaling),

    CONSTANT(LANES), CONSTANT(GROUP), CONSTANT(MAX_HEAD), CONSTANT(MAX_REPEATS),
    CONSTANT(Q4_0), CONSTANT(Q4_1), CONSTANT(Q5_0), CONSTANT(Q5_1), CONSTANT(Q8_0), CONSTANT(Q4_K), CONSTANT(Q5_K),
    CONSTANT(Q6_K), CONSTANT(FORMATS), CONSTANT(INT4), CONSTANT(INT4_MINIMA), CONSTANT(BFLOAT16), CONSTANT(FLOAT16),
    CONSTANT(FLOAT32), CONSTANT(KINDS),
    {NULL, 0},
};
