/* A panel of GGUF's blocks times a tile of quantised activations.
 *
 * The products of 32 inputs are summed as integers, without rounding, and scaled once; scaled sums are added in the
 * order of the inputs. A token's result therefore does not depend on the tokens beside it, nor on the instructions used.
 * A panel is unpacked once for all tokens of a tile, so a few tokens take as long as one while memory is the limit.
 */
#include "blocks.h"
#include "codes.h"

/* What four vectors of codes add to a tile's sums. x: the activations of each. */
ALWAYS void add_vectors(const int bits, const int rows, const int planes, const bytes codes[4], const uint8_t *const x[4],
                        ints sum[2][TILE]) {
#ifdef ADDS_FOUR_DOTS
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
        #pragma GCC unroll 2
        for (int p = 0; p < planes; p++) sum[p][i] = add_four_dots(sum[p][i], codes, x, (p * rows + i) * 4, bits);
#else
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            sum[0][i] = add_dot(sum[0][i], codes[k], x[k] + i * 4, bits);
            if (planes == 2) sum[1][i] = add_dot(sum[1][i], codes[k], x[k] + (rows + i) * 4, bits);
        }
#endif
}

/* Begins a tile's integer sums with a mark; of two planes the second. */
ALWAYS void begin(const int rows, const int planes, const uint8_t *marks, const int mark, ints sum[2][TILE]) {
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        ints from = mark < 0 ? all_ints(0) : all_ints(int_at(marks + (mark * rows + i) * 4));
        sum[planes - 1][i] = from;
        if (planes == 2) sum[0][i] = all_ints(0);
    }
}

/* Scales the integer sums and adds them to the whole. */
ALWAYS void finish(const int rows, const int planes, const uint8_t *marks, floats scale, ints sum[2][TILE],
                   floats whole[TILE]) {
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        ints exact = planes == 1 ? sum[0][i] : add_ints(times_128(sum[0][i]), sum[1][i]);
        floats scaled = multiply_floats(to_floats(exact), all_floats(float_at(marks + (SCALE * rows + i) * 4)));
        whole[i] = add_product(whole[i], scaled, scale);
    }
}

/* 32 inputs. scales: the scales of the block that they belong to; g: which 32 of the block. */
ALWAYS void add_group(const int format, const int rows, const int planes, const uint8_t *codes, const uint8_t *scales,
                      int64_t g, const uint8_t *x, floats whole[TILE]) {
    const uint8_t *marks = x + 32 * planes * rows;
    const int stride = planes * rows * 4, bits = bits_of(format);
    ints sum[2][TILE];
    if (format == Q6_K) {
        bytes early[4], late[4];
        const uint8_t *low[4], *high[4];
        #pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            load_codes(format, codes, v, &early[v], &late[v]);
            low[v] = x + v * stride, high[v] = x + (v + 4) * stride;
        }
        begin(rows, planes, marks, BEGIN_LOW, sum);
        add_vectors(bits, rows, planes, early, low, sum);
        finish(rows, planes, marks, scale_of(format, scales, g, 0), sum, whole);
        begin(rows, planes, marks, BEGIN_HIGH, sum);
        add_vectors(bits, rows, planes, late, high, sum);
        finish(rows, planes, marks, scale_of(format, scales, g, 1), sum, whole);
        return;
    }
    begin(rows, planes, marks, format == Q4_0 ? BEGIN_8 : format == Q5_0 ? BEGIN_16 : format == Q8_0 && !SUBTRACTS_128 ? BEGIN_128 : -1, sum);
    #pragma GCC unroll 2
    for (int v = 0; v < 4; v += 2) {
        bytes four[4];
        const uint8_t *of[4] = {x + v * stride, x + (v + 4) * stride, x + (v + 1) * stride, x + (v + 5) * stride};
        load_codes(format, codes, v, &four[0], &four[1]);
        load_codes(format, codes, v + 1, &four[2], &four[3]);
        add_vectors(bits, rows, planes, four, of, sum);
    }
    finish(rows, planes, marks, scale_of(format, scales, g, 0), sum, whole);
    if (!has_minimum(format)) return;
    floats minimum = minimum_of(format, scales, g);
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        floats total = all_floats(float_at(marks + (TOTAL * rows + i) * 4));
        whole[i] = add_minimum(format, whole[i], total, minimum);
    }
}

/* A panel times a tile: sums [rows][LANES]. next: the panel that this thread multiplies then. */
ALWAYS void add_panel(const int format, const int rows, const int planes, const uint8_t *panel, const uint8_t *next,
                      int64_t inputs, const uint8_t *x, float *sums) {
    const int64_t size = format >= Q4_K ? SUPER : GROUP, bytes_of = SHAPES[format].codes, step = SHAPES[format].scales;
    const uint8_t *scales = panel + inputs / GROUP * bytes_of;
    const int64_t to_next = next - panel, each = step / (size / GROUP);
    struct fetching ahead = begin_fetching(panel, scales - panel, bytes_of, next);
    floats whole[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t at = 0; at < inputs; at += size, scales += step)
        for (int64_t g = 0; g < size / GROUP; g++) {
            fetch(&ahead, bytes_of);
            prefetch_later(scales + to_next + g * each);
            add_group(format, rows, planes, panel, scales, g, x, whole);
            panel += bytes_of, x += (32 * planes + 4 * MARKS) * rows;
        }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

typedef void panel_function(const uint8_t *panel, const uint8_t *next, int64_t inputs, const uint8_t *x, float *sums);

#define ONE(format, rows, planes)                                                                      \
    static void format##_##rows##_##planes(const uint8_t *panel, const uint8_t *next, int64_t inputs,   \
                                           const uint8_t *x, float *sums) {                             \
        add_panel(format, rows, planes, panel, next, inputs, x, sums);                                  \
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

void block_sums(int64_t format, const uint8_t *panel, const uint8_t *next, int64_t inputs, int64_t rows, int64_t planes,
                const uint8_t *x, float *sums) {
    FUNCTIONS[format][planes - 1][places(rows)](panel, next, inputs, x, sums);
}
