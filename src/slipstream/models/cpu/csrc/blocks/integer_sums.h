/* The codes and scales of a panel, and the integer sums of its products with a tile's tokens, 32 inputs at a time. The
 * sums are exact, in whatever order and width they are added: all variants give the same. `coding` is known at compile
 * time where products are computed. blocks.h describes the layout of a panel and that of a tile.
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

/* What the kernels multiply for a code, where that is wider than the code. Twice as much for NVFP4. */
#define LEVELS_OF_4_BITS {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}
static const uint8_t LEVELS[FORMATS][16] = {
    [Q3_K] = {28, 29, 30, 31, 32, 33, 34, 35},
    [IQ3_XXS] = {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66},
    [IQ3_S] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113},
    [IQ4_NL] = LEVELS_OF_4_BITS,
    [IQ4_XS] = LEVELS_OF_4_BITS,
    [MXFP4] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
    [NVFP4] = {32, 34, 36, 38, 40, 44, 48, 56, 32, 30, 28, 26, 24, 20, 16, 8},
};

/* What a product needs to know of the type, besides its coding. unit: of BYTES_OF_32. */
struct meaning {
    bytes levels;
    floats unit;
};
ALWAYS struct meaning meaning_of(const int coding, int64_t format) {
    struct meaning of = {0};
    if (CODINGS[coding].wide != CODINGS[coding].bits) of.levels = load_table(LEVELS[format]);
    if (CODINGS[coding].scaling == BYTES_OF_32) of.unit = all_floats(format == IQ3_XXS ? 0.25f : 1);
    return of;
}

/* Vectors v and v + 4 of 32 inputs' codes, as the kernels multiply them; v: 0 to 3. */
ALWAYS void load_codes(const int coding, const struct meaning *of, const uint8_t *codes, const int v, bytes *one, bytes *other) {
    const int bits = CODINGS[coding].bits, low = bits == 8 ? 8 : bits < 4 ? 2 : 4, more = bits - low;
    bytes first = load_bytes(codes + v % low * 64);
    if (low == 8) {
        *one = first, *other = load_bytes(codes + (v + 4) * 64);
    } else if (low == 4) {
        *one = low_bits(first), *other = high_bits(first);
    } else {
        bytes zero;
        memset(&zero, 0, sizeof zero);
        *one = with_bits(zero, first, v / 2 * 2, 2, 0), *other = with_bits(zero, first, v / 2 * 2 + 4, 2, 0);
    }
    if (more == 1) {
        bytes last = load_bytes(codes + low * 64);
        *one = with_bits(*one, last, v, 1, low), *other = with_bits(*other, last, v + 4, 1, low);
    } else if (more == 2) {
        bytes last = load_bytes(codes + (low + v % 2) * 64);
        *one = with_bits(*one, last, v / 2 * 2, 2, low), *other = with_bits(*other, last, v / 2 * 2 + 4, 2, low);
    }
    if (CODINGS[coding].wide != bits) *one = look_up(of->levels, *one), *other = look_up(of->levels, *other);
}

ALWAYS int has_minimum(const int coding) {
    const enum scaling by = CODINGS[coding].scaling;
    return by == WITH_MINIMUM || by == BYTES_WITH_MINIMA || by == NIBBLES_WITH_MINIMA || by == WITH_OFFSET || by == FLOATS_WITH_MINIMA;
}

/* How many scales 32 inputs have: one, or one for each half. */
ALWAYS int halves_of(const int coding) {
    const enum scaling by = CODINGS[coding].scaling;
    return by == NIBBLES_WITH_MINIMA || by == BYTES_OF_16 || by == SMALL_FLOATS ? 2 : 1;
}

/* What is multiplied for a weight of 0, or of the minimum. */
ALWAYS int zero_of(const int coding) {
    const int is_minimum = has_minimum(coding) && CODINGS[coding].scaling < WITH_OFFSET;
    return is_minimum ? 0 : 1 << (CODINGS[coding].wide - 1);
}

/* The high four bits of bytes, as numbers. */
ALWAYS floats high_nibbles(floats x) { return nearest(add_product(all_floats(-0.46875f), x, all_floats(0.0625f))); }

/* 16 outputs' scales of 32 inputs, or of a half of them. scales: of their block; g: which 32 inputs of the block. */
ALWAYS floats scale_of(const int coding, const struct meaning *of, const uint8_t *scales, int64_t g, const int half) {
    const enum scaling by = CODINGS[coding].scaling;
    if (by == POWERS_OF_2) return load_powers(scales);
    if (by == SMALL_FLOATS) return multiply_floats(load_small_floats(scales + (2 * g + half) * LANES), all_floats(64));
    if (by == FLOATS_WITH_MINIMA) return load_floats((const float *)scales);
    floats d = load_halves(scales);
    if (by == BYTES_WITH_MINIMA) return multiply_floats(d, load_unsigned(scales + 64 + g * LANES));
    if (by == BYTES_OF_16) return multiply_floats(d, load_signed(scales + 32 + (2 * g + half) * LANES));
    if (by == BYTES_OF_32) return multiply_floats(multiply_floats(d, of->unit), load_signed(scales + 32 + g * LANES));
    if (by != NIBBLES_WITH_MINIMA) return d;
    floats both = load_unsigned(scales + 64 + (2 * g + half) * LANES);
    return multiply_floats(d, take_product(both, high_nibbles(both), all_floats(16)));
}

