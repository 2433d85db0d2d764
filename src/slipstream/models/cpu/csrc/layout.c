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
#define OFFSETS_OF_LAYER(type)                                                                                \
    SIZE_OF(type), OFFSET(type, qkv), OFFSET(type, out), OFFSET(type, gate_up), OFFSET(type, down),           \
        OFFSET(type, before_attention), OFFSET(type, queries), OFFSET(type, keys), OFFSET(type, after_attention), \
        OFFSET(type, before_feed_forward), OFFSET(type, after_feed_forward), OFFSET(type, sinks),             \
        OFFSET(type, experts), OFFSET(type, hidden),                                                          \
        OFFSET(type, inner), OFFSET(type, heads), OFFSET(type, key_heads), OFFSET(type, size),                \
        OFFSET(type, rotated), OFFSET(type, slope), OFFSET(type, cubic), OFFSET(type, residual),              \
        OFFSET(type, soft_cap), OFFSET(type, rotates_pairs), OFFSET(type, grows_queries),                     \
        OFFSET(type, norms_all_heads),                                                                        \
        OFFSET(type, is_gated), OFFSET(type, is_parallel), OFFSET(type, gates_queries), OFFSET(type, mixer)
#define CONSTANT(name) {#name, name}
#define TYPE(name, number, size, bytes, panel) \
    CONSTANT(name), {#name ".number", number}, {#name ".size", size}, {#name ".bytes", bytes},

/* Ends with an entry without a name. */
const struct entry layout[] = {
    SIZE_OF(linear), OFFSET(linear, format), OFFSET(linear, inputs), OFFSET(linear, outputs), OFFSET(linear, data),
    OFFSET(linear, tables), OFFSET(linear, offsets), OFFSET(linear, exceptions), OFFSET(linear, bias),

    SIZE_OF(norm), OFFSET(norm, weight), OFFSET(norm, bias), OFFSET(norm, eps), OFFSET(norm, rounds_first),
    OFFSET(norm, is_centred),

    OFFSETS_OF_LAYER(layer),

    SIZE_OF(kv_cache), OFFSET(kv_cache, keys), OFFSET(kv_cache, values), OFFSET(kv_cache, length),
    OFFSET(kv_cache, window), OFFSET(kv_cache, scaling), OFFSET(kv_cache, slots), OFFSET(kv_cache, positions),
    OFFSET(kv_cache, places), OFFSET(kv_cache, forks), OFFSET(kv_cache, begins), OFFSET(kv_cache, paths),
    OFFSET(kv_cache, segments), OFFSET(kv_cache, rows),

    SIZE_OF(stacked_layer), OFFSET(stacked_layer, layer), OFFSET(stacked_layer, keys), OFFSET(stacked_layer, values),
    OFFSET(stacked_layer, entering), OFFSET(stacked_layer, length), OFFSET(stacked_layer, window),
    OFFSET(stacked_layer, rotation), OFFSET(stacked_layer, scaling),

    SIZE_OF(recurrence), OFFSET(recurrence, weight), OFFSET(recurrence, bias), OFFSET(recurrence, rate),
    OFFSET(recurrence, shift), OFFSET(recurrence, skip), OFFSET(recurrence, channels), OFFSET(recurrence, taps),
    OFFSET(recurrence, inputs), OFFSET(recurrence, heads), OFFSET(recurrence, key_heads),
    OFFSET(recurrence, key_size), OFFSET(recurrence, value_size), OFFSET(recurrence, queries),
    OFFSET(recurrence, keys), OFFSET(recurrence, values), OFFSET(recurrence, ring),
    OFFSET(recurrence, corrects), OFFSET(recurrence, normalised), OFFSET(recurrence, is_float),

    SIZE_OF(mixer), OFFSET(mixer, recurrence), OFFSET(mixer, norm), OFFSET(mixer, places), OFFSET(mixer, channels),
    OFFSET(mixer, factors), OFFSET(mixer, gates), OFFSET(mixer, rest), OFFSET(mixer, group), OFFSET(mixer, eps),
    OFFSET(mixer, gates_first),

    SIZE_OF(segment), OFFSET(segment, slot), OFFSET(segment, start), OFFSET(segment, count), OFFSET(segment, known),
    OFFSET(segment, keep),

    SIZE_OF(block_part), OFFSET(block_part, format), OFFSET(block_part, outputs), OFFSET(block_part, data),
    OFFSET(block_part, scale),

    SIZE_OF(file_piece), OFFSET(file_piece, format), OFFSET(file_piece, rows), OFFSET(file_piece, inputs),
    OFFSET(file_piece, start), OFFSET(file_piece, to),

    SIZE_OF(block_linear), OFFSET(block_linear, inputs), OFFSET(block_linear, outputs),
    OFFSET(block_linear, num_parts), OFFSET(block_linear, parts), OFFSET(block_linear, bias),

    SIZE_OF(expert_matrix), OFFSET(expert_matrix, format), OFFSET(expert_matrix, data), OFFSET(expert_matrix, bias),
    OFFSET(expert_matrix, scales),

    SIZE_OF(expert_set), OFFSET(expert_set, inner), OFFSET(expert_set, gate), OFFSET(expert_set, up),
    OFFSET(expert_set, down),

    SIZE_OF(experts), OFFSET(experts, hidden), OFFSET(experts, count), OFFSET(experts, used), OFFSET(experts, planes),
    OFFSET(experts, router), OFFSET(experts, router_bias), OFFSET(experts, choice_bias), OFFSET(experts, shared_gate),
    OFFSET(experts, routed), OFFSET(experts, shared), OFFSET(experts, is_sigmoid), OFFSET(experts, normalises),
    OFFSET(experts, floor), OFFSET(experts, factor), OFFSET(experts, slope), OFFSET(experts, cubic),
    OFFSET(experts, limit), OFFSET(experts, shift), OFFSET(experts, reads), OFFSET(experts, num_forced),
    OFFSET(experts, forced), OFFSET(experts, stored),

    SIZE_OF(expert_rows), OFFSET(expert_rows, file), OFFSET(expert_rows, start), OFFSET(expert_rows, step),

    SIZE_OF(expert_slot), OFFSET(expert_slot, owner), OFFSET(expert_slot, expert), OFFSET(expert_slot, used),

    SIZE_OF(expert_store), OFFSET(expert_store, memory), OFFSET(expert_store, slots), OFFSET(expert_store, bytes),
    OFFSET(expert_store, count), OFFSET(expert_store, forwards), OFFSET(expert_store, packed),
    OFFSET(expert_store, failed),

    SIZE_OF(stored_experts), OFFSET(stored_experts, store), OFFSET(stored_experts, places),
    OFFSET(stored_experts, gate), OFFSET(stored_experts, up), OFFSET(stored_experts, down),

    OFFSETS_OF_LAYER(float_layer), OFFSET(float_layer, planes),

    CONSTANT(LANES), CONSTANT(PANEL), CONSTANT(BLOCK), CONSTANT(QUAD), CONSTANT(GROUP), CONSTANT(TWELVE_BITS), CONSTANT(SPACE),
    CONSTANT(MAX_HEAD_SIZE), CONSTANT(MAX_SHARED_HEADS), CONSTANT(MAX_STATE), CONSTANT(MAX_TAPS),
    TYPES(TYPE) CONSTANT(FORMATS), CONSTANT(KINDS),
    {NULL, 0},
};
