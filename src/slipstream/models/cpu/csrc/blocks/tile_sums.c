/* A panel of codes times a tile of up to 16 quantized tokens, by the tiles of AMX: 16 tokens, 16 outputs and 32 inputs
 * by one instruction. The integers are those of panel_sums.c, and so are the steps in floating point: a token gets the
 * same bits.
 *
 * While a group of 32 inputs is scaled, the next one is multiplied, and the codes of the one after that are unpacked,
 * as signed bytes; all meet in the first level of the caches.
 */
#include "blocks.h"

#ifdef __AMX_INT8__
#include "../tiles.h"
#include "integer_sums.h"

enum {
    LAG = 2,    /* groups between unpacking, multiplying and scaling */
    RING = 8,   /* most groups under way; a power of 2 */
    HALF = 256  /* bytes of 16 inputs' codes */
};

/* Groups between unpacking and scaling. codes: of 32 inputs, a row of 64 bytes for each 4; if halves have scales of
 * their own, the codes of the first half, zeros, and the codes of the second. sums [tokens][LANES]: of each half. */
struct under_way {
    _Alignas(64) int8_t codes[RING][3 * HALF];
    _Alignas(64) int32_t sums[RING][2][TILE_ROWS * LANES];
};

ALWAYS void unpack(const int coding, const struct meaning *of, const uint8_t *codes, int8_t *to) {
    const int second = halves_of(coding) == 2 ? 2 * HALF : HALF;
    bytes zero = _mm512_set1_epi8((char)zero_of(coding));
    #pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        bytes one, other;
        load_codes(coding, of, codes, v, &one, &other);
        if (zero_of(coding)) one = _mm512_sub_epi8(one, zero), other = _mm512_sub_epi8(other, zero);
        _mm512_store_si512(to + v * 64, one), _mm512_store_si512(to + second + v * 64, other);
    }
}

/* Integer sums of a group or, where halves have scales, of each half. x: a tile's 32 inputs. */
ALWAYS void multiply_group(const int coding, const uint8_t *x, const int8_t *codes, int32_t (*sums)[TILE_ROWS * LANES]) {
    _tile_loadd(4, x, GROUP);
    _tile_loadd(6, codes, TILE_BYTES);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, sums[0], 4 * LANES);
    if (halves_of(coding) == 1) return;
    _tile_loadd(7, codes + HALF, TILE_BYTES);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(1, sums[1], 4 * LANES);
}

/* Scales a group's sums and adds them to those of the groups before. scales: of the block; g: which group of it. */
ALWAYS void finish_group(const int coding, const struct meaning *of, const int rows, int32_t (*sums)[TILE_ROWS * LANES],
                         const uint8_t *marks, const uint8_t *scales, int64_t g, floats whole[TILE_ROWS]) {
    #pragma GCC unroll 2
    for (int half = 0; half < halves_of(coding); half++) {
        floats by = scale_of(coding, of, scales, g, half), minimum = all_floats(0);
        if (has_minimum(coding)) minimum = minimum_of(coding, scales, g, half);
        #pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            floats exact = to_floats(_mm512_load_si512(sums[half] + i * LANES));
            whole[i] = add_product(whole[i], multiply_floats(exact, all_floats(float_at(marks + (SCALE * rows + i) * 4))), by);
            if (has_minimum(coding)) whole[i] = add_minimum(coding, whole[i], total_of(coding, half, rows, i, marks), minimum);
        }
    }
}

/* A panel times a tile: sums [rows][LANES]. */
ALWAYS void add_panel(const int coding, const int rows, int64_t format, const uint8_t *panel, int64_t inputs,
                      const uint8_t *x, float *sums) {
    const int64_t step = SCALE_BYTES[CODINGS[coding].scaling], bytes_of = 64 * CODINGS[coding].bits;
    const int64_t size = SHAPES[coding].size ? SHAPES[coding].size : block_size(format);
    const int64_t groups = inputs / GROUP, each = size / GROUP, of_tile = tile_group_bytes(rows);
    const struct meaning of = meaning_of(coding, format);
    const uint8_t *codes = panel, *scales = panel, *marks = x + GROUP * rows;
    struct under_way ring;
    floats whole[TILE_ROWS];
    if (halves_of(coding) == 2)
        for (int i = 0; i < RING; i++) memset(ring.codes[i] + HALF, 0, HALF);
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t g = -2 * LAG, in_block = 0, unpacked = 0; g < groups; g++) {
        int64_t then = g + 2 * LAG, soon = g + LAG;
        MEMORY_SETTLED();
        if (then < groups) {
            if (unpacked == 0) fetch(codes, step, rows), codes += step;
            fetch(codes, bytes_of, rows), unpack(coding, &of, codes, ring.codes[then % RING]);
            codes += bytes_of, unpacked = unpacked + 1 == each ? 0 : unpacked + 1;
        }
        if (soon >= 0 && soon < groups)
            multiply_group(coding, x + soon * of_tile, ring.codes[soon % RING], ring.sums[soon % RING]);
        if (g < 0) continue;
        finish_group(coding, &of, rows, ring.sums[g % RING], marks + g * of_tile, scales, in_block, whole);
        if (++in_block == each) in_block = 0, scales += step + each * bytes_of;
    }
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

typedef void panel_function(int64_t format, const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums);

#define ONE(coding, rows)                                                                                              \
    static void coding##_##rows(int64_t format, const uint8_t *panel, int64_t inputs, const uint8_t *x, float *sums) { \
        add_panel(coding, rows, format, panel, inputs, x, sums);                                                       \
    }
#define FUNCTIONS_OF(coding, bits, wide, scaling) ONE(coding, 12) ONE(coding, 16)
CODINGS_OF(FUNCTIONS_OF)

#define TABLE(coding, bits, wide, scaling) [coding] = {coding##_12, coding##_16},
static panel_function *const FUNCTIONS[FORMATS][2] = {CODINGS_OF(TABLE)};

void tile_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const uint8_t *x, float *sums) {
    FUNCTIONS[coding_of(format)][rows / 4 - 3](format, panel, inputs, x, sums);
}

void begin_tiles(int64_t tokens) { shape_tiles((int)tokens, GROUP / 4, GROUP); }
void end_tiles(void) { _tile_release(); }
#else /* `tiling_of` makes no tiles in rows */
void tile_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const uint8_t *x, float *sums) {
    (void)format, (void)panel, (void)inputs, (void)rows, (void)x, (void)sums;
}
void begin_tiles(int64_t tokens) { (void)tokens; }
void end_tiles(void) {}
#endif
