/* Calls every kernel on buffers of exactly the size it needs, for a build with sanitizers, and prints a checksum of every
 * result, which must be the same with all instruction sets. Exits with 0 if all results are right. */
#include "blocks.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tile_permission.h"

int32_t pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared);
int64_t pack_pieces(int32_t file, const struct file_piece *pieces, int64_t count, _Atomic int64_t *next, int32_t drops);
void unpack_rows(const struct block_part *part, int64_t inputs, const int64_t *outputs, int64_t count, float *to);
void whole_layer(const struct float_layer *layer, const struct kv_cache *memory, const float *hidden,
                       int64_t tokens, const float *cosines, const float *sines, float *out, float *space);
int64_t layer_scratch(const struct float_layer *layer, int64_t tokens, int64_t length);

static uint32_t state = 7;
static uint8_t next_byte(void) { return (uint8_t)((state = state * 1664525 + 1013904223) >> 24); }

static float *numbers(int64_t count, float scale) {
    float *made = malloc(count * sizeof *made);
    for (int64_t i = 0; i < count; i++) made[i] = scale * ((float)next_byte() - 127) / 127;
    return made;
}

/* The same as float16. */
static uint16_t *halves(int64_t count, float scale) {
    float *wide = numbers(count, scale);
    uint16_t *made = malloc(count * sizeof *made);
    for (int64_t i = 0; i < count; i += LANES) store_halves(made + i, load_floats(wide + i));
    free(wide);
    return made;
}

/* Packs rows into a part, and frees them. */
static struct block_part packed(int64_t format, uint8_t *rows, int64_t outputs, int64_t inputs) {
    int64_t panels = round_up(outputs, LANES) / LANES * panel_bytes(format, inputs);
    uint8_t *data = aligned_alloc(64, panels);
    memset(data, 0, panels);
    pack_panels(format, rows, outputs, inputs, data, 1);
    free(rows);
    return (struct block_part){format, outputs, data, NULL};
}

/* Rows of random blocks, whose float16 numbers have small exponents. */
static uint8_t *rows_of(int64_t format, int64_t outputs, int64_t inputs) {
    const struct shape *of = &SHAPES[format];
    int64_t size = outputs * inputs / of->size * of->bytes, blocks = size / of->bytes;
    uint8_t *rows = malloc(size);
    for (int64_t i = 0; i < size; i++) rows[i] = next_byte();
    int place = format == Q6_K ? 208 : format == Q3_K ? 108 : format == Q2_K ? 80 : format == TQ2_0 ? 64 : format == TQ1_0 ? 52 : 0;
    int has_minimum = format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K || format == Q2_K;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *block = rows + b * of->bytes;
        if (format == MXFP4) block[0] = 120 + block[0] % 8;
        else if (format != NVFP4) block[place + 1] = 0x24;
        if (has_minimum) block[place + 3] = 0x20;
    }
    return rows;
}

static struct block_part part_of(int64_t format, int64_t outputs, int64_t inputs) {
    return packed(format, rows_of(format, outputs, inputs), outputs, inputs);
}

/* A random part of groups, or of numbers: codes of 4 bits, and numbers with small exponents. */
static struct block_part grouped_part(int64_t kind, int64_t group, int64_t outputs, int64_t inputs) {
    int64_t head = SHAPES[kind].bytes, format = has_numbers(kind) ? kind : kind + KINDS * group;
    int64_t size = outputs * row_bytes(format, inputs);
    uint8_t *rows = malloc(size);
    for (int64_t i = 0; i < size; i++) rows[i] = i % 2 ? 0x24 : 0;
    if (!has_numbers(kind))
        for (int64_t b = 0; b < size; b += head + group)
            for (int64_t j = 0; j < group; j++) rows[b + head + j] = next_byte() & 15;
    return packed(format, rows, outputs, inputs);
}

static int wrong = 0;

