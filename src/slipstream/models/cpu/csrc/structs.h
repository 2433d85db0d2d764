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

/* The matrix of a bfloat16 layer: 12 bits a weight, see compressed.c, or panels of a block format, which have `data`
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
 * else root mean square norm. rounds_first: of a bfloat16 layer, whether it rounds before it multiplies by the weight,
 * too. */
struct norm {
    const float *weight, *bias;
    float eps;
    int32_t rounds_first, is_centered;
};

/* The numbers and switches of a layer; see `LayerPlan` of plan.py. heads: query heads; key_heads each of keys and values
 * follow them. rotated: how many of the numbers of a head are. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))): SiLU, or GELU by its tanh formula; if `squares`, max(x, 0)^2. mixer: what
 * mixes the tokens in place of attention; NULL in most layers. `qkv` computes all that it takes, `out` takes what it gives.
 * scale: a factor of what leaves the layer. shares_values: keys, as they are before their norm, are the values, too.
 * reuses_keys: the layer has queries only, and attends to keys and values that an earlier one has written. input_size: how
 * many numbers a second embedding gives the layer for each token; 0: there is none. parts_pairs: numbers that were rotated
 * in pairs stand in two halves afterwards. rotates_first: heads are rotated before their norms. gate_size: how many gates
 * each head has after all values: one for each of its numbers, or 1; 0: none. */
#define LAYER_NUMBERS                                                                                   \
    int64_t hidden, inner, heads, key_heads, size, rotated, input_size, gate_size;                      \
    float slope, cubic, residual, soft_cap, scale;                                                      \
    int32_t rotates_pairs, grows_queries, norms_all_heads, is_gated, is_parallel, gates_queries, shares_values, \
        reuses_keys, parts_pairs, rotates_first, squares

/* The norms of heads, and those around the two parts of a layer. Where experts stand beside a dense part, their inputs,
 * their router's, and what both parts give may have norms of their own. after_input: of what comes of a second embedding. */
#define LAYER_NORMS                                                                                     \
    struct norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward, \
        values, before_router, before_experts, after_experts, after_dense, after_input

/* sinks: for each query head a score that counts among those of the positions, but has no value; NULL if there are none.
 * experts: the feed-forward part of a mixture; else NULL. If `inner` is not 0, gate_up and down stand beside them, and
 * the sums of both are added. input_gate, input_projection: of a layer with a second embedding. latent: of latent
 * attention, else NULL; then queries_up may make queries of what the first product has given for them. */
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
 * embedding for the first token; those of each next one begin input_step numbers further. */
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
 * [slots][length][hidden] for the hidden states that enter it, NULL if nobody reads them. rotation: the number of its
 * cosines and sines among those of the call. */
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

/* A recurrent layer's mixer. Of the numbers that the layer's first product gives a token, the channels begin at `channels`,
 * numbers to multiply them by at `factors` (-1: there are none), the gates of the recurrence at `gates`, those of its
 * outputs at `rest`. Outputs are normalized in groups of `group` and multiplied by the SiLU of their gates, afterwards or,
 * if gates_first, before, and then norm has a weight for each output, not only for those of a group. norm: NULL: outputs
 * are not normalized, and multiplied by the gates themselves. places: where each group goes; NULL: in order. */
struct mixer {
    const struct recurrence *recurrence;
    const float *norm;
    const int64_t *places;
    int64_t channels, factors, gates, rest, group;
    float eps;
    int32_t gates_first;
};

/* A row's part of a forward: `count` tokens of `slot` from position `start` on. known: the position of the kept state;
 * keep: the position whose state replaces it. */
struct segment {
    int64_t slot, start, count, known, keep;
};

/* The recurrence of a forward's rows, each of segment.count tokens, by a team. x: [rows][count][inputs]; ring: [slots]
 * [r->ring][inputs]; states: [slots][heads][key_size][value_size]; out: [rows][count][outputs]. */
void advance_states(const struct recurrence *r, const struct segment *segments, int64_t rows, const void *x, void *ring,
                    float *states, float *out);

