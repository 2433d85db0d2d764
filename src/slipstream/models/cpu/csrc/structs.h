/* Structs and constants that Python reads from here (structs.py). Plain C, no intrinsics.
 *
 * Numbers of type uint16_t are bfloat16, but for keys and values of layers that compute in float32: these are float16.
 */
#pragma once

#include <stdint.h>

enum {
    LANES = 16,            /* numbers in a register, outputs of a panel of blocks */
    PANEL = 32,            /* outputs computed together */
    BLOCK = 128,           /* inputs of a panel that are expanded at a time: 8 KB */
    QUAD = 192,            /* bytes of 4 inputs of a panel */
    GROUP = 32,            /* inputs of a token that share the scale of its activations */
    SPACE = 3,             /* bfloat16 numbers of scratch space per input of a product: a float32 copy and its sums */
    MAX_HEAD_SIZE = 576,   /* numbers in a head */
    MAX_SHARED_HEADS = 64, /* query heads that may share a key head */
    MAX_GROUPS = 64,       /* of experts, from which some are chosen first */
    MAX_STATE = 65536,     /* numbers in the state of a recurrent head */
    MAX_TAPS = 8           /* tokens that a channel of a convolution sees */
};

/* The matrix of a bfloat16 layer: 12 bits per weight, see compressed.c, or panels of a block format, which have `data`
 * but no tables, offsets and exceptions. bias: [outputs] or NULL. */
enum { TWELVE_BITS = -1 };
struct linear {
    int64_t format, inputs, outputs;
    const uint8_t *data, *tables;
    const int32_t *offsets;
    const uint32_t *exceptions;
    const uint16_t *bias;
};

/* A norm. weight: [size], NULL if there is no norm; bias: [size] or NULL. is_centered: LayerNorm, which subtracts the mean;
 * else RMSNorm. rounds_first: in bfloat16 layers, rounds before multiplying by the weight, too. */
struct norm {
    const float *weight, *bias;
    float eps;
    int32_t rounds_first, is_centered;
};

/* The numbers and switches of a layer; see `LayerPlan` in plan.py. heads: query heads, followed by key_heads each of keys
 * and values. rotated: numbers of a head that are rotated. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))), that is SiLU, or GELU's tanh approximation; if `squares`, max(x, 0)^2.
 * mixer: replaces attention; NULL in most layers. `qkv` computes its inputs, `out` takes its outputs. scale: a factor of
 * the layer's output. shares_values: the keys before their norm are also the values. reuses_keys: the layer has only
 * queries, and attends to keys and values of an earlier layer. input_size: numbers per token from a second embedding; 0:
 * there is none. parts_pairs: numbers rotated in pairs are moved to two halves. rotates_first: heads are rotated before
 * their norms. gate_size: gates of each head, after all values: one for each of its numbers, or 1; 0: none. */
#define LAYER_NUMBERS                                                                                   \
    int64_t hidden, inner, heads, key_heads, size, rotated, input_size, gate_size;                      \
    float slope, cubic, residual, soft_cap, scale;                                                      \
    int32_t rotates_pairs, grows_queries, norms_all_heads, is_gated, is_parallel, gates_queries, shares_values, \
        reuses_keys, parts_pairs, rotates_first, squares

/* The norms of heads, and those around the two parts of a layer. If a layer adds experts and a dense part, the inputs of
 * the experts and of their router, and the outputs of both parts, may have norms. after_input: of what a second embedding
 * adds. */
#define LAYER_NORMS                                                                                     \
    struct norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward, \
        values, before_router, before_experts, after_experts, after_dense, after_input

/* sinks: for each query head an extra score without a value; NULL if there are none. experts: of a mixture, else NULL; if
 * `inner` is not 0, a dense part (gate_up, down) is computed, too, and both results are added. input_gate,
 * input_projection: for a second embedding. latent: for latent attention, else NULL; then queries_up may project the
 * queries' own latent, which the first product computes, to queries. */