/* Prints the FNV-1a checksum of some bytes. */
static void print_checksum(const char *of, int64_t format, int64_t planes, int64_t count, const void *data, int64_t size) {
    uint64_t sum = 14695981039346656037u;
    for (int64_t i = 0; i < size; i++) sum = (sum ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    printf("%s %d %d %d %016llx\n", of, (int)format, (int)planes, (int)count, (unsigned long long)sum);
}

static void exercise_linear(const struct block_linear *w, int64_t planes) {
    for (int64_t tokens = 1; tokens <= 19; tokens++) {
        float *x = numbers(tokens * w->inputs, 3), *out = malloc(tokens * w->outputs * sizeof *out);
        float *alone = malloc(w->outputs * sizeof *alone);
        uint8_t *space = malloc(activation_bytes(w->inputs, tokens, planes));
        multiply_blocks(w, x, tokens, planes, out, space);
        uint8_t *one = malloc(activation_bytes(w->inputs, 1, planes));
        multiply_blocks(w, x + (tokens - 1) * w->inputs, 1, planes, alone, one);
        if (memcmp(alone, out + (tokens - 1) * w->outputs, w->outputs * sizeof *out)) wrong++;
        print_checksum("product", w->parts->format, planes, tokens, out, tokens * w->outputs * sizeof *out);
        free(x), free(out), free(alone), free(space), free(one);
    }
}

static void exercise_rows(const struct block_part *part, int64_t inputs) {
    int64_t outputs[] = {0, part->outputs - 1};
    float *to = malloc(2 * inputs * sizeof *to);
    unpack_rows(part, inputs, outputs, 2, to);
    print_checksum("rows", part->format, 0, 2, to, 2 * inputs * sizeof *to);
    free(to);
}

/* Panels of rows read from an unaligned place of a file equal those of rows in memory; a file that is too short and
 * numbers or scales that are not finite are noticed. */
static void exercise_file(int64_t format, int64_t outputs, int64_t inputs) {
    const struct shape *of = &SHAPES[format];
    int64_t row = inputs / of->size * of->bytes, panel = panel_bytes(format, inputs);
    int64_t size = round_up(outputs, LANES) / LANES * panel, start = 37;
    uint8_t *rows = rows_of(format, outputs, inputs), *expected = aligned_alloc(64, size), *got = aligned_alloc(64, size);
    for (int64_t i = 0; has_numbers(format) && i < outputs * row; i++) rows[i] &= 0x3F;
    memset(expected, 0, size), memset(got, 0, size);
    if (!pack_panels(format, rows, outputs, inputs, expected, 0)) wrong++;
    FILE *file = tmpfile();
    fwrite(rows, 1, start, file), fwrite(rows, 1, outputs * row, file), fflush(file);
    struct file_piece pieces[] = {
        {format, 32, inputs, start, got},
        {format, outputs - 32, inputs, start + 32 * row, got + 2 * panel},
        {format, 1, inputs, start + outputs * row, got},
    };
    _Atomic int64_t next = 0;
    if (pack_pieces(fileno(file), pieces, 2, &next, 1) != -1 || memcmp(expected, got, size)) wrong++;
    next = 2;
    if (pack_pieces(fileno(file), pieces, 3, &next, 0) != 2) wrong++;
    memset(rows + 32 * row, 0xFF, of->bytes), next = 0;
    fseek(file, start, SEEK_SET), fwrite(rows, 1, outputs * row, file), fflush(file);
    int64_t failed = pack_pieces(fileno(file), pieces, 2, &next, 0);
    if (failed != (format == NVFP4 ? -1 : 2 + 1)) wrong++; /* whose scales are all finite */
    if (pack_panels(format, rows, outputs, inputs, expected, 0) != (format == NVFP4)) wrong++;
    fclose(file), free(rows), free(expected), free(got);
}

static struct block_linear linear_of(struct block_part *part, int64_t format, int64_t outputs, int64_t inputs) {
    *part = part_of(format, outputs, inputs);
    return (struct block_linear){inputs, outputs, 1, part, NULL};
}

/* Tokens of two slots, the later ones from position `start` on. Where there is a window, heads have sinks, and a second
 * embedding enters the layer; a layer that attends to the same keys follows. */
static void exercise_layer(int64_t size, int64_t window, int64_t planes, int64_t start, const struct experts *experts) {
    int64_t hidden = 256, inner = 64, heads = 4, shared = 2, tokens = 11, length = start + 24;
    struct block_part parts[7];
    float *norm = numbers(hidden, 1);
    struct norm is = {norm, NULL, 1e-6f, 0, 0}, none = {NULL, NULL, 0, 0, 0};
    struct float_layer layer = {
        linear_of(parts, Q4_K, (heads + 2 * shared) * size, hidden), linear_of(parts + 1, Q8_0, hidden, heads * size),
        linear_of(parts + 2, Q6_K, 2 * inner, hidden), linear_of(parts + 3, Q5_1, hidden, inner),
        .before_attention = is, none, is, is, is, none, .sinks = window ? norm : NULL, .experts = experts, .planes = planes,
        .before_router = experts ? is : none, .before_experts = experts ? is : none, .after_experts = is, .after_dense = is,
        .hidden = hidden, .inner = inner, .heads = heads,
        .key_heads = shared, .size = size, .rotated = size, .slope = 1, .residual = 1, .scale = 1, .is_gated = 1,
        .input_gate = linear_of(parts + 4, Q4_0, 96, hidden), .input_projection = linear_of(parts + 5, Q8_0, hidden, 96),
        .after_input = is, .input_size = window ? 96 : 0,
    };
    int64_t slots[11], positions[11];
    for (int64_t t = 0; t < tokens; t++) slots[t] = t < 6 ? 0 : 1, positions[t] = t < 6 ? start + t : start / 2 + t - 6;
    uint16_t *keys = halves(2 * shared * length * size, 1), *values = halves(2 * shared * length * size, 1);
    struct kv_cache m = {keys, values, length, window, 0.125f, slots, positions, positions, NULL, NULL, NULL};
    float *inputs = numbers(tokens * 128, 1);
    m.inputs = inputs, m.input_step = 128;
    float *x = numbers(tokens * hidden, 1), *out = malloc(tokens * hidden * sizeof *out);
    float *angles = numbers(tokens * size, 1), *space = malloc(layer_scratch(&layer, tokens, length) * sizeof *space);
    whole_layer(&layer, &m, x, tokens, angles, angles, out, space);
    for (int64_t i = 0; i < tokens * hidden; i++) wrong += !isfinite(out[i]);
    print_checksum("layer", size, planes, window, out, tokens * hidden * sizeof *out);
    print_checksum("keys", size, planes, window, keys, 2 * shared * length * size * sizeof *keys);
    print_checksum("values", size, planes, window, values, 2 * shared * length * size * sizeof *values);
    layer.reuses_keys = 1, layer.qkv = linear_of(parts + 6, Q4_0, heads * size, hidden);
    layer.keys = layer.values = none;
    whole_layer(&layer, &m, out, tokens, angles, angles, out, space);
    print_checksum("next layer", size, planes, window, out, tokens * hidden * sizeof *out);
    print_checksum("same keys", size, planes, window, keys, 2 * shared * length * size * sizeof *keys);
    free(norm), free(keys), free(values), free(x), free(out), free(angles), free(space), free(inputs);
    for (int i = 0; i < 7; i++) free((void *)parts[i].data);
}

/* Latent attention of 8 heads: one token of a slot, which threads share, or ten of another. */
static void exercise_latent(int64_t planes, int64_t start, int64_t tokens) {
    enum { HEADS = 8, RANK = 64, PLAIN = 32, ROTATED = 32, VALUES = 96, HIDDEN = 256, QUERIES = 128 };
    struct block_part parts[5], of_heads[2 * HEADS];
    const uint8_t *data[2 * HEADS];
    for (int64_t h = 0; h < 2 * HEADS; h++) {
        of_heads[h] = h < HEADS ? part_of(Q8_0, RANK, PLAIN) : part_of(Q5_1, VALUES, RANK);
        data[h] = of_heads[h].data;
    }
    struct latent latent = {RANK, PLAIN, VALUES, planes, {Q8_0, data, NULL, NULL}, {Q5_1, data + HEADS, NULL, NULL}};
    int64_t length = start + 24, slots[10], positions[10];
    for (int64_t t = 0; t < tokens; t++) slots[t] = tokens > 1, positions[t] = start + t;
    float *norm = numbers(HIDDEN, 1);
    struct norm is = {norm, NULL, 1e-6f, 0, 0};
    struct float_layer layer = {
        linear_of(parts, Q4_K, QUERIES + RANK + ROTATED, HIDDEN), linear_of(parts + 1, Q4_0, HIDDEN, HEADS * VALUES),
        linear_of(parts + 2, Q6_K, 2 * 64, HIDDEN), linear_of(parts + 3, Q5_1, HIDDEN, 64),
        .before_attention = is, .queries = is, .keys = is, .before_feed_forward = is, .latent = &latent,
        .queries_up = linear_of(parts + 4, Q4_1, HEADS * (PLAIN + ROTATED), QUERIES), .planes = planes, .hidden = HIDDEN,
        .inner = 64, .heads = HEADS, .key_heads = 1, .size = RANK + ROTATED, .rotated = ROTATED, .slope = 1, .residual = 1,
        .scale = 1, .is_gated = 1, .rotates_pairs = 1, .parts_pairs = tokens > 1,
    };
    uint16_t *keys = halves(2 * length * RANK, 1), *values = halves(2 * length * ROTATED, 1);
    struct kv_cache m = {keys, values, length, 0, 0.125f, slots, positions, positions, NULL, NULL, NULL};
    float *x = numbers(tokens * HIDDEN, 1), *out = malloc(tokens * HIDDEN * sizeof *out);
    float *angles = numbers(tokens * ROTATED, 1), *space = malloc(layer_scratch(&layer, tokens, length) * sizeof *space);
    whole_layer(&layer, &m, x, tokens, angles, angles, out, space);
    for (int64_t i = 0; i < tokens * HIDDEN; i++) wrong += !isfinite(out[i]);
    print_checksum("latent", tokens, planes, start, out, tokens * HIDDEN * sizeof *out);
    print_checksum("latents", tokens, planes, start, keys, 2 * length * RANK * sizeof *keys);
    print_checksum("rotated", tokens, planes, start, values, 2 * length * ROTATED * sizeof *values);
    free(norm), free(keys), free(values), free(x), free(out), free(angles), free(space);
    for (int i = 0; i < 5; i++) free((void *)parts[i].data);
    for (int i = 0; i < 2 * HEADS; i++) free((void *)of_heads[i].data);
}

/* Rounding to float16: of every float16 number, of the number between it and the next one and of that one's
 * neighbors, and of numbers beyond the largest. */
static void exercise_halves(void) {
    for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000)
        for (uint32_t half = 0; half < 0x7c00; half++) {
            float lower = half_to_float((uint16_t)(sign | half)), upper = half_to_float((uint16_t)(sign | (half + 1)));
            int is_largest = half == 0x7bff;
            float between = is_largest ? lower : (lower + upper) / 2, of[LANES] = {
                lower, between, nextafterf(between, lower), nextafterf(between, is_largest ? INFINITY : upper),
                is_largest ? lower * 1.0003f : lower, is_largest ? lower * 1e30f : lower, INFINITY, NAN,
            };
            uint32_t below = sign | half, above = is_largest ? below : below + 1;
            uint16_t expected[] = {below, half % 2 ? above : below, below, above, below, below}, rounded[LANES];
            store_halves(rounded, load_floats(of));
            if (!half && sign) expected[0] = expected[2] = expected[4] = expected[5] = 0, expected[1] = 0; /* no -0 */
            for (int i = 0; i < 6; i++) wrong += rounded[i] != expected[i] && !(half == 0 && (rounded[i] & 0x7fff) == 0);
            wrong += (rounded[6] & 0x7fff) <= 0x7c00 || (rounded[7] & 0x7fff) <= 0x7c00;
        }
}

