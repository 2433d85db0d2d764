/* Tiles of AMX: 16 rows of 64 bytes, multiplied 32 pairs of rows and columns at a time. Of Linux, see processor.py.
 *
 * Tiles 0 to 3 hold sums, 16 outputs of a token a row; 4 and 5 tokens' inputs; 6 and 7 weights, in a row what 16 outputs
 * have for the same four bytes of inputs.
 */
#pragma once

#include <immintrin.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 /* of a row */ };

/* The operand of the instruction that says what the tiles hold. */
struct tile_shapes {
    uint8_t palette, start_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifndef CONFIGURE_TILES /* the intrinsic tells the compiler of 8 bytes only */
#define CONFIGURE_TILES(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(shapes))
#endif

/* Sets the tiles up for so many rows of tokens and of weights, and of so many bytes. */
static inline void shape_tiles(int tokens, int weights, int bytes) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? bytes : TILE_BYTES);
        shapes.rows[i] = (uint8_t)(i < 6 ? tokens : weights);
    }
    CONFIGURE_TILES(shapes);
}

/* The instructions' intrinsics do not tell the compiler that they read and write memory. */
#define MEMORY_SETTLED() __asm__ volatile("" ::: "memory")
