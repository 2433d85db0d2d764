/* A block's products with all tokens, some tokens at a time whose sums are in registers, for compressed.c. `add`,
 * ROWS, BESIDE_MOST, BESIDE_MANY, EXPANDED, EVERY_BESIDE and EVERY_ROWS are defined before. */

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

/* Tokens that have places in the inputs, and what a thread does around a product. */
static int64_t places(int64_t tokens) { return tokens; }
static void place_inputs(const uint16_t *x, int64_t count, int64_t token, int64_t tokens, input *unit) {
    (void)tokens;
    copy_inputs(x, count, unit + token * BLOCK);
}
static void expand_rest(const struct compressed_block *next, int first) { expand(next, first); }
static void begin_products(int64_t tokens) { (void)tokens; }
static void end_products(void) {}