/* A set of experts whose panels `parts` [3 * count] owns. */
static struct expert_set set_of(struct block_part *parts, const uint8_t **data, int64_t count, const int64_t *formats,
                                int64_t inner, int64_t hidden, const float *bias) {
    struct expert_matrix matrices[3];
    for (int64_t m = 0; m < 3; m++) {
        int64_t outputs = m < 2 ? inner : hidden, inputs = m < 2 ? hidden : inner, format = formats[m];
        for (int64_t e = 0; e < count; e++) {
            struct block_part *part = parts + m * count + e;
            *part = format < INT4 ? part_of(format, outputs, inputs)
                                  : grouped_part(format % KINDS, format / KINDS, outputs, inputs);
            data[m * count + e] = part->data;
        }
        matrices[m] = (struct expert_matrix){format, data + m * count, bias, NULL};
    }
    return (struct expert_set){inner, matrices[0], matrices[1], matrices[2]};
}

/* Six experts of which a token uses three, and a shared one, at widths that fill tiles of every kind. */
static void exercise_experts(const int64_t *formats, int64_t planes, int is_sigmoid) {
    enum { COUNT = 6, USED = 3, HIDDEN = 256, MOST_TOKENS = 75 };
    struct block_part parts[3 * COUNT], of_shared[3], router = grouped_part(F32, 0, COUNT, HIDDEN);
    const uint8_t *data[3 * COUNT], *shared_data[3];
    float *x = numbers(MOST_TOKENS * HIDDEN, 3), *bias = numbers(COUNT * HIDDEN, 0.1f), *gate = numbers(HIDDEN, 0.1f);
    float *weights = numbers(COUNT * HIDDEN, 0.1f), alone[HIDDEN];
    for (int64_t i = 0; i < HIDDEN; i++)
        for (int64_t e = 0; e < COUNT; e++) memcpy((uint8_t *)router.data + (i * LANES + e) * 4, weights + e * HIDDEN + i, 4);
    int64_t reads = 0;
    struct experts of = {
        .hidden = HIDDEN, .count = COUNT, .used = USED, .planes = planes, .router = router,
        .choice_bias = is_sigmoid ? bias : NULL, .shared_gate = gate,
        .routed = set_of(parts, data, COUNT, formats, 256, HIDDEN, bias),
        .shared = set_of(of_shared, shared_data, 1, formats + 1, 512, HIDDEN, NULL),
        .is_sigmoid = is_sigmoid, .normalizes = 1, .factor = 1.5f, .slope = 1, .limit = INFINITY, .reads = &reads,
    };
    for (int64_t tokens = 1; tokens <= MOST_TOKENS; tokens += tokens < 12 ? 1 : 21) {
        float *out = malloc(tokens * HIDDEN * sizeof *out);
        int32_t *chosen = malloc(tokens * USED * sizeof *chosen), last[USED];
        uint8_t *space = aligned_alloc(64, experts_scratch(&of, tokens)), *one = aligned_alloc(64, experts_scratch(&of, 1));
        multiply_experts(&of, x, NULL, tokens, chosen, out, space);
        multiply_experts(&of, x + (tokens - 1) * HIDDEN, NULL, 1, last, alone, one);
        if (memcmp(alone, out + (tokens - 1) * HIDDEN, sizeof alone)) wrong++;
        if (memcmp(last, chosen + (tokens - 1) * USED, sizeof last)) wrong++;
        for (int64_t i = 0; i < tokens * HIDDEN; i++) wrong += !isfinite(out[i]);
        print_checksum("experts", formats[0], planes, tokens, out, tokens * HIDDEN * sizeof *out);
        print_checksum("chosen", formats[0], planes, tokens, chosen, tokens * USED * sizeof *chosen);
        free(out), free(chosen), free(space), free(one);
    }
    exercise_layer(64, 7, planes, 40, &of);
    print_checksum("reads", formats[0], planes, reads, &reads, sizeof reads);
    for (int i = 0; i < 3 * COUNT; i++) free((void *)parts[i].data);
    for (int i = 0; i < 3; i++) free((void *)of_shared[i].data);
    free((void *)router.data), free(x), free(bias), free(gate), free(weights);
}

