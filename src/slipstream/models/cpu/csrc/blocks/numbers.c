/* Panels of matrices in floating point.
 *
 * Their weights are multiplied by activations that are not rounded, and the products are added in a fixed order, those
 * of even and of odd inputs apart: here, too, a token's result does not depend on the tokens beside it.
 */
#include "../bfloat16.h"
#include "blocks.h"

ALWAYS floats load_weights(const int kind, const uint8_t *from) {
    return kind == F32 ? load_floats((const float *)from) : kind == F16 ? load_halves(from) : load_bf16((const uint16_t *)from);
}

/* A panel of numbers times tokens [there][inputs]: sums [rows][LANES], of which only the first `there` count. */
ALWAYS void add_numbers(const int kind, const int rows, const uint8_t *panel, int64_t inputs, const float *x,
                        int64_t there, float *sums) {
    const int each = LANES * (kind == F32 ? 4 : 2);
    const float *row[TILE];
    floats even[TILE], odd[TILE];
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) row[i] = x + (i < there ? i : 0) * inputs, even[i] = odd[i] = all_floats(0);
    for (int64_t in = 0; in < inputs; in += 2, panel += 2 * each) {
        fetch(panel, 2 * each, rows);
        floats first = load_weights(kind, panel), second = load_weights(kind, panel + each);
        #pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            even[i] = add_product(even[i], first, all_floats(row[i][in]));
            odd[i] = add_product(odd[i], second, all_floats(row[i][in + 1]));
        }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, add_floats(even[i], odd[i]));
}

typedef void numbers_function(const uint8_t *panel, int64_t inputs, const float *x, int64_t there, float *sums);

#define ONE(kind, rows)                                                                                            \
    static void kind##_##rows(const uint8_t *panel, int64_t inputs, const float *x, int64_t there, float *sums) {  \
        add_numbers(kind, rows, panel, inputs, x, there, sums);                                                    \
    }
#define ALL_ROWS(kind) ONE(kind, 1) ONE(kind, 2) ONE(kind, 3) ONE(kind, 4) ONE(kind, 6) ONE(kind, 8)
ALL_ROWS(F32) ALL_ROWS(F16) ALL_ROWS(BF16)

#define TABLE(kind) [kind] = {[1] = kind##_1, [2] = kind##_2, [3] = kind##_3, [4] = kind##_4, [6] = kind##_6, [8] = kind##_8}
static numbers_function *const FUNCTIONS[FORMATS][TILE + 1] = {TABLE(F32), TABLE(F16), TABLE(BF16)};

void number_sums(int64_t kind, const uint8_t *panel, int64_t inputs, int64_t rows, const float *x, float *sums) {
    FUNCTIONS[kind][places(rows)](panel, inputs, x, rows, sums);
}

void unpack_numbers(int64_t kind, const uint8_t *panel, int64_t lane, int64_t inputs, float *to) {
    for (int64_t i = 0; i < inputs; i++) {
        float numbers[LANES];
        store_floats(numbers, load_weights((int)kind, panel + i * LANES * SHAPES[kind].bytes));
        to[i] = numbers[lane];
    }
}
