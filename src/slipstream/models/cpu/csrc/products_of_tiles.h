/* Products of a block of 12-bit weights by tiles of AMX, for compressed.c: 16 tokens, 16 outputs and 32 inputs by one
 * instruction. A row of a tile is a token; a single row takes as long as 16. The products of 32 inputs are summed in
 * order, those of even and of odd inputs apart, and both sums are added to the token's. */
#include "tiles.h"

enum {
    CHUNK = 256,    /* tokens whose sums are accumulated while a panel is read */
    STEP = 8        /* quads of an instruction */
};

/* Expands the quads from `first` on. Weights that the last instruction lacks are 0. */
static void expand_rest(const struct compressed_block *next, int first) {
    expand(next, first);
    if (next->quads % STEP) memset(next->to + next->quads * 128, 0, (size_t)(STEP - next->quads % STEP) * 256);
}

/* Adds the products of one or two tiles of tokens. `next` is expanded in between, so that neither has to wait. */
ALWAYS void add(const int tiles, const struct tokens *of, const uint16_t *block, int quads,
                const struct compressed_block *next) {
    float *sums = of->sums, *more = sums + TILE_ROWS * PANEL;
    const long row = PANEL * sizeof *sums, pair = 128, rows = least(of->stride, TILE_ROWS);
    if (of->begin) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, sums, row); _tile_loadd(1, sums + 16, row);
        if (tiles == 2) { _tile_loadd(2, more, row); _tile_loadd(3, more + 16, row); }
    }
    const input *inputs = of->inputs, *others = inputs + TILE_ROWS * BLOCK;
    for (int quad = 0; quad < quads; quad += STEP, block += STEP * 128, inputs += rows * 32, others += rows * 32) {
        _tile_loadd(6, block, pair); _tile_loadd(7, block + 32, pair);
        _tile_loadd(4, inputs, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, others, TILE_BYTES);
            _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = quad; next && i < quad + STEP && i < next->quads; i++) expand_quad(next, i);
    }
    _tile_stored(0, sums, row); _tile_stored(1, sums + 16, row);
    if (tiles == 2) { _tile_stored(2, more, row); _tile_stored(3, more + 16, row); }
}

/* Adds the products of `rows` tokens and expands the next block. */
static void add_block(const struct tokens *of, int64_t rows, const uint16_t *block, int quads,
                      const struct compressed_block *next) {
    MEMORY_SETTLED();
    if (rows <= TILE_ROWS) add(1, of, block, quads, next);
    else add(2, of, block, quads, next);
    for (int64_t done = 2 * TILE_ROWS; done < rows; done += 2 * TILE_ROWS) {
        struct tokens some = {of->inputs + done * BLOCK, of->sums + done * PANEL, of->stride, of->begin};
        if (rows - done <= TILE_ROWS) add(1, &some, block, quads, NULL);
        else add(2, &some, block, quads, NULL);
    }
    expand_rest(next, (quads + STEP - 1) / STEP * STEP);
    MEMORY_SETTLED();
}

/* For how many tokens inputs are laid out: whole tiles if there are several. */
static int64_t places(int64_t tokens) {
    return tokens <= TILE_ROWS ? tokens : (tokens + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
}

/* Lays out a token in its tile, its 32 inputs next to those of the next token. Inputs that the last instruction lacks
 * are 0. */
static void place_inputs(const uint16_t *x, int64_t count, int64_t token, int64_t tokens, input *unit) {
    int64_t rows = least(tokens, TILE_ROWS);
    input *to = unit + token / rows * rows * BLOCK + token % rows * 32;
    for (int64_t i = 0; i < count; i += 32, to += rows * 32) {
        int64_t there = least(32, count - i);
        memcpy(to, x + i, there * sizeof *x);
        memset(to + there, 0, (32 - there) * sizeof *x);
    }
}

static void begin_products(int64_t tokens) { shape_tiles((int)least(tokens, TILE_ROWS), 2 * STEP, TILE_BYTES); }
static void end_products(void) { _tile_release(); }
