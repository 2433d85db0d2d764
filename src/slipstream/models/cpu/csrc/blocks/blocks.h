/* Shared by the kernels for quantized files. */
#pragma once

#include <stddef.h>
#include <string.h>

#include "../structs.h"
#include "../team.h"
#include "simd.h"

/* The layout of a block's scales in a panel, each for 16 outputs: float16 numbers first, then bytes. */
enum scaling {
    ONE_SCALE,
    WITH_MINIMUM,       /* a scale and a minimum */
    BYTES_WITH_MINIMA,  /* these, and a byte to multiply the scale by for each 32 inputs, then one for the minimum */
    NIBBLES_WITH_MINIMA, /* these, and a byte for each 16 inputs: low bits for the scale, high ones for the minimum */
    BYTES_OF_16,        /* a scale, and a signed byte to multiply it by for each 16 inputs */
    BYTES_OF_32,        /* likewise for each 32 inputs */
    POWERS_OF_2,        /* a byte: an exponent (E8M0) */
    SMALL_FLOATS,       /* a byte for each 16 inputs: 4 bits of exponent and 3 of fraction (E4M3), not negative */
    WITH_OFFSET,        /* a scale, and a signed byte: its product with the scale is the minimum */
    FLOATS_WITH_MINIMA  /* a scale and a minimum in float32 */
};
static const int64_t SCALE_BYTES[] = {32, 64, 320, 320, 288, 160, 16, 64, 48, 128};

/* How a type's panels hold codes. bits: of a code; wide: of what the kernels multiply, which is the code or, where that
 * is wider, what LEVELS holds for it. 2^(wide - 1) of this stands for 0, except where minima make up for that.
 *
 * Codes stand in vectors of 64 bytes, whose byte 4 * o + i belongs to output o. Planes of 8, 4, 2 or 1 bits follow each
 * other, as many as make up the code, the lowest bits first; a plane has a vector for each of its bits. Inputs 4 * v to
 * 4 * v + 3 stand in vector v % bits of a plane of so many bits, from bit v / bits * bits on. */
#define CODINGS_OF(X)                                                                                             \
    X(Q4_0, 4, 4, ONE_SCALE)                                                                                      \
    X(Q4_1, 4, 4, WITH_MINIMUM)                                                                                   \
    X(Q5_0, 5, 5, ONE_SCALE)                                                                                      \
    X(Q5_1, 5, 5, WITH_MINIMUM)                                                                                   \
    X(Q8_0, 8, 8, ONE_SCALE)                                                                                      \
    X(Q2_K, 2, 2, NIBBLES_WITH_MINIMA)                                                                            \
    X(Q3_K, 3, 6, BYTES_OF_16)                                                                                    \
    X(Q4_K, 4, 4, BYTES_WITH_MINIMA)                                                                              \
    X(Q5_K, 5, 5, BYTES_WITH_MINIMA)                                                                              \
    X(Q6_K, 6, 6, BYTES_OF_16)                                                                                    \
    X(IQ4_NL, 4, 8, ONE_SCALE)                                                                                    \
    X(IQ4_XS, 4, 8, BYTES_OF_32)                                                                                  \
    X(MXFP4, 4, 5, POWERS_OF_2)                                                                                   \
    X(NVFP4, 4, 6, SMALL_FLOATS)                                                                                  \
    X(INT4, 4, 4, WITH_OFFSET)                                                                                    \
    X(INT4_MINIMA, 4, 4, FLOATS_WITH_MINIMA)

struct coding {
    int bits, wide;
    enum scaling scaling;
};
#define CODING(name, bits, wide, scaling) [name] = {bits, wide, scaling},
static const struct coding CODINGS[FORMATS] = {CODINGS_OF(CODING)};

struct shape {
    int64_t size, bytes, panel;
};
#define SHAPE(name, number, size, bytes, panel) [name] = {size, bytes, panel},
static const struct shape SHAPES[FORMATS] = {TYPES(SHAPE)};

/* Of a format, which is a type or, for groups, includes their size: numbers and bytes of a block in the file, and the
 * type whose panels hold it. */
static inline int64_t block_size(int64_t format) { return SHAPES[format % KINDS].size + format / KINDS; }
static inline int64_t file_bytes(int64_t format) { return SHAPES[format % KINDS].bytes + format / KINDS; }
static inline int64_t row_bytes(int64_t format, int64_t inputs) { return inputs / block_size(format) * file_bytes(format); }
static inline int64_t coding_of(int64_t format) { return SHAPES[format % KINDS].panel; }
static inline int has_numbers(int64_t format) { return format % KINDS >= F32; } /* in floating point */

static inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/* Bytes of a panel: a multiple of 64. */
int64_t panel_bytes(int64_t format, int64_t inputs);

/* Packs rows of the file's blocks as panels. count: a multiple of 16 except at the end of a part, where missing rows
 * are 0. to: zeroed memory for the panels of these rows. shared: whether a team does it, or this thread alone. */
struct packing {
    int64_t format, count, inputs;
    const uint8_t *rows;
    uint8_t *to;
    _Atomic int32_t is_not_finite; /* a number or a scale is infinite or NaN */
};
/* Returns 1, or 0 if a number or a scale is infinite or NaN. */
int32_t pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared);

