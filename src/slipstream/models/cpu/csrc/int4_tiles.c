/* Products of weights rounded to 4 bits by the tiles of AMX: 16 tokens, 16 outputs and 32 inputs by one instruction; int4.c
 * says how they are laid out and what is computed.
 *
 * While a group of 32 inputs is scaled, the next one is multiplied, and the codes of the one after that become bfloat16
 * numbers, by a table; all meet in the first level of the caches.
 */
#include "kernels.h"

#ifdef __AMX_BF16__
#include "tiles.h"

enum {
    LAG = 2,       /* groups between expanding, multiplying and scaling */
    RING = 8,      /* groups under way, at most; a power of 2 */
    AHEAD = 2560   /* bytes prefetched */
};

/* weights: 32 inputs of 16 outputs in pairs; sums [tokens][16 outputs]. */
struct under_way {
    _Alignas(64) uint16_t weights[RING][GROUP * 16];
    _Alignas(64) float sums[RING][TILE_ROWS * 16];
};

/* A product that a team computes. rows: places of a tile of tokens. inputs: tiles [groups][rows][32]; totals: of each tile
 * [groups][rows] sums of these inputs. */
struct product {
    const struct linear *w;
    const uint16_t *x;
    int64_t tokens, rows;
    uint16_t *out, *inputs;
    float *totals;
    struct shares shares;
};

/* The codes of one side of a panel's group, bit `shift` on of each word, as bfloat16 numbers. */
ALWAYS void expand_codes(const uint8_t *record, const int shift, uint16_t *to) {
    static const uint16_t NUMBERS[32] = { /* of a code and the lowest bit of the one above it */
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, /* 0 to 7 */
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, /* 8 to 15 */
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    };
    const __m512i numbers = _mm512_loadu_si512(NUMBERS);
    #pragma GCC unroll 8
    for (int quad = 0; quad < GROUP / 4; quad++, to += 64) {
        __m512i codes = _mm512_loadu_si512(record + quad * 64);
        __m512i first = shift ? _mm512_srli_epi16(codes, (unsigned)shift) : codes;
        __m512i second = _mm512_srli_epi16(codes, (unsigned)shift + 8);
        _mm512_store_si512(to, _mm512_permutexvar_epi16(first, numbers));
        _mm512_store_si512(to + 32, _mm512_permutexvar_epi16(second, numbers));
    }
}

/* One side of a panel for a tile: sums [rows][PANEL]. */
ALWAYS void add_side(const int rows, const int side, const uint8_t *data, int64_t groups, const uint16_t *x,
                     const float *totals, float *sums) {
    struct under_way ring;
    floats sum[TILE_ROWS];
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) sum[i] = all_floats(0);
    for (int64_t g = -2 * LAG; g < groups; g++) {
        int64_t then = g + 2 * LAG, soon = g + LAG;
        MEMORY_SETTLED();
        if (then < groups) {
            const uint8_t *record = data + then * RECORD;
            for (int line = 0; line < RECORD && side == 0; line += 64) prefetch_later(record + AHEAD + line);
            expand_codes(record, 4 * side, ring.weights[then % RING]);
        }
        if (soon >= 0 && soon < groups) {
            _tile_loadd(4, x + soon * rows * GROUP, TILE_BYTES);
            _tile_loadd(6, ring.weights[soon % RING], TILE_BYTES);
            _tile_zero(0);
            _tile_dpbf16ps(0, 4, 6);
            _tile_stored(0, ring.sums[soon % RING], 64);
        }
        if (g < 0) continue;
        const uint16_t *factors = (const uint16_t *)(data + g * RECORD + 512) + side * 16;
        floats scale = load_bf16(factors), offset = load_bf16(factors + 32);
        #pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sum[i] = add_product(sum[i], load_floats(ring.sums[g % RING] + i * 16), scale);
            sum[i] = add_product(sum[i], all_floats(totals[g * rows + i]), offset);
        }
    }
    #pragma GCC unroll 16
    for (int i = 0; i < rows; i++) store_floats(sums + i * PANEL + side * 16, sum[i]);
}

#define ROWS_CASE(rows)                                              \
    case rows:                                                       \
        add_side(rows, 0, data, groups, x, totals, sums);            \
        add_side(rows, 1, data, groups, x, totals, sums);            \
        break

static void multiply_panel(const struct product *of, int64_t panel) {
    _Alignas(64) float sums[TILE_ROWS * PANEL];
    int64_t groups = of->w->inputs / GROUP;
    const uint8_t *data = of->w->data + panel * groups * RECORD;
    for (int64_t done = 0; done < of->tokens; done += of->rows) {
        const uint16_t *x = of->inputs + done * of->w->inputs;
        const float *totals = of->totals + done * groups;
        switch (of->rows) { ROWS_CASE(4); ROWS_CASE(8); ROWS_CASE(12); ROWS_CASE(16); }
        store_with_bias(of->w, sums, least(of->rows, of->tokens - done), panel, of->out + done * of->w->outputs);
    }
}

/* Brings the inputs of a thread's share of groups to their places. What stands at places of no token counts for nothing. */
static void gather(const struct member *me, const struct product *of) {
    int64_t groups = of->w->inputs / GROUP, end = share_of(me, groups, me->number + 1);
    for (int64_t g = share_of(me, groups, me->number); g < end; g++)
        for (int64_t token = 0; token < of->tokens; token++) {
            const uint16_t *from = of->x + token * of->w->inputs + g * GROUP;
            int64_t tile = token / of->rows * of->rows * groups, place = tile + g * of->rows + token % of->rows;
            memcpy(of->inputs + place * GROUP, from, GROUP * sizeof *from);
            of->totals[place] = sum_of(add_floats(load_bf16(from), load_bf16(from + 16)));
        }
    wait_for_team(me);
}

static void multiply_in_team(const struct member *me, void *given) {
    struct product *of = given;
    struct panels panels = panels_of(me, &of->shares, of->w);
    gather(me, of);
    shape_tiles((int)of->rows, GROUP / 2, TILE_BYTES);
    for (int64_t panel; (panel = next_panel(&panels)) < panels.count;) multiply_panel(of, panel);
    _tile_release();
}

/* As `multiply_int4`, by tiles. */
void multiply_int4_by_tiles(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint16_t *space) {
    int64_t tiles = (tokens + TILE_ROWS - 1) / TILE_ROWS, rows = ((tokens + tiles - 1) / tiles + 3) / 4 * 4;
    float *totals = (float *)space;
    uint16_t *inputs = space + tiles * rows * (w->inputs / GROUP) * 2;
    struct product product = {w, x, tokens, rows, out, inputs, totals, {{0}}};
    in_team(multiply_in_team, &product);
}
#endif
