/* A panel times a tile of activations in two planes (int15). */
#include "panel_sums.h"

#define FUNCTIONS_OF(coding, bits, wide, scaling) ALL_ROWS(coding, 2)
CODINGS_OF(FUNCTIONS_OF)

panel_function *const SUMS_OF_TWO[FORMATS][TILE + 1] = {CODINGS_OF(ROWS_OF)};
