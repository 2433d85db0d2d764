/* Structs and constants that Python mirrors (structs.py); layout.c exports their sizes. Plain C, no intrinsics.
 *
 * Numbers of type uint16_t are bfloat16.
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
    MAX_HEAD_SIZE = 256,   /* numbers in an attention head */
    MAX_SHARED_HEADS = 64, /* query heads that may share a key head */
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

/* Root mean square norm. weight: [size], NULL if there is no norm. rounds_first: whether it rounds to bfloat16 before
 * it multiplies by the weight, too. */
struct norm {
    const float *weight;
    float eps;
    int rounds_first;
};

/* heads: query heads; key_heads each of keys and values follow them. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))): SiLU, or GELU by its tanh formula. */
struct layer {
    struct linear qkv, out, gate_up, down;
    struct norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward;
    int64_t hidden, inner, heads, key_heads, size;
    float slope, cubic;
};

/* A layer's keys and values [slots][key_heads][length][size], and the slots, positions and places of the forward's
 * tokens, whose keys and values are written to their places. A token sees the keys of earlier positions: before
 * position forks[token] those at the place of the same number, from there on those at the places paths[begins[token]],
 * paths[begins[token] + 1], ... forks is NULL if all places are positions. */
struct kv_cache {
    uint16_t *keys, *values;
    int64_t length, window; /* window: how many positions a token sees, itself included; 0 for all */
    float scaling;
    const int64_t *slots, *positions, *places, *forks, *begins, *paths;
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
    int32_t corrects, normalised, is_float;
};

/* A row's part of a forward: `count` tokens of `slot` from position `start` on. known: the position of the kept state;
 * keep: the position whose state replaces it. */
struct segment {
    int64_t slot, start, count, known, keep;
};

/* Of the kernels for quantised files, blocks/.
 *
 * A panel is 16 outputs of a part of a linear layer, block by block: a block's scales, then the codes of its inputs, 32
 * inputs at a time. A panel is read from beginning to end, since that is what processors prefetch best.
 *
 * Codes stand in vectors of 64 bytes: byte 4 * o + i of vector v belongs to output o and input 4 * v + i. Codes of 8
 * bits fill 8 vectors, shifted by 128. Of shorter codes, 4 vectors hold the low four bits: vector v has those of v in
 * its low half-bytes and those of v + 4 in its high ones. Further bits follow: the fifth bits of vector v are bit v of
 * one more vector; the fifth and sixth bits of vectors 0 to 3 are bits 2 * v and 2 * v + 1 of one more vector, and
 * those of 4 to 7 of another.
 *
 * Scales of blocks of 32 inputs: 16 float16 scales and, where the format has them, 16 minima. Of blocks of 256: 16
 * float16 scales (and 16 of minima), then per 32 inputs 16 bytes of scales and at the end the same of minima (Q4_K,
 * Q5_K), or 16 signed bytes of scales per 16 inputs (Q6_K).
 */
enum {
    SUPER = 256,            /* inputs of a block that consists of smaller ones (Q4_K, Q5_K, Q6_K) */
    TILE = 8,               /* tokens multiplied at a time */
    SMALLEST_CODE = 32,     /* what is subtracted from the codes of Q6_K */
    LARGEST_INT8 = 127, LARGEST_INT15 = 16319 /* of an activation: 127 * 128 + 63, in two planes of a signed byte */
};

enum format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FORMATS };

/* Kinds of grouped.c; a part's format is its kind plus KINDS times the number of inputs that share a scale. A block is
 * such a group: 16 scales and 16 offsets or minima, then codes as in Q4_0. Of weights in floating point, the 16 of an
 * input stand together. */
enum grouped { INT4 = 16, INT4_MINIMA, BFLOAT16, FLOAT16, FLOAT32, KINDS = 64 };

/* Outputs of one format. data: panels, see above. */
struct block_part {
    int64_t format, outputs;
    const uint8_t *data;
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

/* A matrix of each expert of a layer. data: where the panels of each begin. bias: [experts][outputs] or NULL. */
struct expert_matrix {
    int64_t format;
    const uint8_t *const *data;
    const float *bias;
};

/* Experts of equal size: gate and up [inner][hidden], down [hidden][inner]. */
struct expert_set {
    int64_t inner;
    struct expert_matrix gate, up, down;
};

/* The feed-forward part of a layer of which each token uses some experts. See blocks/experts.c.
 *
 * router: numbers [count][hidden]; its products with a token, plus router_bias, are the token's logits. Scores are the
 * logits' sigmoids or their softmax. The `used` experts of the largest logits are chosen or, with a choice_bias
 * (sigmoids only), of the largest sums of score and bias. If `normalises`, scores are divided by `floor` plus the sum of
 * those of the chosen ones; then they are multiplied by `factor`. shared: one expert that all tokens use, with the
 * factor sigmoid(shared_gate * x), or 1; none if `inner` is 0. The activation is
 * g / (1 + exp(-(slope * g + cubic * g^3))) * (u + shift), where g is at most `limit` and u lies within it. reads: how
 * many experts' matrices have been read so far, the shared one not counted. */
struct experts {
    int64_t hidden, count, used, planes;
    struct block_part router;
    const float *router_bias, *choice_bias, *shared_gate;
    struct expert_set routed, shared;
    int32_t is_sigmoid, normalises;
    float floor, factor, slope, cubic, limit, shift;
    int64_t *reads;
};

/* Root mean square norm. weight: [size], NULL if there is no norm. */
struct float_norm {
    const float *weight;
    float eps;
};

/* heads: query heads; key_heads each of keys and values follow them. The gate's activation is
 * x / (1 + exp(-(slope * x + cubic * x^3))). planes: of activations, 1 (int8) or 2 (int15). */
struct float_layer {
    struct block_linear qkv, out, gate_up, down;
    struct float_norm before_attention, queries, keys, after_attention, before_feed_forward, after_feed_forward;
    int64_t hidden, inner, heads, key_heads, size, planes;
    float slope, cubic;
};

/* `struct kv_cache` for keys and values in float32. */
struct float_cache {
    float *keys, *values;
    int64_t length, window;
    float scaling;
    const int64_t *slots, *positions, *places, *forks, *begins, *paths;
};
