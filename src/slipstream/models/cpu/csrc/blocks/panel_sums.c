/* A panel of GGUF's blocks times a tile of quantised activations.
 *
 * The products of 32 inputs are summed as integers, without rounding, and scaled once; scaled sums are added in the
 * order of the inputs. A token's result therefore does not depend on the tokens beside it, nor on the instructions
 * used. A panel is unpacked once for all tokens of a tile, so a few tokens take as long as one while memory is the
 * limit.
 */
#include "blocks.h"
#include "integer_sums.h"

/* Adds the products of 32 inputs. scales: of their block; g: which 32 inputs of the block. */
ALWAYS void add_group(const int format, const int rows, const int planes, const uint8_t *codes, const uint8_t *scales,
                      int64_t g, const uint8_t *x, floats whole[TILE]) {
    const uint8_t *marks = marks_of(x, rows, planes);
    #pragma GCC unroll 2
    for (int half = 0; half < halves_of(format); half++) {
        ints sums[2 * TILE];
        integer_sums(format, half, rows, planes, codes, x, sums);
        floats scale = scale_of(format, scales, g, half), minimum = all_floats(0);
        if (has_minimum(format)) minimum = minimum_of(format, scales, g);
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            floats now = add_scaled(whole[i], rows, planes, sums, i, marks, scale);
            if (has_minimum(format)) now = add_minimum(format, now, total_of(rows, i, marks), minimum);
            SETTLED(now);
            whole[i] = now;
        }
    }
}

/* A panel times a tile: sums [rows][LANES]. */
ALWAYS void add_panel(const int format, const int rows, const int planes, const uint8_t *panel, int64_t inputs,
                      const uint8_t *x, float *sums) {
    const int64_t size = format >= Q4_K ? SUPER : GROUP, bytes_of = SHAPES[format].codes;
    floats whole[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t at = 0; at < inputs; at += size) {
        const uint8_t *scales = panel;
        fetch(panel, SHAPES[format].scales, rows);
        panel += SHAPES[format].scales;
        for (int64_t g = 0; g < size / GROUP; g++) {
            fetch(panel, bytes_of, rows);
            add_group(format, rows, planes, panel, scales, g, x, whole);
            panel += bytes_of, x += (32 * planes + 4 * MARKS) * rows;
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

typedef void panel_function(const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums);

#define ONE(format, rows, planes)                                                                                     \
    static void format##_##rows##_##planes(const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums) {     \
        add_panel(format, rows, planes, panel, inputs, x, sums);                                                      \
    }
#define ALL_ROWS(format, planes) \
    ONE(format, 1, planes) ONE(format, 2, planes) ONE(format, 3, planes) ONE(format, 4, planes) ONE(format, 6, planes) ONE(format, 8, planes)
#define BOTH(format) ALL_ROWS(format, 1) ALL_ROWS(format, 2)
BOTH(Q4_0) BOTH(Q4_1) BOTH(Q5_0) BOTH(Q5_1) BOTH(Q8_0) BOTH(Q4_K) BOTH(Q5_K) BOTH(Q6_K)

#define ROWS_OF(format, planes)                                                                          \
    {                                                                                                    \
        [1] = format##_1_##planes, [2] = format##_2_##planes, [3] = format##_3_##planes,                 \
        [4] = format##_4_##planes, [6] = format##_6_##planes, [8] = format##_8_##planes                  \
    }
#define TABLE(format) [format] = {ROWS_OF(format, 1), ROWS_OF(format, 2)}
static panel_function *const FUNCTIONS[FORMATS][2][TILE + 1] = {
    TABLE(Q4_0), TABLE(Q4_1), TABLE(Q5_0), TABLE(Q5_1), TABLE(Q8_0), TABLE(Q4_K), TABLE(Q5_K), TABLE(Q6_K),
};

void block_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                float *sums) {
    FUNCTIONS[format][planes - 1][places(rows)](panel, inputs, x, sums);
}
