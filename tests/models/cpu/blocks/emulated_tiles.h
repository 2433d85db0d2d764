/* The tiles of AMX in plain C, as Intel's manual describes its instructions, for machines without them. Include it
 * first, with __AMX_INT8__ and __AMX_BF16__ defined. */
#pragma once

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static _Thread_local struct {
    int rows[8], bytes[8];
    uint8_t data[8][16][64];
} emulated;

static inline void emulate_shapes(const uint8_t *config) {
    for (int i = 0; i < 8; i++) emulated.bytes[i] = config[16 + 2 * i] | config[17 + 2 * i] << 8, emulated.rows[i] = config[48 + i];
    memset(emulated.data, 0, sizeof emulated.data);
}

static inline void emulate_load(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy(emulated.data[tile][row], (const uint8_t *)from + row * stride, (size_t)emulated.bytes[tile]);
}

static inline void emulate_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy((uint8_t *)to + row * stride, emulated.data[tile][row], (size_t)emulated.bytes[tile]);
}

/* Signed bytes, four at a time. */
static inline void emulate_bytes(int sums, int left, int right) {
    for (int row = 0; row < emulated.rows[sums]; row++)
        for (int column = 0; column < emulated.bytes[sums] / 4; column++) {
            int32_t sum;
            uint8_t *to = emulated.data[sums][row] + 4 * column;
            memcpy(&sum, to, 4);
            for (int i = 0; i < emulated.bytes[left]; i++)
                sum += (int8_t)emulated.data[left][row][i] * (int8_t)emulated.data[right][i / 4][4 * column + i % 4];
            memcpy(to, &sum, 4);
        }
}

/* A bfloat16 number, or a sum; subnormal numbers count as 0. */
static inline float emulate_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }
static inline float emulate_number(const uint8_t *from) {
    uint32_t bits = (uint32_t)(from[0] | from[1] << 8) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return emulate_flush(x);
}

/* Pairs of bfloat16 numbers: products at even and odd places have a sum each; then both are added to the tile. */
static inline void emulate_pairs(int sums, int left, int right) {
    for (int row = 0; row < emulated.rows[sums]; row++)
        for (int column = 0; column < emulated.bytes[sums] / 4; column++) {
            float sum, apart[2] = {0, 0};
            uint8_t *to = emulated.data[sums][row] + 4 * column;
            memcpy(&sum, to, 4);
            for (int i = 0; i < emulated.bytes[left] / 2; i++) {
                const uint8_t *a = emulated.data[left][row] + 2 * i, *b = emulated.data[right][i / 2] + 4 * column + 2 * (i % 2);
                apart[i % 2] = emulate_flush(fmaf(emulate_number(a), emulate_number(b), apart[i % 2]));
            }
            sum = emulate_flush(emulate_flush(sum) + emulate_flush(apart[0] + apart[1]));
            memcpy(to, &sum, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define CONFIGURE_TILES(shapes) emulate_shapes((const uint8_t *)&(shapes))
#define _tile_loadd emulate_load
#define _tile_stored emulate_store
#define _tile_zero(tile) memset(emulated.data[tile], 0, sizeof emulated.data[tile])
#define _tile_dpbssd emulate_bytes
#define _tile_dpbf16ps emulate_pairs
#define _tile_release() memset(emulated.rows, 0, sizeof emulated.rows)
