/* Products with bfloat16 weights that take 12 bits each, without loss.
 *
 * The 8 exponent bits of a weight carry little: in a panel of 32 outputs nearly all exponents are among 15 successive
 * ones. A weight is stored as a byte of sign and mantissa and a 4-bit code that counts down from the largest of these
 * exponents. The few weights with other exponents are exceptions, stored whole and restored when a block is expanded. A
 * forward of few tokens waits for weights from memory, so reading a quarter less saves a quarter of the time.
 * A sum runs over the inputs in order, whatever the number of tokens, so a token gets the same bits alone and with
 * others. compression.c describes the layout of the weights.
 */
#include "kernels.h"

enum { AHEAD = 6144 /* bytes that are prefetched ahead, where that is done in one step */ };

/* A block to expand, a quad at a time. */
struct compressed_block {
    const uint8_t *data, *table;
    int quads;
    uint16_t *to; /* [pairs][2][16 outputs x 2 inputs] */
};

ALWAYS void expand_quad(const struct compressed_block *of, int quad) {
    const uint8_t *data = of->data + quad * QUAD;
    for (int line = 0; line < QUAD; line += 64) {
        if (IN_TWO_STEPS) fetch_in_two_steps(data + line);
        else prefetch_later(data + line + AHEAD);
    }
    bytes codes = load_bytes(data + 128);
    join_exponents(load_bytes(data), low_bits(codes), of->table, of->to + quad * 128);
    join_exponents(load_bytes(data + 64), high_bits(codes), of->table, of->to + quad * 128 + 64);
}

static void expand(const struct compressed_block *of, int first) {
    for (int quad = first; quad < of->quads; quad++) expand_quad(of, quad);
}

/* Inputs as the products take them. */
#if defined(__AVX512BF16__)
typedef uint16_t input;
#else
typedef float input;
#endif

/* Some tokens' inputs, laid out by `place_inputs` for `stride` tokens, and their sums [rows][PANEL]. begin: whether the
 * sums begin, at 0, with this block. */
struct tokens {
    const input *inputs;
    float *sums;
    int64_t stride;
    int begin;
};

#if defined(__AMX_BF16__)
#include "products_of_tiles.h"
#else
#if defined(__AVX512BF16__)
#include "products_of_pairs.h"
#else
#include "products_of_floats.h"
#endif
/* A block's products with all tokens, as many at a time as have sums in registers. The file included above defines
 * `add`, ROWS, BESIDE_MOST, BESIDE_MANY, EXPANDED, EVERY_BESIDE and EVERY_ROWS. */
#define AND_EXPAND(rows) case rows: add(rows, of, block, quads, next); break
static void add_and_expand(int rows, const struct tokens *of, const uint16_t *block, int quads,
                           const struct compressed_block *next) {
    switch (rows) { EVERY_BESIDE(AND_EXPAND) }
    expand(next, EXPANDED(rows, quads));
}

#define ONLY(rows) case rows: add(rows, of, block, quads, NULL); break
static void add_only(int rows, const struct tokens *of, const uint16_t *block, int quads) {
    switch (rows) { EVERY_ROWS(ONLY) }
}

/* Adds the products of `rows` tokens and expands the next block. */
static void add_block(const struct tokens *of, int64_t rows, const uint16_t *block, int quads,
                      const struct compressed_block *next) {
    int64_t beside = rows <= BESIDE_MOST ? rows : BESIDE_MANY;
    add_and_expand((int)beside, of, block, quads, next);
    for (int64_t row = beside; row < rows; row += ROWS) {
        struct tokens some = {of->inputs + row * BLOCK, of->sums + row * PANEL, of->stride, of->begin};
        add_only((int)least(ROWS, rows - row), &some, block, quads);
    }
}

/* For how many tokens inputs are laid out, and what a thread does around a product. */
static int64_t places(int64_t tokens) { return tokens; }
static void place_inputs(const uint16_t *x, int64_t count, int64_t token, int64_t tokens, input *unit) {
    (void)tokens;
    copy_inputs(x, count, unit + token * BLOCK);
}
static void expand_rest(const struct compressed_block *next, int first) { expand(next, first); }
static void begin_products(int64_t tokens) { (void)tokens; }
static void end_products(void) {}
#endif