/* Two layers whose experts are packed when they are used, in memory for one layer's and filled with what is no panel:
 * the bits of the same layers in memory. If the file is cut, all results are NaN. */
static void exercise_store(const int64_t *formats) {
    enum { LAYERS = 2, COUNT = 5, USED = 2, HIDDEN = 256, TOKENS = 11 };
    FILE *file = tmpfile();
    const float scales[COUNT] = {1, 0.5f, 3, 0.7f, 1};
    int64_t sizes[3], slot_bytes = 0, at = 13, reads = 0;
    for (int m = 0; m < 3; m++) sizes[m] = HIDDEN / LANES * panel_bytes(formats[m], HIDDEN), slot_bytes += sizes[m];
    struct block_part parts[LAYERS][3 * COUNT], router = grouped_part(F32, 0, COUNT, HIDDEN);
    const uint8_t *in_memory[LAYERS][3 * COUNT], *packed_later[LAYERS][3 * COUNT] = {{NULL}};
    struct expert_slot slots[COUNT] = {{NULL, 0, 0}};
    uint8_t *memory = aligned_alloc(64, COUNT * slot_bytes);
    memset(memory, 0xA5, COUNT * slot_bytes);
    struct expert_store store = {memory, slots, slot_bytes, COUNT, 0, 0, 0};
    struct stored_experts stored[LAYERS];
    struct experts layers[LAYERS], later[LAYERS];
    int64_t place_of[LAYERS][COUNT];
    float *weights = numbers(COUNT * HIDDEN, 1);
    for (int64_t i = 0; i < HIDDEN; i++)
        for (int64_t e = 0; e < COUNT; e++) memcpy((uint8_t *)router.data + (i * LANES + e) * 4, weights + e * HIDDEN + i, 4);
    fseek(file, at, SEEK_SET);
    for (int l = 0; l < LAYERS; l++) {
        struct expert_rows rows[3];
        struct expert_matrix matrices[3], absent[3];
        for (int m = 0; m < 3; m++) {
            int64_t bytes = HIDDEN * row_bytes(formats[m], HIDDEN);
            rows[m] = (struct expert_rows){fileno(file), at, bytes};
            for (int e = 0; e < COUNT; e++, at += bytes) {
                uint8_t *random = rows_of(formats[m], HIDDEN, HIDDEN);
                fwrite(random, 1, bytes, file);
                parts[l][m * COUNT + e] = packed(formats[m], random, HIDDEN, HIDDEN);
                in_memory[l][m * COUNT + e] = parts[l][m * COUNT + e].data;
            }
            matrices[m] = (struct expert_matrix){formats[m], in_memory[l] + m * COUNT, NULL, scales};
            absent[m] = (struct expert_matrix){formats[m], packed_later[l] + m * COUNT, NULL, scales};
        }
        for (int e = 0; e < COUNT; e++) place_of[l][e] = -1;
        stored[l] = (struct stored_experts){&store, place_of[l], rows[0], rows[1], rows[2]};
        layers[l] = (struct experts){
            .hidden = HIDDEN, .count = COUNT, .used = USED, .planes = 1, .router = router,
            .routed = {HIDDEN, matrices[0], matrices[1], matrices[2]}, .normalizes = 1, .factor = 1, .slope = 1,
            .limit = INFINITY, .reads = &reads,
        };
        later[l] = layers[l], later[l].stored = stored + l;
        later[l].routed = (struct expert_set){HIDDEN, absent[0], absent[1], absent[2]};
    }
    fflush(file);
    float *x = numbers(TOKENS * HIDDEN, 3), *out = malloc(TOKENS * HIDDEN * sizeof *out), *expected = malloc(TOKENS * HIDDEN * sizeof *out);
    int32_t chosen[TOKENS * USED];
    for (int64_t turn = 0; turn < 12; turn++) {
        int64_t tokens = turn % 3 == 2 ? TOKENS : 1 + turn % 2, l = turn % LAYERS;
        const float *from = x + (TOKENS - tokens) * HIDDEN;
        uint8_t *space = aligned_alloc(64, experts_scratch(layers + l, tokens)), *more = aligned_alloc(64, experts_scratch(later + l, tokens));
        multiply_experts(layers + l, from, NULL, tokens, chosen, expected, space);
        multiply_experts(later + l, from, NULL, tokens, chosen, out, more);
        wrong += memcmp(out, expected, tokens * HIDDEN * sizeof *out) != 0;
        free(space), free(more);
    }
    wrong += store.packed <= COUNT || store.failed;
    wrong += ftruncate(fileno(file), 1000) != 0;
    for (int l = 0; l < LAYERS; l++) {
        uint8_t *space = aligned_alloc(64, experts_scratch(later + l, TOKENS));
        multiply_experts(later + l, x, NULL, TOKENS, chosen, out, space);
        for (int64_t i = 0; i < TOKENS * HIDDEN && store.failed; i++) wrong += !isnan(out[i]);
        free(space);
    }
    wrong += !store.failed;
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < 3 * COUNT; i++) free((void *)parts[l][i].data);
    free((void *)router.data), free(memory), free(weights), free(x), free(out), free(expected), fclose(file);
}

