/* Structs and constants that Python mirrors (structs.py); layout.c exports their sizes. Plain C, no intrinsics.
 *
 * Numbers of type uint16_t are bfloat16.
 */
#pragma once

#include <stdint.h>

#include "stacked_layer.h"

enum {
    LANES = 16,            /* numbers in a register */
    PANEL = 32,            /* outputs computed together */
    BLOCK = 128,           /* inputs of a panel that are expanded at a time: 8 KB */
    QUAD = 192,            /* bytes of 4 inputs of a panel */
    GROUP = 32,            /* inputs that share a scale at 4 bits */
    RECORD = 640,          /* bytes of a group of a panel at 4 bits */
    SPACE = 3,             /* bfloat16 numbers of space per input of a product: a float32 copy, and sums of them */
    MAX_HEAD_SIZE = 256,   /* numbers in an attention head */
    MAX_SHARED_HEADS = 64, /* query heads that may share a key head */
    MAX_STATE = 65536,     /* numbers in the state of a recurrent head */
    MAX_TAPS = 8           /* tokens that a channel of a convolution sees */
};

/* A linear layer as compressed.c reads it (12 bits) or as int4.c does (4 bits: data only). bias: [outputs] or NULL. */
struct linear {
    int64_t bits, inputs, outputs;
    const uint8_t *data, *tables;
    const int32_t *offsets;
    const uint32_t *exceptions;
    const uint16_t *bias;
};

/* Root mean square norm. weight: [size], NULL where there is no norm. rounds_first: to bfloat16 before the weight is applied, not after. */
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

/* Keys and values [slots][key_heads][length][size] of a layer, and the slots, positions and places of its new tokens:
 * keys and values are written at a token's place. From position forks[token] on it sees those at paths[begins[token]]
 * and the places that follow; before, places are positions. NULL for forks: they are everywhere. */
struct kv_cache {
    uint16_t *keys, *values;
    int64_t length, window; /* window: positions a token sees, itself included; 0 for all */
    float scaling;
    const int64_t *slots, *positions, *places, *forks, *begins, *paths;
};

/* A recurrent layer between its projections; see `Recurrence` of recurrence.py. Per token it has `inputs` numbers, the
 * channels and then the gates. weight: [taps][channels]; bias, skip: NULL where there is none; heads: 0 for a
 * convolution only. ring: how many of the latest inputs of a slot are kept, that of position p at p modulo it. */
struct recurrence {
    const float *weight, *bias, *rate, *shift, *skip;
    int64_t channels, taps, inputs, heads, key_heads, key_size, value_size, queries, keys, values, ring;
    int32_t corrects, normalised, is_float;
};

/* A row's part of a forward: `count` tokens of `slot` from position `start` on. known: the position whose state is kept
 * so far; keep: that whose state is kept from now on. */
struct segment {
    int64_t slot, start, count, known, keep;
};