struct layer {
    struct linear qkv, out, gate_up, down, input_gate, input_projection, queries_up;
    LAYER_NORMS;
    const float *sinks;
    const struct experts *experts;
    const struct mixer *mixer;
    const struct latent *latent;
    LAYER_NUMBERS;
};

/* A layer's keys and values [slots][key_heads][length][size], and the slots, positions and places of the forward's
 * tokens, whose keys and values are written to their places. A token sees the keys of earlier positions: before
 * position forks[token] those at the place of the same number, from there on those at the places paths[begins[token]],
 * paths[begins[token] + 1], ... forks is NULL if all places are positions. segments: the tokens of each of `rows` rows;
 * a mixer's memory are the latest inputs, in `keys`, and states, in `values`. inputs: the layer's numbers of a second
 * embedding for the first token; those of the next token begin input_step numbers later. */
struct kv_cache {
    uint16_t *keys, *values;
    int64_t length, window; /* window: how many positions a token sees, itself included; 0 for all */
    float scaling;
    const int64_t *slots, *positions, *places, *forks, *begins, *paths;
    const struct segment *segments;
    int64_t rows;
    const void *inputs;
    int64_t input_step;
};

/* One of the layers that are computed in one call: its struct, and its own part of the cache. entering: memory
 * [slots][length][hidden] for the hidden states that enter it, NULL if they are not kept. rotation: index of its cosines
 * and sines among those of the call. */
struct stacked_layer {
    const void *layer;
    void *keys, *values, *entering;
    int64_t length, window, rotation;
    float scaling;
};

/* A recurrent layer between its projections; see `Recurrence` of recurrence.py. A token has `inputs` numbers: the
 * channels, then the gates. weight: [taps][channels]; bias, skip: NULL if there is none; heads: 0 for a convolution
 * only. ring: how many of the latest inputs of a slot are kept; the input of position p is at p modulo ring. */
struct recurrence {
    const float *weight, *bias, *rate, *shift, *skip;
    int64_t channels, taps, inputs, heads, key_heads, key_size, value_size, queries, keys, values, ring;
    int32_t corrects, normalized, is_float;
    float least_step;
};

/* A recurrent layer's mixer. channels, factors, gates, rest: offsets in a token's numbers from the layer's first product:
 * of the channels, of numbers that multiply them (-1: there are none), of the recurrence's gates, and of the gates of its
 * outputs. Outputs are normalized in groups of `group`, then multiplied by the SiLU of their gates; if gates_first,
 * multiplied first, and then norm has a weight for every output, not one for each output of a group. norm: if NULL,
 * outputs are not normalized, and multiplied by the gates themselves. places: index to which each group is written;
 * NULL: in order. */
struct mixer {
    const struct recurrence *recurrence;
    const float *norm;
    const int64_t *places;
    int64_t channels, factors, gates, rest, group;
    float eps;
    int32_t gates_first;
};

/* A row's tokens in a forward: `count` tokens of `slot` from position `start` on. known: the position of the kept state;
 * keep: the position whose state replaces it. */
struct segment {
    int64_t slot, start, count, known, keep;
};

/* The recurrence of a forward's rows, each of segment.count tokens, by a team. x: [rows][count][inputs]; ring: [slots]
 * [r->ring][inputs]; states: [slots][heads][key_size][value_size]; out: [rows][count][outputs]. */
void advance_states(const struct recurrence *r, const struct segment *segments, int64_t rows, const void *x, void *ring,
                    float *states, float *out);

/* The rest is for quantized files, see blocks/.
 *
 * A panel is 16 outputs of a part of a linear layer, block by block: a block's scales, then the codes of its inputs, 32
 * inputs at a time. A panel is read from beginning to end, since that is what processors prefetch best. blocks.h describes
 * the layout of codes and scales. In floating-point panels, the 16 weights of each input are adjacent.
 */