/* Random bytes, and runs of ones, as blocks. */
static struct block_part hostile_part(int64_t format, int64_t outputs, int64_t inputs) {
    int64_t size = outputs * row_bytes(format, inputs);
    uint8_t *rows = malloc(size);
    for (int64_t i = 0; i < size; i++) rows[i] = i % 97 < 20 ? 0xFF : next_byte();
    return packed(format, rows, outputs, inputs);
}

static float *hostile_numbers(int64_t count) {
    const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, -0.0f, 65504};
    float *made = numbers(count, 3);
    for (int64_t i = 0; i < count; i += 61) made[i] = odd[i / 61 % 8];
    return made;
}

/* Blocks and activations as a damaged file gives them: no result is wrong, but none may reach beyond its memory. */
static void exercise_hostile(int64_t format, int64_t planes) {
    enum { COUNT = 4, USED = 2, SIZE = 256, MOST_TOKENS = 19 };
    struct block_part part = hostile_part(format, 37, SIZE), parts[3 * COUNT], router = hostile_part(F32, COUNT, SIZE);
    struct block_linear w = {SIZE, 37, 1, &part, NULL};
    const uint8_t *data[3 * COUNT];
    for (int i = 0; i < 3 * COUNT; i++) parts[i] = hostile_part(format, SIZE, SIZE), data[i] = parts[i].data;
    int64_t reads = 0, outputs[] = {0, 36};
    float *bias = hostile_numbers(COUNT * SIZE), *x = hostile_numbers(MOST_TOKENS * SIZE), *out = malloc(MOST_TOKENS * SIZE * sizeof *out);
    struct experts of = {
        .hidden = SIZE, .count = COUNT, .used = USED, .planes = planes, .router = router, .router_bias = bias,
        .routed = {SIZE, {format, data, bias}, {format, data + COUNT, NULL}, {format, data + 2 * COUNT, bias}},
        .is_sigmoid = format % 2, .normalizes = planes % 2, .factor = 1.5f, .slope = 1, .limit = 7, .reads = &reads,
    };
    unpack_rows(&part, SIZE, outputs, 2, out);
    for (int64_t tokens = 1; tokens <= MOST_TOKENS; tokens += 3) {
        uint8_t *space = malloc(activation_bytes(SIZE, tokens, planes)), *more = aligned_alloc(64, experts_scratch(&of, tokens));
        int32_t chosen[MOST_TOKENS * USED];
        multiply_blocks(&w, x, tokens, planes, out, space);
        multiply_experts(&of, x, NULL, tokens, chosen, out, more);
        for (int64_t i = 0; i < tokens * USED; i++) wrong += chosen[i] < 0 || chosen[i] >= COUNT || (i % USED && chosen[i] <= chosen[i - 1]);
        free(space), free(more);
    }
    for (int i = 0; i < 3 * COUNT; i++) free((void *)parts[i].data);
    free((void *)part.data), free((void *)router.data), free(bias), free(x), free(out);
}

