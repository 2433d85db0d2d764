/* A panel of codes times a tile of up to 16 quantised tokens, by the tiles of AMX: 16 tokens, 16 outputs and 32 inputs
 * by one instruction. The integers are those of panel_sums.c and grouped.c, and so are the steps in floating point: a
 * token gets the same bits.
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

/* The number to subtract from codes to make them signed. */
ALWAYS int code_of_zero(const int format) {
    if (format == Q8_0) return 128;
    if (format == Q6_K) return SMALLEST_CODE;
    return format == Q5_0 ? 16 : format == Q4_0 || format == INT4 || format == INT4_MINIMA ? 8 : 0;
}

ALWAYS void unpack(const int format, const uint8_t *codes, int8_t *to) {
    const int kind = format == INT4 || format == INT4_MINIMA ? Q4_0 : format, second = format == Q6_K ? 2 * HALF : HALF;
    bytes zero = _mm512_set1_epi8((char)code_of_zero(format));
    #pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        bytes one, other;
        load_codes(kind, codes, v, &one, &other);
        if (code_of_zero(format)) one = _mm512_sub_epi8(one, zero), other = _mm512_sub_epi8(other, zero);
        _mm512_store_si512(to + v * 64, one), _mm512_store_si512(to + second + v * 64, other);
    }
}

/* Integer sums of a group; for Q6_K, of each half. x: a tile's 32 inputs. */
ALWAYS void multiply_group(const int format, const uint8_t *x, const int8_t *codes, int32_t (*sums)[TILE_ROWS * LANES]) {
    _tile_loadd(4, x, GROUP);
    _tile_loadd(6, codes, TILE_BYTES);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, sums[0], 4 * LANES);
    if (format != Q6_K) return;
    _tile_loadd(7, codes + HALF, TILE_BYTES);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(1, sums[1], 4 * LANES);
}

/* The scales of a panel's outputs, `second` for the second half of Q6_K, and the minima of formats that have them. */
struct scales {
    floats first, second, minimum;
};

/* from: the block's scales; g: which group of the block. */
ALWAYS struct scales scales_at(const int format, const uint8_t *from, int64_t g) {
    struct scales by = {all_floats(0), all_floats(0), all_floats(0)};
    if (format == INT4_MINIMA) {
        by.first = load_floats((const float *)from), by.minimum = load_floats((const float *)from + LANES);
    } else if (format == INT4) {
        by.first = load_halves(from), by.minimum = multiply_floats(by.first, load_signed(from + 2 * LANES));
    } else {
        by.first = scale_of(format, from, g, 0);
        if (format == Q6_K) by.second = scale_of(format, from, g, 1);
        if (has_minimum(format)) by.minimum = minimum_of(format, from, g);
    }
    return by;
}

ALWAYS void scale_sums(const int rows, const int32_t *sums, const uint8_t *marks, floats by, floats whole[TILE_ROWS]) {
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        floats exact = to_floats(_mm512_load_si512(sums + i * LANES));
        whole[i] = add_product(whole[i], multiply_floats(exact, all_floats(float_at(marks + (SCALE * rows + i) * 4))), by);
    }
}

/* Scales a group's sums and adds them to those of the groups before. */
ALWAYS void finish_group(const int format, const int rows, int32_t (*sums)[TILE_ROWS * LANES], const uint8_t *marks,
                         struct scales by, floats whole[TILE_ROWS]) {
    scale_sums(rows, sums[0], marks, by.first, whole);
    if (format == Q6_K) scale_sums(rows, sums[1], marks, by.second, whole);
    if (format < FORMATS && !has_minimum(format)) return;
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        whole[i] = add_minimum(format, whole[i], all_floats(float_at(marks + (TOTAL * rows + i) * 4)), by.minimum);
}

/* A panel times a tile: sums [rows][LANES]. block: inputs of a block; step: bytes of its scales. */
ALWAYS void add_panel(const int format, const int rows, const uint8_t *panel, int64_t inputs, int64_t block,
                      int64_t step, const uint8_t *x, float *sums) {
    const int64_t groups = inputs / GROUP, bytes_of = format < FORMATS ? SHAPES[format].codes : HALF;
    const int64_t each = block / GROUP, of_tile = tile_group_bytes(rows);
    const uint8_t *codes = panel, *scales = panel, *marks = x + GROUP * rows;
    struct under_way ring;
    floats whole[TILE_ROWS];
    if (format == Q6_K)
        for (int i = 0; i < RING; i++) memset(ring.codes[i] + HALF, 0, HALF);
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) whole[i] = all_floats(0);
    for (int64_t g = -2 * LAG, in_block = 0, unpacked = 0; g < groups; g++) {
        int64_t then = g + 2 * LAG, soon = g + LAG;
        MEMORY_SETTLED();
        if (then < groups) {
            if (unpacked == 0) fetch(codes, step, rows), codes += step;
            fetch(codes, bytes_of, rows), unpack(format, codes, ring.codes[then % RING]);
            codes += bytes_of, unpacked = unpacked + 1 == each ? 0 : unpacked + 1;
        }
        if (soon >= 0 && soon < groups)
            multiply_group(format, x + soon * of_tile, ring.codes[soon % RING], ring.sums[soon % RING]);
        if (g < 0) continue;
        finish_group(format, rows, ring.sums[g % RING], marks + g * of_tile, scales_at(format, scales, in_block), whole);
        if (++in_block == each) in_block = 0, scales += step + each * bytes_of;
    }
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) store_floats(sums + i * LANES, whole[i]);
}

typedef void panel_function(const uint8_t *panel, int64_t inputs, int64_t block, int64_t step, const uint8_t *x,
                            float *sums);

#define ONE(format, rows)                                                                                    \
    static void format##_##rows(const uint8_t *panel, int64_t inputs, int64_t block, int64_t step,            \
                                const uint8_t *x, float *sums) {                                              \
        add_panel(format, rows, panel, inputs, block, step, x, sums);                                         \
    }
#define ALL_ROWS(format) ONE(format, 12) ONE(format, 16)
ALL_ROWS(Q4_0) ALL_ROWS(Q4_1) ALL_ROWS(Q5_0) ALL_ROWS(Q5_1) ALL_ROWS(Q8_0) ALL_ROWS(Q4_K) ALL_ROWS(Q5_K) ALL_ROWS(Q6_K)
ALL_ROWS(INT4) ALL_ROWS(INT4_MINIMA)

#define TABLE(format) [format] = {format##_12, format##_16}
static panel_function *const FUNCTIONS[][2] = {
    TABLE(Q4_0), TABLE(Q4_1), TABLE(Q5_0), TABLE(Q5_1), TABLE(Q8_0),
    TABLE(Q4_K), TABLE(Q5_K), TABLE(Q6_K), TABLE(INT4), TABLE(INT4_MINIMA),
};

void tile_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const uint8_t *x, float *sums) {
    int64_t kind = is_grouped(format) ? format % KINDS : format;
    int64_t block = is_grouped(format) ? format / KINDS : SHAPES[format].size;
    int64_t step = is_grouped(format) ? grouped_scale_bytes(kind) : SHAPES[format].scales;
    FUNCTIONS[kind][rows / 4 - 3](panel, inputs, block, step, x, sums);
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
