/* The codes and scales of a panel, and the integer sums of its products with a tile's tokens, 32 inputs at a time. The
 * sums are exact, in whatever order and width they are added: all variants give the same. `format` is known at compile
 * time. structs.h describes the layout of a panel, blocks.h that of a tile.
 */
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

/* 16 outputs' scales of 32 inputs; for Q6_K, of one half of them. scales: of their block; g: which 32 inputs of the
 * block. */
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

/* How many scales 32 inputs have: for Q6_K one for each half. */
ALWAYS int halves_of(const int format) { return format == Q6_K ? 2 : 1; }

ALWAYS const uint8_t *marks_of(const uint8_t *x, const int rows, const int planes) { return x + 32 * planes * rows; }

/* The number with which a token's sum of a half begins, which makes up for the shift of the codes. */
ALWAYS ints shift_of(const int format, const int half, const int rows, const int i, const uint8_t *marks) {
    const int shifted = format == Q4_0 ? BEGIN_8 : format == Q5_0 ? BEGIN_16 : BEGIN_128;
    const int mark = format == Q6_K ? (half ? BEGIN_HIGH : BEGIN_LOW) : shifted;
    if (has_minimum(format) || (format == Q8_0 && SUBTRACTS_128)) return all_ints(0);
    return all_ints(int_at(marks + (mark * rows + i) * 4));
}

/* Four vectors of codes: those of a half for Q6_K, else v, v + 4, v + 1 and v + 5, where v is twice the part. words:
 * where the first token's activations for each of them are. */
ALWAYS void load_four_vectors(const int format, const int part, const uint8_t *codes, const uint8_t *x, const int rows,
                              const int planes, bytes four[4], const uint8_t *words[4]) {
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const int v = format == Q6_K ? k : 2 * part + k / 2, high = format == Q6_K ? part : k % 2;
        bytes each[2];
        load_codes(format, codes, v, &each[0], &each[1]);
        four[k] = each[high], words[k] = x + (v + 4 * high) * planes * rows * 4;
    }
}

/* The sums of a half, [planes][rows]. If there are two planes, the first counts 128 times as much. */
ALWAYS void integer_sums(const int format, const int half, const int rows, const int planes, const uint8_t *codes,
                         const uint8_t *x, ints sums[2 * TILE]) {
    const int count = planes * rows, parts = format == Q6_K ? 1 : 2;
    const uint8_t *marks = marks_of(x, rows, planes);
    ints *last = sums + (planes - 1) * rows;
    #pragma GCC unroll 16
    for (int i = 0; i < count; i++) sums[i] = all_ints(0);
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) last[i] = to_begin_with(shift_of(format, half, rows, i, marks));
    #pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        bytes four[4];
        const uint8_t *words[4];
        load_four_vectors(format, format == Q6_K ? half : part, codes, x, rows, planes, four, words);
        add_four_vectors(bits_of(format), count, four, words, 4, part == 0, part == parts - 1, sums);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) last[i] = completed(last[i], shift_of(format, half, rows, i, marks));
}

/* A token's sums, scaled and added to its numbers. */
ALWAYS floats add_scaled(floats whole, const int rows, const int planes, const ints sums[2 * TILE], const int i,
                         const uint8_t *marks, floats scale) {
    ints exact = planes == 1 ? sums[i] : add_ints(times_128(sums[i]), sums[rows + i]);
    floats scaled = multiply_floats(to_floats(exact), all_floats(float_at(marks + (SCALE * rows + i) * 4)));
    return add_product(whole, scaled, scale);
}

/* The sum of a token's 32 activations. */
ALWAYS floats total_of(const int rows, const int i, const uint8_t *marks) {
    return all_floats(float_at(marks + (TOTAL * rows + i) * 4));
}
