/* Products of a layer's panels with tiles of activations, by a team: threads take chunks of panels one by one. */
#include "../bfloat16.h"
#include "blocks.h"

enum { FEW = 4 /* panels of a chunk, at least, if there are several tiles: a tile is read from memory for all of them */ };

/* A product that a team computes. rounded, bias: results and bias in bfloat16; NULL if `out` and the bias of the layer
 * are used instead. */
struct product {
    const struct block_linear *w;
    struct numbers x;
    int64_t tokens;
    struct tiling tiling;
    float *out;
    uint16_t *rounded;
    const uint16_t *bias;
    uint8_t *space;
    struct shares shares;
};

/* A part of a layer, in chunks. before: chunks of earlier parts; chunks: its own, each of `panels` panels of `bytes`
 * bytes; first: the output of the layer with which the part begins. */
struct chunked_part {
    const struct block_part *part;
    int64_t before, chunks, panels, bytes, first;
};

/* Successive panels of a part that a thread takes together; none if `of.part` is NULL. */
struct chunk {
    struct chunked_part of;
    int64_t panel, end;
};

/* The chunks that a thread takes, see `take_item`. count: of all parts together; at: the part of the last one taken. */
struct chunks {
    const struct member *me;
    struct product *of;
    int64_t count, tried;
    struct chunked_part at;
};

/* A chunk is HANDED_OUT bytes, and where there are several tiles at least FEW panels, so that a tile read from memory
 * serves several of them; never more than an eighth of a thread's share of the part. */
static struct chunked_part in_chunks(const struct chunks *in, const struct block_part *part, int64_t before, int64_t first) {
    const struct product *of = in->of;
    int64_t bytes = panel_bytes(part->format, of->w->inputs), count = round_up(part->outputs, LANES) / LANES;
    int64_t panels = HANDED_OUT / bytes, fair = count / (8 * in->me->count);
    if (of->tokens > of->tiling.tokens && panels < FEW) panels = FEW;
    if (panels > fair) panels = fair;
    if (panels < 1) panels = 1;
    return (struct chunked_part){part, before, round_up(count, panels) / panels, panels, bytes, first};
}

static struct chunked_part part_behind(const struct chunks *in) {
    return in_chunks(in, in->at.part + 1, in->at.before + in->at.chunks, in->at.first + in->at.part->outputs);
}

static struct chunks chunks_of(const struct member *me, struct product *of) {
    struct chunks all = {me, of, 0, 0, {0}};
    all.at = in_chunks(&all, of->w->parts, 0, 0);
    while (all.at.part + 1 < of->w->parts + of->w->num_parts) all.at = part_behind(&all);
    all.count = all.at.before + all.at.chunks;
    return all;
}

static struct chunk take_chunk(struct chunks *in) {
    struct product *of = in->of;
    int64_t number = take_item(in->me, &of->shares, in->count, &in->tried);
    if (number == in->count) return (struct chunk){{0}, 0, 0};
    if (number < in->at.before) in->at = in_chunks(in, of->w->parts, 0, 0);
    while (number >= in->at.before + in->at.chunks) in->at = part_behind(in);
    int64_t panel = (number - in->at.before) * in->at.panels;
    return (struct chunk){in->at, panel, least(round_up(in->at.part->outputs, LANES) / LANES, panel + in->at.panels)};
}

/* Stores a token's sums of a panel: `there` outputs of the layer from `first` on. */
static void store(const struct product *of, int64_t token, int64_t first, int64_t there, const float *sums) {
    const struct block_linear *w = of->w;
    if (of->out) {
        float *to = of->out + token * w->outputs + first;
        for (int64_t o = 0; o < there; o++) to[o] = w->bias ? sums[o] + w->bias[first + o] : sums[o];
        return;
    }
    uint16_t bias[LANES] = {0}, rounded[LANES];
    if (of->bias) memcpy(bias, of->bias + first, (size_t)there * sizeof *bias);
    store_bf16(rounded, add_floats(load_floats(sums), load_bf16(bias)));
    memcpy(of->rounded + token * w->outputs + first, rounded, (size_t)there * sizeof *rounded);
}

void panel_sums(int64_t format, const uint8_t *panel, int64_t inputs, int64_t rows, const struct tiling *of,
                const uint8_t *x, const float *plain, float *sums) {
    if (has_numbers(format))
        for (int64_t i = 0; i < rows; i += TILE)
            number_sums(format, panel, inputs, least(TILE, rows - i), plain + i * inputs, sums + i * LANES);
    else if (of->in_rows) tile_sums(format, panel, inputs, of->tokens, x, sums);
    else block_sums(format, panel, inputs, rows, of->planes, x, sums);
}

/* A panel of a chunk times the tile that begins with token `done`. */
static void multiply_panel(const struct product *of, const struct chunk *in, int64_t panel, int64_t done) {
    float sums[2 * TILE * LANES];
    const struct block_linear *w = of->w;
    const struct block_part *part = in->of.part;
    const uint8_t *data = part->data + panel * in->of.bytes, *x = of->space + bytes_before(&of->tiling, w->inputs, done);
    const float *plain = of->x.floats ? of->x.floats + done * w->inputs : NULL;
    int64_t rows = least(of->tiling.tokens, of->tokens - done), there = least(LANES, part->outputs - panel * LANES);
    panel_sums(part->format, data, w->inputs, rows, &of->tiling, x, plain, sums);
    scale_sums(part->scale, rows, sums);
    for (int64_t i = 0; i < rows; i++) store(of, done + i, in->of.first + panel * LANES, there, sums + i * LANES);
}

static void multiply_in_team(const struct member *me, void *given) {
    struct product *of = given;
    int64_t tile = of->tiling.tokens;
    int has_codes = 0;
    for (int64_t i = 0; i < of->w->num_parts; i++) has_codes |= !has_numbers(of->w->parts[i].format);
    if (has_codes) quantize(me, of->x, of->w->inputs, of->tokens, &of->tiling, of->space);
    if (of->tiling.in_rows) begin_tiles(tile);
    struct chunks chunks = chunks_of(me, of);
    for (struct chunk chunk; (chunk = take_chunk(&chunks)).of.part;)
        for (int64_t done = 0; done < of->tokens; done += tile) /* a tile stays in the cache for all panels */
            for (int64_t panel = chunk.panel; panel < chunk.end; panel++) multiply_panel(of, &chunk, panel, done);
    if (of->tiling.in_rows) end_tiles();
}

void multiply_blocks(const struct block_linear *w, const float *x, int64_t tokens, int64_t planes, float *out,
                     uint8_t *space) {
    struct product product = {w, {x, NULL}, tokens, tiling_of(tokens, planes), out, NULL, NULL, space, {{0}}};
    in_team(multiply_in_team, &product);
}

/* Activations have one plane; results are rounded once. */
void multiply_blocks_bf16(const struct linear *w, const uint16_t *x, int64_t tokens, uint16_t *out, uint8_t *space) {
    struct block_part part = {w->format, w->outputs, w->data, NULL};
    struct block_linear layer = {w->inputs, w->outputs, 1, &part, NULL};
    struct product product = {&layer, {NULL, x}, tokens, tiling_of(tokens, 1), NULL, out, w->bias, space, {{0}}};
    if (tokens) in_team(multiply_in_team, &product);
}
