/* The codes and scales of a panel of GGUF's blocks, for panel_sums.c and tile_sums.c. `format` is known when this is
 * compiled; block_structs.h says how a panel is laid out. */
#pragma once

#include "blocks.h"

ALWAYS float float_at(const uint8_t *from) {
    float x;
    memcpy(&x, from, 4);
    return x;
}
ALWAYS int32_t int_at(const uint8_t *from) {
    int32_t x;
    memcpy(&x, from, 4);
    return x;
}

/* Vectors v and v + 4 of 32 inputs' codes, or only v where codes have 8 bits. */
ALWAYS void load_codes(const int format, const uint8_t *codes, const int v, bytes *one, bytes *other) {
    bytes both = load_bytes(codes + v * 64);
    if (format == Q8_0) {
        *one = both, *other = load_bytes(codes + (v + 4) * 64);
        return;
    }
    *one = low_bits(both), *other = high_bits(both);
    if (format == Q5_0 || format == Q5_1 || format == Q5_K) {
        bytes fifth = load_bytes(codes + 256);
        *one = with_bits(*one, fifth, v, 1), *other = with_bits(*other, fifth, v + 4, 1);
    } else if (format == Q6_K) {
        *one = with_bits(*one, load_bytes(codes + 256), 2 * v, 2);
        *other = with_bits(*other, load_bytes(codes + 320), 2 * v, 2);
    }
}

ALWAYS int bits_of(const int format) {
    if (format == Q8_0) return 8;
    if (format == Q6_K) return 6;
    return format == Q5_0 || format == Q5_1 || format == Q5_K ? 5 : 4;
}

ALWAYS int is_super(const int format) { return format == Q4_K || format == Q5_K; }
ALWAYS int has_minimum(const int format) { return format == Q4_1 || format == Q5_1 || is_super(format); }

/* 16 outputs' scales of 32 inputs, of Q6_K of one half of them. scales: of the block that they belong to; g: which 32
 * inputs of the block. */
ALWAYS floats scale_of(const int format, const uint8_t *scales, int64_t g, const int half) {
    floats d = load_halves(scales);
    if (format == Q6_K) return multiply_floats(d, load_signed(scales + 32 + (2 * g + half) * LANES));
    return is_super(format) ? multiply_floats(d, load_unsigned(scales + 64 + g * LANES)) : d;
}

/* Likewise their minima, for `add_minimum`. */
ALWAYS floats minimum_of(const int format, const uint8_t *scales, int64_t g) {
    floats minimum = load_halves(scales + 32);
    return is_super(format) ? multiply_floats(minimum, load_unsigned(scales + 192 + g * LANES)) : minimum;
}
ALWAYS floats add_minimum(const int format, floats whole, floats total, floats minimum) {
    return is_super(format) ? take_product(whole, total, minimum) : add_product(whole, total, minimum);
}