int main(void) {
    ask_for_tiles();
    exercise_halves();
    float *bias = numbers(64, 1);
    for (int64_t format = 0; format < INT4; format++)
        for (int64_t planes = 1; planes <= 2; planes++) {
            struct block_part parts[2] = {part_of(format, 37, 512), part_of((format + 3) % INT4, 16, 512)};
            struct block_linear w = {512, 53, 2, parts, planes == 1 ? bias : NULL};
            exercise_linear(&w, planes);
            exercise_rows(parts, 512);
            if (SHAPES[format].size == GROUP) {
                struct block_part odd = part_of(format, 3, 96);
                struct block_linear narrow = {96, 3, 1, &odd, NULL};
                exercise_linear(&narrow, planes);
                free((void *)odd.data);
            }
            free((void *)parts[0].data), free((void *)parts[1].data);
        }
    for (int64_t format = 0; format < FORMATS; format++)
        if (SHAPES[format].size) exercise_file(format, 45, 512);
    for (int64_t kind = INT4; kind < FORMATS; kind++)
        for (int64_t group = 32; group <= 160; group += 128) {
            struct block_part parts[2] = {grouped_part(kind, group, 37, 160), part_of(Q4_0, 16, 160)};
            struct block_linear w = {160, 53, 2, parts, bias};
            for (int64_t planes = 1; planes <= 2; planes++) exercise_linear(&w, planes);
            exercise_rows(parts, 160);
            free((void *)parts[0].data), free((void *)parts[1].data);
        }
    for (int64_t size = 32; size <= 256; size *= 2)
        for (int64_t window = 0; window <= 7; window += 7) exercise_layer(size, window, 1 + (size > 64), 40, NULL);
    for (int64_t window = 0; window <= 700; window += 700) exercise_layer(32, window, 1, 1020, NULL);
    for (int64_t planes = 1; planes <= 2; planes++)
        for (int64_t tokens = 1; tokens <= 10; tokens += 9) exercise_latent(planes, 1020, tokens);
    const int64_t codes = INT4 + KINDS * GROUP;
    const int64_t mixed[][4] = {
        {Q4_K, Q4_K, Q6_K, Q8_0}, {Q5_0, BF16, Q4_1, Q5_K}, {BF16, BF16, BF16, BF16}, {codes, Q8_0, BF16, codes},
        {Q2_K, TQ2_0, Q2_K, Q3_K}, {NVFP4, TQ1_0, MXFP4, IQ4_XS},
    };
    for (int i = 0; i < 6; i++)
        for (int64_t planes = 1; planes <= 2; planes++) exercise_experts(mixed[i], planes, i % 2);
    for (int i = 0; i < 6; i++)
        if (mixed[i][0] < INT4 && mixed[i][1] < INT4 && mixed[i][2] < INT4) exercise_store(mixed[i]);
    for (int64_t format = 0; format < FORMATS; format++)
        for (int64_t planes = 1; planes <= 2; planes++)
            exercise_hostile(SHAPES[format].size ? format : format + KINDS * GROUP, planes);
    free(bias);
    if (wrong) printf("%d results are wrong\n", wrong);
    return wrong > 0;
}
