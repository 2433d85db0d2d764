/* A panel times a tile of activations in one plane (int8), and the choice of the function. */
#include "panel_sums.h"

#define FUNCTIONS_OF(coding, bits, wide, scaling) ALL_ROWS(coding, 1)
CODINGS_OF(FUNCTIONS_OF)

panel_function *const SUMS_OF_ONE[FORMATS][TILE + 1] = {CODINGS_OF(ROWS_OF)};

void block_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                float *sums) {
    panel_function *const(*functions)[TILE + 1] = planes == 1 ? SUMS_OF_ONE : SUMS_OF_TWO;
    functions[coding_of(format)][places(rows)](format, panel, inputs, x, sums);
}
