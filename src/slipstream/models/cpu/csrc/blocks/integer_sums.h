/* The integer sums of a tile's tokens with 32 inputs of a panel, for panel_sums.c and grouped.c. They are exact, in
 * whatever order and width they are added: all variants give the same. `format` is known when this is compiled; blocks.h
 * says how a tile is laid out.
 */
#pragma once

#include "codes.h"

/* Inputs that share a scale: of Q6_K each half of 32. */
ALWAYS int halves_of(const int format) { return format == Q6_K ? 2 : 1; }

/* Which of a token's sums those of a half begin with, since codes are shifted; below 0 with none. */
ALWAYS int mark_of(const int format, const int half) {
    if (format == Q6_K) return half ? BEGIN_HIGH : BEGIN_LOW;
    return format == Q4_0 ? BEGIN_8 : format == Q5_0 ? BEGIN_16 : format == Q8_0 && !SUBTRACTS_128 ? BEGIN_128 : -1;
}

/* Where the tokens' activations of a vector of codes stand, and their marks. */
ALWAYS const uint8_t *words_of(const uint8_t *x, const int rows, const int planes, const int vector) {
    return x + vector * planes * rows * 4;
}
ALWAYS const uint8_t *marks_of(const uint8_t *x, const int rows, const int planes) { return x + 32 * planes * rows; }

ALWAYS ints beginning(const int format, const int half, const int rows, const uint8_t *marks, const int i) {
    const int mark = mark_of(format, half);
    return mark < 0 ? all_ints(0) : all_ints(int_at(marks + (mark * rows + i) * 4));
}

/* Four vectors of a half: those of a half of Q6_K, else v, v + 1, v + 4 and v + 5 where v is twice the `part`. */
ALWAYS void four_vectors(const int format, const int part, const uint8_t *codes, const uint8_t *x, const int rows,
                         const int planes, bytes four[4], const uint8_t *words[4]) {
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const int v = format == Q6_K ? k : 2 * part + k / 2, high = format == Q6_K ? part : k % 2;
        bytes each[2];
        load_codes(format, codes, v, &each[0], &each[1]);
        four[k] = each[high], words[k] = words_of(x, rows, planes, v + 4 * high);
    }
}

#ifdef SUMS_IN_16_BITS
/* Codes of 4 bits leave room for the sums of all 32 inputs in 16 bits; the first part's are kept so. */
ALWAYS void add_part(const int format, const int part, const int rows, const int planes, const uint8_t *codes,
                     const uint8_t *x, ints sums[2][TILE]) {
    const int bits = bits_of(format), begins = format == Q6_K || part == 0, ends = format == Q6_K || part == 1;
    const int half = format == Q6_K ? part : 0;
    bytes four[4];
    const uint8_t *words[4], *marks = marks_of(x, rows, planes);
    four_vectors(format, part, codes, x, rows, planes, four, words);
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        #pragma GCC unroll 2
        for (int p = 0; p < planes; p++) {
            ints sum = bits == 4 ? four_in_16_bits(four, words, (p * rows + i) * 4) : four_dots(four, words, (p * rows + i) * 4, bits);
            if (!begins) sum = bits == 4 ? add_in_16_bits(sums[p][i], sum) : add_ints(sums[p][i], sum);
            if (ends && bits == 4) sum = in_32_bits(sum);
            if (ends && p == planes - 1 && mark_of(format, half) >= 0)
                sum = add_ints(sum, beginning(format, half, rows, marks, i));
            SETTLED(sum);
            sums[p][i] = sum;
        }
}
#else
ALWAYS void add_part(const int format, const int part, const int rows, const int planes, const uint8_t *codes,
                     const uint8_t *x, ints sums[2][TILE]) {
    const int bits = bits_of(format), begins = format == Q6_K || part == 0, half = format == Q6_K ? part : 0;
    bytes four[4];
    const uint8_t *words[4], *marks = marks_of(x, rows, planes);
    #pragma GCC unroll 8
    for (int i = 0; begins && i < rows; i++) {
        sums[planes - 1][i] = beginning(format, half, rows, marks, i);
        if (planes == 2) sums[0][i] = all_ints(0);
    }
    four_vectors(format, part, codes, x, rows, planes, four, words);
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
            #pragma GCC unroll 2
            for (int p = 0; p < planes; p++) sums[p][i] = add_dot(sums[p][i], four[k], words[k] + (p * rows + i) * 4, bits);
}
#endif

/* The sums of a half. Of two planes the first is 128 times as much. */
ALWAYS void integer_sums(const int format, const int half, const int rows, const int planes, const uint8_t *codes,
                         const uint8_t *x, ints sums[2][TILE]) {
    add_part(format, half, rows, planes, codes, x, sums);
    if (format != Q6_K) add_part(format, 1, rows, planes, codes, x, sums);
}

/* A token's sums, scaled and added to its numbers. */
ALWAYS floats add_scaled(floats whole, const int rows, const int planes, ints sums[2][TILE], const int i,
                         const uint8_t *marks, floats scale) {
    ints exact = planes == 1 ? sums[0][i] : add_ints(times_128(sums[0][i]), sums[1][i]);
    floats scaled = multiply_floats(to_floats(exact), all_floats(float_at(marks + (SCALE * rows + i) * 4)));
    return add_product(whole, scaled, scale);
}

/* The sum of a token's 32 activations. */
ALWAYS floats total_of(const int rows, const int i, const uint8_t *marks) {
    return all_floats(float_at(marks + (TOTAL * rows + i) * 4));
}