/* What became of a piece of a file. UNREAD: the file does not hold all of it, or there is no memory. */
enum packed { UNREAD, PACKED, NOT_FINITE };
/* Packs a piece of a file, in this thread. Not for Windows. */
enum packed pack_piece(int file, const struct file_piece *piece);

/* How the activations of a product are divided: into tiles of so many tokens. in_rows: whether a tile has a row for
 * each token, as AMX needs; else it has words of four inputs, token by token. See activations.c. */
struct tiling {
    int64_t tokens, planes;
    int in_rows;
};
struct tiling tiling_of(int64_t tokens, int64_t planes);

/* How many bytes `quantize` fills for so many tokens, and how many of them are before the tile that begins with a
 * token. */
int64_t activation_bytes(int64_t inputs, int64_t tokens, int64_t planes);
int64_t bytes_before(const struct tiling *of, int64_t inputs, int64_t token);

/* Tokens' numbers [tokens][inputs]: float32, or bfloat16 if `floats` is NULL. */
struct numbers {
    const float *floats;
    const uint16_t *halves;
};

/* Rounds numbers to integers, in tiles. All threads of a team must call it: they wait for each other. */
void quantize(const struct member *me, struct numbers x, int64_t inputs, int64_t tokens, const struct tiling *of,
              uint8_t *to);

/* The same for some groups of 32 inputs, in this thread. */
void quantize_groups(struct numbers x, int64_t inputs, int64_t tokens, const struct tiling *of, int64_t first_group,
                     int64_t end, uint8_t *to);

/* Rounds 32 inputs of a token, from number `first` of x on, to its place in a tile of `count` places. */
void quantize_group(struct numbers x, int64_t first, const struct tiling *of, int place, int count, uint8_t *to);

/* A token of a forward, and the factor of what is computed for it. */
struct token_row {
    int64_t token;
    float weight;
};

/* Copies the quantized inputs of some tokens, `rows`, to tiles. from: all tokens, in tiles of one token each. To be
 * called by all threads of a team, each of which copies a part of the inputs. */
void gather(const struct member *me, const uint8_t *from, int64_t inputs, const struct token_row *rows, int64_t count,
            const struct tiling *of, uint8_t *to);

/* out [tokens][outputs] = x [tokens][inputs] times the weights, plus the bias. space: `activation_bytes`. */
void multiply_blocks(const struct block_linear *w, const float *x, int64_t tokens, int64_t planes, float *out,
                     uint8_t *space);

/* A panel times a tile of tokens: sums [tiling's tokens, or places(rows)][LANES]. rows: tokens of the tile; x: their
 * integers, see `quantize`; plain [rows][inputs]: their numbers, which multiply weights in floating point. Where a tile
 * has rows, between `begin_tiles` and `end_tiles`. */
void panel_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const struct tiling *of,
                const uint8_t *x, const float *plain, float *sums);
void begin_tiles(int64_t tokens);
void end_tiles(void);

/* Multiplies the sums of so many tokens, if there is a scale. */
static inline void scale_sums(const float *scale, int64_t rows, float *sums) {
    for (int64_t i = 0; scale && i < rows; i++)
        store_floats(sums + i * LANES, multiply_floats(load_floats(sums + i * LANES), all_floats(*scale)));
}

/* What `panel_sums` calls: for 1 to 8 tokens in words; for a tile in rows, of 12 or 16 tokens, which there are none of
 * without AMX; and for numbers, of 1 to 8 tokens. */
void block_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                float *sums);
void tile_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const uint8_t *x, float *sums);
void number_sums(int64_t kind, const uint8_t *panel, int64_t inputs, int64_t rows, const float *x, float *sums);

/* An output's weights of a panel of numbers. */
void unpack_numbers(int64_t kind, const uint8_t *panel, int64_t lane, int64_t inputs, float *to);

/* Prefetches the bytes of panels that are read some KB after these. */
enum {
    AHEAD = 8192,      /* bytes that are prefetched ahead, where that is done in one step */
    TWO_STEPS_FROM = 4 /* tokens of a tile from which two steps are faster on every processor */
};
ALWAYS void fetch(const uint8_t *from, const int64_t bytes, const int rows) {
    for (int line = 0; line < bytes; line += 64) {
        if (IN_TWO_STEPS || rows >= TWO_STEPS_FROM) fetch_in_two_steps(from + line);
        else prefetch(from + AHEAD + line);
    }
}

void attend(const struct float_layer *layer, const struct kv_cache *m, const float *heads, int64_t tokens, float *out,
            void *space);

/* The places in a tile for this many tokens: one of the numbers for which the products are compiled. */
static inline int places(int64_t tokens) { return tokens >= 7 ? 8 : tokens == 5 ? 6 : (int)tokens; }

/* A tile's bytes of 32 inputs: codes [8 vectors][planes][places][4], then per place the scale, the scaled sum, and the
 * sums that products begin with, in this order. Of a tile in rows: codes [count][32], and the marks before BEGIN_8. */
enum mark { SCALE, TOTAL, BEGIN_LOW, BEGIN_HIGH, BEGIN_8, BEGIN_16, BEGIN_128, MARKS };
static inline int64_t group_bytes(int64_t planes, int64_t count) { return (32 * planes + 4 * MARKS) * count; }
static inline int64_t tile_group_bytes(int64_t count) { return (32 + 4 * BEGIN_8) * count; }
