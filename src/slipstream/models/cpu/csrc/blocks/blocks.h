/* What the kernels for quantised files share. */
#pragma once

#include <stddef.h>
#include <string.h>

#include "../structs.h"
#include "../team.h"
#include "simd.h"

/* A format. size, bytes: values and bytes of a block in the file; codes: bytes of 32 inputs' codes in a panel; scales:
 * bytes of a block's scales there. */
struct shape {
    int64_t size, bytes, codes, scales;
};
static const struct shape SHAPES[FORMATS] = {
    [Q4_0] = {32, 18, 256, 32},    [Q4_1] = {32, 20, 256, 64},    [Q5_0] = {32, 22, 320, 32},
    [Q5_1] = {32, 24, 320, 64},    [Q8_0] = {32, 34, 512, 32},    [Q4_K] = {256, 144, 256, 320},
    [Q5_K] = {256, 176, 320, 320}, [Q6_K] = {256, 210, 384, 288},
};

/* Bytes of a panel's block. */
static inline int64_t block_bytes(const struct shape *of) { return of->scales + of->size / GROUP * of->codes; }

static inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/* Bytes of a panel: a multiple of 64. */
int64_t panel_bytes(int64_t format, int64_t inputs);

/* Packs rows of the file's blocks as panels. count: a multiple of 16 except at the end of a part, where missing rows
 * are 0. to: zeroed memory for the panels of these rows. shared: whether a team does it, or this thread alone. */
struct packing {
    int64_t format, count, inputs;
    const uint8_t *rows;
    uint8_t *to;
};
void pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared);

/* How the activations of a product are divided: into tiles of so many tokens. in_rows: whether a tile has a row for
 * each token, as AMX needs; else it has words of four inputs, token by token. See activations.c. */
struct tiling {
    int64_t tokens, planes;
    int in_rows;
};
struct tiling tiling_of(int64_t tokens, int64_t planes);

/* How many bytes `quantise` fills for so many tokens, and how many of them are before the tile that begins with a
 * token. */
int64_t activation_bytes(int64_t inputs, int64_t tokens, int64_t planes);
int64_t bytes_before(const struct tiling *of, int64_t inputs, int64_t token);

/* Tokens' numbers [tokens][inputs]: float32, or bfloat16 if `floats` is NULL. */
struct numbers {
    const float *floats;
    const uint16_t *halves;
};

/* Rounds numbers to integers, in tiles. All threads of a team must call it: they wait for each other. */
void quantise(const struct member *me, struct numbers x, int64_t inputs, int64_t tokens, const struct tiling *of,
              uint8_t *to);

/* Rounds 32 inputs of a token, from number `first` of x on, to its place in a tile of `count` places. */
void quantise_group(struct numbers x, int64_t first, const struct tiling *of, int place, int count, uint8_t *to);

/* A token of a forward, and the factor of what is computed for it. */
struct token_row {
    int64_t token;
    float weight;
};

/* Copies the quantised inputs of some tokens, `rows`, to tiles. from: all tokens, in tiles of one token each. To be
 * called by all threads of a team, each of which copies a part of the inputs. */
void gather(const struct member *me, const uint8_t *from, int64_t inputs, const struct token_row *rows, int64_t count,
            const struct tiling *of, uint8_t *to);

/* out [tokens][outputs] = x [tokens][inputs] times the weights, plus the bias. space: `activation_bytes`. */
void multiply_blocks(const struct block_linear *w, const float *x, int64_t tokens, int64_t planes, float *out,
                     uint8_t *space);

/* out [tokens][hidden] = the experts' sum for x [tokens][hidden]. forced: [tokens][used], the experts to use instead of
 * the router's choice, different ones for each token; or NULL. chosen: [tokens][used], which were used, ascending. space:
 * `experts_scratch` bytes that begin at a multiple of 64. */
void multiply_experts(const struct experts *of, const float *x, int64_t tokens, const int32_t *forced, int32_t *chosen,
                      float *out, uint8_t *space);
int64_t experts_scratch(const struct experts *of, int64_t tokens);

/* A panel times a tile of 1 to 8 tokens: sums [places(rows)][LANES]. */
void block_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                float *sums);

/* The same for a tile of any tiling and a panel of any format. plain: the tile's inputs [rows][inputs] before rounding,
 * for formats in floating point. A tile in rows needs `begin_tiles`. */
void panel_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const struct tiling *of,
                const uint8_t *x, const float *plain, float *sums);

/* The same for a tile in rows, of 12 or 16 tokens, between `begin_tiles` and `end_tiles`, and for all formats with
 * codes. Where there is no AMX there are no such tiles. */
void tile_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const uint8_t *x, float *sums);
void begin_tiles(int64_t tokens);
void end_tiles(void);

/* The same for the kinds of grouped.c. */
static inline int is_grouped(int64_t format) { return format >= FORMATS; }
static inline int has_numbers(int64_t format) { return is_grouped(format) && format % KINDS >= BFLOAT16; }
int64_t grouped_panel_bytes(int64_t format, int64_t inputs);
static inline int64_t grouped_scale_bytes(int64_t kind) { return kind == INT4 ? 3 * LANES : 8 * LANES; }
void pack_grouped_panel(int64_t panel, void *packing);
void unpack_grouped(const struct block_part *part, int64_t inputs, const int64_t *outputs, int64_t count, float *to);
void grouped_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, int64_t planes, const uint8_t *x,
                  const float *plain, float *sums);

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

void attend(const struct float_layer *layer, const struct float_cache *m, const float *heads, int64_t tokens,
            float *out, void *space);

/* How many places a tile of this many tokens has: one of the numbers that the products are compiled for. */
static inline int places(int64_t tokens) { return tokens >= 7 ? 8 : tokens == 5 ? 6 : (int)tokens; }

/* A tile's bytes of 32 inputs: codes [8 vectors][planes][places][4], then per place the scale, the scaled sum, and the
 * five sums that products begin with, in this order. */
enum mark { SCALE, TOTAL, BEGIN_8, BEGIN_16, BEGIN_128, BEGIN_LOW, BEGIN_HIGH, MARKS };
static inline int64_t group_bytes(int64_t planes, int64_t count) { return (32 * planes + 4 * MARKS) * count; }

/* Of a tile in rows: codes [count][32], scales and scaled sums. */
static inline int64_t tile_group_bytes(int64_t count) { return (32 + 4 * 2) * count; }