static int64_t blocks_of(const struct linear *w) { return (w->inputs + BLOCK - 1) / BLOCK; }

/* Block number `unit`, counted panel by panel, to be expanded to `to`. */
static struct compressed_block compressed_block(const struct linear *w, int64_t unit, uint16_t *to) {
    int64_t panel = unit / blocks_of(w), input = unit % blocks_of(w) * BLOCK;
    const uint8_t *data = w->data + (panel * w->inputs + input) / 4 * QUAD;
    return (struct compressed_block){data, w->tables + panel * 32, (int)least(BLOCK, w->inputs - input) / 4, to};
}

static void restore_exceptions(const struct linear *w, int64_t unit, uint16_t *block) {
    for (int e = w->offsets[unit]; e < w->offsets[unit + 1]; e++)
        block[w->exceptions[e] >> 16] = (uint16_t)w->exceptions[e];
}

/* A product that a team computes. inputs: [blocks][places][BLOCK]. */
struct product {
    const struct linear *w;
    const uint16_t *x;
    int64_t tokens;
    uint16_t *out;
    input *inputs;
    struct shares shares;
};

/* Lays out a thread's share of the tokens' inputs, block by block. */
static void gather(const struct member *me, const struct product *of) {
    int64_t blocks = blocks_of(of->w), inputs = of->w->inputs, end = share_of(me, blocks * of->tokens, me->number + 1);
    for (int64_t i = share_of(me, blocks * of->tokens, me->number); i < end; i++) {
        int64_t unit = i / of->tokens, token = i % of->tokens, first = unit * BLOCK;
        input *to = of->inputs + unit * places(of->tokens) * BLOCK;
        place_inputs(of->x + token * inputs + first, least(BLOCK, inputs - first), token, of->tokens, to);
    }
}

/* Multiplies the panels that a thread takes. While a block is multiplied, the one that follows is expanded: the next
 * one of the panel, its first one again for further tokens, or the first one of the next panel. */
static void multiply_panels(const struct product *of, struct panels *panels) {
    _Alignas(64) uint16_t block[2][BLOCK * PANEL];
    _Alignas(64) float sums[CHUNK * PANEL];
    const struct linear *w = of->w;
    int64_t blocks = blocks_of(w), stride = places(of->tokens), panel = next_panel(panels);
    if (panel == panels->count) return;
    struct compressed_block next = compressed_block(w, panel * blocks, block[0]);
    expand_rest(&next, 0);
    restore_exceptions(w, panel * blocks, block[0]);
    for (int64_t then; panel < panels->count; panel = then) {
        then = next_panel(panels);
        for (int64_t done = 0; done < of->tokens; done += CHUNK) {
            int64_t rows = least(CHUNK, of->tokens - done), again = done + CHUNK < of->tokens ? panel : then;
            for (int64_t unit = 0; unit < blocks; unit++) {
                uint16_t *now = next.to;
                int quads = next.quads;
                int64_t following = unit + 1 < blocks ? panel * blocks + unit + 1 : again * blocks;
                if (again == panels->count) following = least(following, (panel + 1) * blocks - 1); /* none follows */
                next = compressed_block(w, following, now == block[0] ? block[1] : block[0]);
                struct tokens some = {of->inputs + (unit * stride + done) * BLOCK, sums, stride, unit == 0};
                add_block(&some, rows, now, quads, &next);
                restore_exceptions(w, following, next.to);
            }
            store_with_bias(w, sums, rows, panel, of->out + done * w->outputs);
        }
    }
}

static void multiply_in_team(const struct member *me, void *given) {
    struct product *of = given;
    struct panels panels = panels_of(me, &of->shares, of->w);
    gather(me, of);
    wait_for_team(me);
    begin_products(of->tokens);
    multiply_panels(of, &panels);
    end_products();
}

void multiply(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint16_t *space) {
    if (w->format != TWELVE_BITS) {
        multiply_blocks_bf16(w, x, tokens, out, (uint8_t *)space);
        return;
    }
    struct product product = {w, x, tokens, out, (input *)space, {{0}}};
    if (tokens) in_team(multiply_in_team, &product);
}