enum {
    SUPER = 256,            /* most inputs of a block in a GGUF file */
    TILE = 8,               /* tokens multiplied at a time */
    LARGEST_INT8 = 127, LARGEST_INT15 = 16319 /* of an activation: 127 * 128 + 63, in two planes of a signed byte */
};

/* The types of weights: name, number in GGUF files (-1: in checkpoints only), numbers and bytes of a block in the file,
 * and the type in whose panels it is packed. A block of INT4 and INT4_MINIMA is a group of inputs that share a scale: the
 * bytes of its head, then one byte a code; a part's format is then the type plus KINDS times the inputs of a group. */
#define TYPES(X)                                                                                                  \
    X(Q4_0, 2, 32, 18, Q4_0)                                                                                      \
    X(Q4_1, 3, 32, 20, Q4_1)                                                                                      \
    X(Q5_0, 6, 32, 22, Q5_0)                                                                                      \
    X(Q5_1, 7, 32, 24, Q5_1)                                                                                      \
    X(Q8_0, 8, 32, 34, Q8_0)                                                                                      \
    X(Q2_K, 10, 256, 84, Q2_K)                                                                                    \
    X(Q3_K, 11, 256, 110, Q3_K)                                                                                   \
    X(Q4_K, 12, 256, 144, Q4_K)                                                                                   \
    X(Q5_K, 13, 256, 176, Q5_K)                                                                                   \
    X(Q6_K, 14, 256, 210, Q6_K)                                                                                   \
    X(IQ3_XXS, 18, 256, 98, IQ4_XS)                                                                               \
    X(IQ4_NL, 20, 32, 18, IQ4_NL)                                                                                 \
    X(IQ3_S, 21, 256, 110, IQ4_XS)                                                                                \
    X(IQ4_XS, 23, 256, 136, IQ4_XS)                                                                               \
    X(TQ1_0, 34, 256, 54, Q2_K)                                                                                   \
    X(TQ2_0, 35, 256, 66, Q2_K)                                                                                   \
    X(MXFP4, 39, 32, 17, MXFP4)                                                                                   \
    X(NVFP4, 40, 64, 36, NVFP4)                                                                                   \
    X(INT4, -1, 0, 4, INT4)                                                                                       \
    X(INT4_MINIMA, -1, 0, 8, INT4_MINIMA)                                                                         \
    X(F32, 0, 1, 4, F32)                                                                                          \
    X(F16, 1, 1, 2, F16)                                                                                          \
    X(BF16, 30, 1, 2, BF16)

#define NAME_OF_TYPE(name, number, size, bytes, panel) name,
enum format { TYPES(NAME_OF_TYPE) FORMATS, KINDS = 64 };

/* Outputs of one format. data: panels, see above. scale: a number that multiplies all weights; NULL: 1. */
struct block_part {
    int64_t format, outputs;
    const uint8_t *data;
    const float *scale;
};

/* Rows of a file, a multiple of 16 except at the end of a part. start: the offset of their first byte in the file; to:
 * zeroed memory for their panels. */
struct file_piece {
    int64_t format, rows, inputs, start;
    uint8_t *to;
};

/* A linear layer of parts, whose outputs are concatenated. bias: [outputs] or NULL. */
struct block_linear {
    int64_t inputs, outputs, num_parts;
    const struct block_part *parts;
    const float *bias;
};

/* One matrix of every expert of a layer. data: the panels of each. bias: [experts][outputs] or NULL. scales: [experts],
 * a factor of all weights of each, or NULL. */
struct expert_matrix {
    int64_t format;
    const uint8_t *const *data;
    const float *bias, *scales;
};

/* Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). For each token the cache keeps one latent of `rank`
 * numbers for all heads, in place of keys, and the rotated part of the token's key, in place of values. The model would
 * project latents to a head's keys and values; instead, to_latent [rank][plain] is applied to the head's queries, and
 * from_latent [values][rank] to attention's results. A query has `plain` numbers that are not rotated, then rotated ones.
 * planes: of activations. */