/* Likewise their minima, for `add_minimum`. */
ALWAYS floats minimum_of(const int coding, const uint8_t *scales, int64_t g, const int half) {
    const enum scaling by = CODINGS[coding].scaling;
    if (by == FLOATS_WITH_MINIMA) return load_floats((const float *)scales + LANES);
    if (by == WITH_OFFSET) return multiply_floats(load_halves(scales), load_signed(scales + 32));
    floats minimum = load_halves(scales + 32);
    if (by == BYTES_WITH_MINIMA) return multiply_floats(minimum, load_unsigned(scales + 192 + g * LANES));
    if (by == NIBBLES_WITH_MINIMA) return multiply_floats(minimum, high_nibbles(load_unsigned(scales + 64 + (2 * g + half) * LANES)));
    return minimum;
}

/* True for minima that are subtracted. */
ALWAYS int subtracts(const int coding) {
    return CODINGS[coding].scaling == BYTES_WITH_MINIMA || CODINGS[coding].scaling == NIBBLES_WITH_MINIMA;
}
ALWAYS floats add_minimum(const int coding, floats whole, floats total, floats minimum) {
    return subtracts(coding) ? take_product(whole, total, minimum) : add_product(whole, total, minimum);
}

ALWAYS const uint8_t *marks_of(const uint8_t *x, const int rows, const int planes) { return x + 32 * planes * rows; }

/* The sum of a token's activations: of 32, or of a half of them if halves have minima. marks: of a tile of `rows`. */
ALWAYS floats total_of(const int coding, const int half, const int rows, const int i, const uint8_t *marks) {
    if (halves_of(coding) == 1) return all_floats(float_at(marks + (TOTAL * rows + i) * 4));
    float sum = (float)int_at(marks + ((BEGIN_LOW + half) * rows + i) * 4) * -0.03125f; /* -1/32 */
    return all_floats(sum * float_at(marks + (SCALE * rows + i) * 4));
}

/* The number with which a token's sum of a half begins, which makes up for what stands for 0. */
ALWAYS ints shift_of(const int coding, const int half, const int rows, const int i, const uint8_t *marks) {
    const int wide = CODINGS[coding].wide, whole = wide == 4 ? BEGIN_8 : wide == 5 ? BEGIN_16 : BEGIN_128;
    const int mark = halves_of(coding) == 2 ? BEGIN_LOW + half : whole;
    if (zero_of(coding) == 0 || (wide == 8 && SUBTRACTS_128)) return all_ints(0);
    return all_ints(int_at(marks + (mark * rows + i) * 4));
}

/* Four vectors of codes: those of a half if halves have scales of their own, else v, v + 4, v + 1 and v + 5, where v is
 * twice the part. words: where the first token's activations for each of them are. */
ALWAYS void load_four_vectors(const int coding, const struct meaning *of, const int part, const uint8_t *codes,
                              const uint8_t *x, const int rows, const int planes, bytes four[4], const uint8_t *words[4]) {
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const int in_halves = halves_of(coding) == 2, v = in_halves ? k : 2 * part + k / 2, high = in_halves ? part : k % 2;
        bytes each[2];
        load_codes(coding, of, codes, v, &each[0], &each[1]);
        four[k] = each[high], words[k] = x + (v + 4 * high) * planes * rows * 4;
    }
}

/* The sums of a half, [planes][rows]. If there are two planes, the first counts 128 times as much. */
ALWAYS void integer_sums(const int coding, const struct meaning *of, const int half, const int rows, const int planes,
                         const uint8_t *codes, const uint8_t *x, ints sums[2 * TILE]) {
    const int count = planes * rows, parts = halves_of(coding) == 2 ? 1 : 2;
    const uint8_t *marks = marks_of(x, rows, planes);
    ints *last = sums + (planes - 1) * rows;
    #pragma GCC unroll 16
    for (int i = 0; i < count; i++) sums[i] = all_ints(0);
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) last[i] = to_begin_with(shift_of(coding, half, rows, i, marks));
    #pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        bytes four[4];
        const uint8_t *words[4];
        load_four_vectors(coding, of, parts == 1 ? half : part, codes, x, rows, planes, four, words);
        add_four_vectors(CODINGS[coding].wide, count, four, words, 4, part == 0, part == parts - 1, sums);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) last[i] = completed(last[i], shift_of(coding, half, rows, i, marks));
}

/* A token's sums, scaled and added to its numbers. */
ALWAYS floats add_scaled(floats whole, const int rows, const int planes, const ints sums[2 * TILE], const int i,
                         const uint8_t *marks, floats scale) {
    ints exact = planes == 1 ? sums[i] : add_ints(times_128(sums[i]), sums[rows + i]);
    floats scaled = multiply_floats(to_floats(exact), all_floats(float_at(marks + (SCALE * rows + i) * 4)));
    return add_product(whole, scaled, scale);
}
