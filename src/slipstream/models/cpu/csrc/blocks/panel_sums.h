/* A panel of codes times a tile of quantized activations; the functions for one plane and for two are compiled side by
 * side, in panel_sums.c and panel_sums_of_two.c, since that takes the longest of all.
 *
 * The products of 32 inputs are summed as integers, without rounding, and scaled once; scaled sums are added in the
 * order of the inputs. A token's result therefore does not depend on the tokens beside it, nor on the instructions
 * used. A panel is unpacked once for all tokens of a tile, so a few tokens take as long as one while memory is the
 * limit.
 */
#pragma once

#include "blocks.h"
#include "integer_sums.h"

/* Adds the products of 32 inputs. scales: of their block; g: which 32 inputs of the block. */
ALWAYS void add_group(const int coding, const struct meaning *of, const int rows, const int planes, const uint8_t *codes,
                      const uint8_t *scales, int64_t g, const uint8_t *x, floats whole[TILE]) {
    const uint8_t *marks = marks_of(x, rows, planes);
    #pragma GCC unroll 2
    for (int half = 0; half < halves_of(coding); half++) {
        ints sums[2 * TILE];
        integer_sums(coding, of, half, rows, planes, codes, x, sums);
        floats scale = scale_of(coding, of, scales, g, half), minimum = all_floats(0);
        if (has_minimum(coding)) minimum = minimum_of(coding, scales, g, half);
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            floats now = add_scaled(whole[i], rows, planes, sums, i, marks, scale);
            if (has_minimum(coding)) now = add_minimum(coding, now, total_of(coding, half, rows, i, marks), minimum);
            SETTLED(now);
            whole[i] = now;
        }
    }
}

/* A panel times a tile: sums [rows][LANES]. */
ALWAYS void add_panel(const int coding, const int rows, const int planes, int64_t format, const uint8_t *panel,
                      int64_t inputs, const uint8_t *x, float *sums) {
    const int64_t step = SCALE_BYTES[CODINGS[coding].scaling], bytes_of = 64 * CODINGS[coding].bits;
    const int64_t size = SHAPES[coding].size ? SHAPES[coding].size : block_size(format);
    const struct meaning of = meaning_of(coding, format);
    floats whole[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t at = 0; at < inputs; at += size) {
        const uint8_t *scales = panel;
        fetch(panel, step, rows);
        panel += step;
        for (int64_t g = 0; g < size / GROUP; g++) {
            fetch(panel, bytes_of, rows);
            add_group(coding, &of, rows, planes, panel, scales, g, x, whole);
            panel += bytes_of, x += (32 * planes + 4 * MARKS) * rows;
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

typedef void panel_function(int64_t format, const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums);

/* By coding and `places(rows)`. */
extern panel_function *const SUMS_OF_ONE[FORMATS][TILE + 1], *const SUMS_OF_TWO[FORMATS][TILE + 1];

#define ONE(coding, rows, planes)                                                                                    \
    static void coding##_##rows(int64_t format, const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums) { \
        add_panel(coding, rows, planes, format, panel, inputs, x, sums);                                              \
    }
#define ALL_ROWS(coding, planes) \
    ONE(coding, 1, planes) ONE(coding, 2, planes) ONE(coding, 3, planes) ONE(coding, 4, planes) ONE(coding, 6, planes) ONE(coding, 8, planes)
#define ROWS_OF(coding, bits, wide, scaling)                                          \
    [coding] = {[1] = coding##_1, [2] = coding##_2, [3] = coding##_3, [4] = coding##_4, [6] = coding##_6, [8] = coding##_8},