struct latent {
    int64_t rank, plain, values, planes;
    struct expert_matrix to_latent, from_latent;
};

/* Experts of equal size: gate and up [inner][hidden], down [hidden][inner]. */
struct expert_set {
    int64_t inner;
    struct expert_matrix gate, up, down;
};

/* The offset in a file of the matrix of a layer's first expert, and the bytes from one expert's matrix to the next. */
struct expert_rows {
    int64_t file, start, step;
};

/* An expert in memory, of the layer `owner`; used: the last forward that used it. */
struct expert_slot {
    struct stored_experts *owner;
    int64_t expert, used;
};

/* Memory for the experts in use: `count` slots of `bytes` bytes. If a forward needs an expert that no slot holds, it is
 * packed into the least recently used slot. forwards: number of forwards of layers so far; packed: number of experts that
 * they packed; failed: 1 if a file could not be read, 2 if a number in it is not finite. */
struct expert_store {
    uint8_t *memory;
    struct expert_slot *slots;
    int64_t bytes, count, forwards, packed;
    _Atomic int64_t failed;
};

/* The experts of a layer in a store. places: each expert's slot, or -1. */
struct stored_experts {
    struct expert_store *store;
    int64_t *places;
    struct expert_rows gate, up, down;
};

/* A layer's experts, a few of which each token uses. See blocks/experts.c.
 *
 * router: numbers [count][hidden]; its products with a token, plus router_bias, are the token's logits. Scores are the
 * logits' sigmoids or their softmax. The `used` experts with the largest logits are chosen or, with a choice_bias, those
 * with the largest sums of score and bias. If used_groups is less than groups, they come from used_groups of the groups of
 * successive experts: those with the largest number or, for sigmoids, the largest sum of two numbers. If `normalizes`,
 * scores are divided by `floor` plus the sum of the chosen experts' scores; then they are multiplied by `factor`. shared:
 * one expert that all tokens use, with the factor sigmoid(shared_gate * x), or 1; none if `inner` is 0. The activation is
 * g / (1 + exp(-(slope * g + cubic * g^3))) * (u + shift), with g clamped to at most `limit`, and u to -limit to limit.
 * reads: number of experts whose matrices have been read so far, without the shared one. forced: NULL, or
 * [num_forced][used]: the experts that tokens use instead, different ones for each token, repeated from the first row
 * after the last. stored: store into which routed experts are packed when needed; NULL if all are in memory. */
struct experts {
    int64_t hidden, count, used, planes;
    struct block_part router;
    const float *router_bias, *choice_bias, *shared_gate;
    struct expert_set routed, shared;
    int64_t groups, used_groups;
    int32_t is_sigmoid, normalizes;
    float floor, factor, slope, cubic, limit, shift;
    int64_t *reads, num_forced;
    const int32_t *forced;
    struct stored_experts *stored;
};

/* out [tokens][hidden] = the experts' weighted sum for x [tokens][hidden]. routed: the router's input; NULL: x. chosen:
 * [tokens][used], set to the experts that were used, ascending; may be NULL. space: `experts_scratch` bytes, aligned to
 * 64. */
void multiply_experts(const struct experts *of, const float *x, const float *routed, int64_t tokens, int32_t *chosen,
                      float *out, uint8_t *space);
int64_t experts_scratch(const struct experts *of, int64_t tokens);

/* Scratch memory, aligned to 64 bytes. */
static inline uint8_t *from_64(const void *space) { return (uint8_t *)(((uintptr_t)space + 63) / 64 * 64); }

/* planes: of activations, 1 (int8) or 2 (int15). */
struct float_layer {
    struct block_linear qkv, out, gate_up, down, input_gate, input_projection, queries_up;
    LAYER_NORMS;
    const float *sinks;
    const struct experts *experts;
    const struct mixer *mixer;
    const struct latent *latent;
    int64_t planes;
    LAYER_NUMBERS;
};
