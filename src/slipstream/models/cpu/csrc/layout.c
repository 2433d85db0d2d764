/* Sizes and offsets of the structs of structs.h, and its constants. Python compares its own when it loads the library.
 */
#include "structs.h"

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
    SIZE_OF(linear), OFFSET(linear, format), OFFSET(linear, inputs), OFFSET(linear, outputs), OFFSET(linear, data),
    OFFSET(linear, tables), OFFSET(linear, offsets), OFFSET(linear, exceptions), OFFSET(linear, bias),

    SIZE_OF(norm), OFFSET(norm, weight), OFFSET(norm, eps), OFFSET(norm, rounds_first),

    SIZE_OF(layer), OFFSET(layer, qkv), OFFSET(layer, out), OFFSET(layer, gate_up), OFFSET(layer, down),
    OFFSET(layer, before_attention), OFFSET(layer, queries), OFFSET(layer, keys), OFFSET(layer, after_attention),
    OFFSET(layer, before_feed_forward), OFFSET(layer, after_feed_forward), OFFSET(layer, hidden), OFFSET(layer, inner),
    OFFSET(layer, heads), OFFSET(layer, key_heads), OFFSET(layer, size), OFFSET(layer, slope), OFFSET(layer, cubic),

    SIZE_OF(kv_cache), OFFSET(kv_cache, keys), OFFSET(kv_cache, values), OFFSET(kv_cache, length),
    OFFSET(kv_cache, window), OFFSET(kv_cache, scaling), OFFSET(kv_cache, slots), OFFSET(kv_cache, positions),
    OFFSET(kv_cache, places), OFFSET(kv_cache, forks), OFFSET(kv_cache, begins), OFFSET(kv_cache, paths),

    SIZE_OF(stacked_layer), OFFSET(stacked_layer, layer), OFFSET(stacked_layer, keys), OFFSET(stacked_layer, values),
    OFFSET(stacked_layer, entering), OFFSET(stacked_layer, length), OFFSET(stacked_layer, window),
    OFFSET(stacked_layer, rotation), OFFSET(stacked_layer, scaling),

    SIZE_OF(recurrence), OFFSET(recurrence, weight), OFFSET(recurrence, bias), OFFSET(recurrence, rate),
    OFFSET(recurrence, shift), OFFSET(recurrence, skip), OFFSET(recurrence, channels), OFFSET(recurrence, taps),
    OFFSET(recurrence, inputs), OFFSET(recurrence, heads), OFFSET(recurrence, key_heads),
    OFFSET(recurrence, key_size), OFFSET(recurrence, value_size), OFFSET(recurrence, queries),
    OFFSET(recurrence, keys), OFFSET(recurrence, values), OFFSET(recurrence, ring),
    OFFSET(recurrence, corrects), OFFSET(recurrence, normalised), OFFSET(recurrence, is_float),

    SIZE_OF(segment), OFFSET(segment, slot), OFFSET(segment, start), OFFSET(segment, count), OFFSET(segment, known),
    OFFSET(segment, keep),

    SIZE_OF(block_part), OFFSET(block_part, format), OFFSET(block_part, outputs), OFFSET(block_part, data),

    SIZE_OF(file_piece), OFFSET(file_piece, format), OFFSET(file_piece, rows), OFFSET(file_piece, inputs),
    OFFSET(file_piece, start), OFFSET(file_piece, to),

    SIZE_OF(block_linear), OFFSET(block_linear, inputs), OFFSET(block_linear, outputs),
    OFFSET(block_linear, num_parts), OFFSET(block_linear, parts), OFFSET(block_linear, bias),

    SIZE_OF(expert_matrix), OFFSET(expert_matrix, format), OFFSET(expert_matrix, data), OFFSET(expert_matrix, bias),

    SIZE_OF(expert_set), OFFSET(expert_set, inner), OFFSET(expert_set, gate), OFFSET(expert_set, up),
    OFFSET(expert_set, down),

    SIZE_OF(experts), OFFSET(experts, hidden), OFFSET(experts, count), OFFSET(experts, used), OFFSET(experts, planes),
    OFFSET(experts, router), OFFSET(experts, router_bias), OFFSET(experts, choice_bias), OFFSET(experts, shared_gate),
    OFFSET(experts, routed), OFFSET(experts, shared), OFFSET(experts, is_sigmoid), OFFSET(experts, normalises),
    OFFSET(experts, floor), OFFSET(experts, factor), OFFSET(experts, slope), OFFSET(experts, cubic),
    OFFSET(experts, limit), OFFSET(experts, shift), OFFSET(experts, reads),

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

    CONSTANT(LANES), CONSTANT(PANEL), CONSTANT(BLOCK), CONSTANT(QUAD), CONSTANT(GROUP), CONSTANT(TWELVE_BITS), CONSTANT(SPACE),
    CONSTANT(MAX_HEAD_SIZE), CONSTANT(MAX_SHARED_HEADS), CONSTANT(MAX_STATE), CONSTANT(MAX_TAPS),
    CONSTANT(Q4_0), CONSTANT(Q4_1), CONSTANT(Q5_0), CONSTANT(Q5_1), CONSTANT(Q8_0), CONSTANT(Q4_K), CONSTANT(Q5_K),
    CONSTANT(Q6_K), CONSTANT(FORMATS), CONSTANT(INT4), CONSTANT(INT4_MINIMA), CONSTANT(BFLOAT16), CONSTANT(FLOAT16),
    CONSTANT(FLOAT32), CONSTANT(KINDS),
    {NULL, 0},
};
