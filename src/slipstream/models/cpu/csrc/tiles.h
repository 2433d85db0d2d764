/* Tiles of AMX: 16 rows of 64 bytes, multiplied 32 pairs of rows and columns at a time. Linux only, see processor.py.
 *
 * Tiles 0 to 3 hold sums, a row for the 16 outputs of a token. Tiles 4 and 5 hold inputs, a row for each token. Tiles 6
 * and 7 hold weights, a row for the weights of 16 outputs with the same four bytes of inputs.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 /* of a row */ };

/* The operand of the instruction that sets the shapes of the tiles. */
struct tile_shapes {
    uint8_t palette, start_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifndef CONFIGURE_TILES /* the intrinsic lets the compiler assume that only 8 bytes are read */
#define CONFIGURE_TILES(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(shapes))
#endif

/* Sets the shapes of the tiles. tokens, weights: rows of sums and inputs, and of weights; bytes: of a row of inputs. */
static inline void shape_tiles(int tokens, int weights, int bytes) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? bytes : TILE_BYTES);
        shapes.rows[i] = (uint8_t)(i < 6 ? tokens : weights);
    }
    CONFIGURE_TILES(shapes);
}

/* Keeps the compiler from moving accesses of memory across this: the intrinsics of tiles do not declare theirs. */
#define MEMORY_SETTLED() __asm__ volatile("" ::: "memory")