/* Of the kernels for quantized files, blocks/.
 *
 * A panel is 16 outputs of a part of a linear layer, block by block: a block's scales, then the codes of its inputs, 32
 * inputs at a time. A panel is read from beginning to end, since that is what processors prefetch best. blocks.h lists
 * how codes and scales are arranged. Of weights in floating point, the 16 of an input stand together.
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

/* Rows of a file, a multiple of 16 except at the end of a part. start: the place of their first byte in the file; to:
 * zeroed memory for their panels. */
struct file_piece {
    int64_t format, rows, inputs, start;
    uint8_t *to;
};

/* A linear layer of parts, whose outputs follow each other. bias: [outputs] or NULL. */
struct block_linear {
    int64_t inputs, outputs, num_parts;
    const struct block_part *parts;
    const float *bias;
};

/* A matrix of each expert of a layer. data: where the panels of each begin. bias: [experts][outputs] or NULL. scales:
 * [experts], what multiplies all weights of each, or NULL. */
struct expert_matrix {
    int64_t format;
    const uint8_t *const *data;
    const float *bias, *scales;
};

/* Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). Of a token the cache keeps, for all heads together,
 * `rank` numbers, its latent, in the place of keys, and in that of values the part of its key that is rotated. The matrices
 * that would make a head's keys and values of them are applied to its queries and to what it attends to instead: to_latent
 * [rank][plain], from_latent [values][rank]. A query has `plain` numbers that are not rotated, then those that are. planes:
 * of activations. */
struct latent {
    int64_t rank, plain, values, planes;
    struct expert_matrix to_latent, from_latent;
};

/* Experts of equal size: gate and up [inner][hidden], down [hidden][inner]. */
struct expert_set {
    int64_t inner;
    struct expert_matrix gate, up, down;
};

/* Where the matrix of a layer's first expert begins in a file, and how many bytes further each next one does. */
struct expert_rows {
    int64_t file, start, step;
};

/* An expert in memory, which `owner` has; used: by which forward last. */
struct expert_slot {
    struct stored_experts *owner;
    int64_t expert, used;
};

/* Memory for the experts of a model that are in use: `count` slots of `bytes` bytes. An expert is packed when a forward
 * needs it and no slot holds it, in the slot that was used least recently. forwards: how many there were, of all layers;
 * packed: how many experts they packed; failed: 1 if a file could not be read, 2 if a number in it is not finite. */
struct expert_store {
    uint8_t *memory;
    struct expert_slot *slots;
    int64_t bytes, count, forwards, packed;
    _Atomic int64_t failed;
};

/* The experts of a layer in a store. places: of each expert, the number of its slot, or -1. */
struct stored_experts {
    struct expert_store *store;
    int64_t *places;
    struct expert_rows gate, up, down;
};

/* The feed-forward part of a layer of which each token uses some experts. See blocks/experts.c.
 *
 * router: numbers [count][hidden]; its products with a token, plus router_bias, are the token's logits. Scores are the
 * logits' sigmoids or their softmax. The `used` experts of the largest logits are chosen or, with a choice_bias, of the
 * largest sums of score and bias; if used_groups is less than groups, from so many of the groups of successive experts, those
 * in which the largest of these numbers or, of sigmoids, the sum of the largest two is largest. If `normalizes`, scores are divided by `floor` plus the sum of
 * those of the chosen ones; then they are multiplied by `factor`. shared: one expert that all tokens use, with the
 * factor sigmoid(shared_gate * x), or 1; none if `inner` is 0. The activation is
 * g / (1 + exp(-(slope * g + cubic * g^3))) * (u + shift), where g is at most `limit` and u lies within it. reads: how
 * many experts' matrices have been read so far, the shared one not counted. forced: NULL, or [num_forced][used]: the
 * experts that tokens use instead, different ones for each token; after the last token's come the first one's again.
 * stored: where the routed experts are packed when they are needed; NULL if all are in memory. */
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

/* out [tokens][hidden] = the experts' sum for x [tokens][hidden]. routed: what the router reads instead of x; NULL: x.
 * chosen: [tokens][used], which were used, ascending; NULL if nobody asks. space: `experts_scratch` bytes that begin at a
 * multiple of 64. */
void multiply_experts(const struct experts *of, const float *x, const float *routed, int64_t tokens, int32_t *chosen,
                      float *out, uint8_t *space);
int64_t experts_scratch(const struct experts *of, int64_t tokens);

/* Scratch memory from its first multiple of 64 on. */
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
