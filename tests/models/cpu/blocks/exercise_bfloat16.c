/* As exercise.c, for the kernels of bfloat16 weights. The checksums are the same with all instruction sets that do not
 * multiply bfloat16 numbers themselves. */
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tile_permission.h"

void choose_codes(const uint16_t *weights, int64_t outputs, int64_t inputs, uint8_t *tables, int32_t *counts);
void compress_weights(const uint16_t *weights, int64_t outputs, int64_t inputs, const uint8_t *tables,
                      const int32_t *offsets, uint8_t *data, uint32_t *exceptions);
int64_t panel_bytes(int64_t format, int64_t inputs);
int32_t pack_panels(int64_t format, const uint8_t *rows, int64_t count, int64_t inputs, uint8_t *to, int shared);
void whole_layer(const struct layer *layer, const struct kv_cache *memory, const uint16_t *hidden, int64_t tokens,
                 const uint16_t *cosines, const uint16_t *sines, uint16_t *out, uint16_t *space);
int64_t layer_scratch(const struct layer *layer, int64_t tokens, int64_t length);

static uint32_t state = 7;
static uint8_t next_byte(void) { return (uint8_t)((state = state * 1664525 + 1013904223) >> 24); }
static int wrong = 0;

static float float_of(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t *halves(int64_t count, float scale) {
    uint16_t *made = malloc(count * sizeof *made);
    for (int64_t i = 0; i < count; i++) {
        float x = scale * ((float)next_byte() - 127) / 127;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        made[i] = (uint16_t)(bits >> 16);
    }
    return made;
}

/* Prints the FNV-1a checksum of some numbers. */
static void print_checksum(const char *of, int64_t size, int64_t count, const uint16_t *data, int64_t numbers) {
    uint64_t sum = 14695981039346656037u;
    for (int64_t i = 0; i < numbers; i++) {
        sum = (sum ^ data[i]) * 1099511628211u;
        wrong += !isfinite(float_of(data[i]));
    }
    printf("%s %d %d %016llx\n", of, (int)size, (int)count, (unsigned long long)sum);
}

static struct linear compressed(int64_t outputs, int64_t inputs, const uint16_t *bias) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, blocks = (inputs + BLOCK - 1) / BLOCK;
    uint16_t *weights = halves(outputs * inputs, 0.25f);
    weights[3] = 0x7e00, weights[outputs * inputs - 1] = 0x0001;
    uint8_t *tables = malloc(panels * 32), *data = malloc(panels * inputs / 4 * QUAD);
    int32_t *offsets = malloc((panels * blocks + 1) * sizeof *offsets);
    choose_codes(weights, outputs, inputs, tables, offsets);
    int32_t all = 0;
    for (int64_t i = 0; i <= panels * blocks; i++) {
        int32_t own = i < panels * blocks ? offsets[i] : 0;
        offsets[i] = all, all += own;
    }
    uint32_t *exceptions = malloc(all * sizeof *exceptions);
    compress_weights(weights, outputs, inputs, tables, offsets, data, exceptions);
    weights[3] = 0, free(weights);
    for (int64_t i = 0; i < all; i++) /* a huge weight would hide the others */
        if ((exceptions[i] & 0xffff) == 0x7e00) exceptions[i] = (exceptions[i] & 0xffff0000) | 0x3f80;
    return (struct linear){TWELVE_BITS, inputs, outputs, data, tables, offsets, exceptions, bias};
}

/* A layer in 4 or 8 bits, with small scales. */
static struct linear quantized(int64_t bits, int64_t outputs, int64_t inputs, const uint16_t *bias) {
    int64_t head = bits == 4 ? 4 : 2, format = bits == 4 ? INT4 + KINDS * GROUP : Q8_0, groups = outputs * inputs / GROUP;
    int64_t size = (outputs + LANES - 1) / LANES * panel_bytes(format, inputs);
    uint8_t *rows = calloc(groups, head + GROUP), *data = aligned_alloc(64, size);
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *group = rows + g * (head + GROUP);
        group[0] = next_byte(), group[1] = 0x24;
        if (bits == 4) group[2] = next_byte() & 7;
        for (int i = 0; i < GROUP; i++) group[head + i] = bits == 4 ? next_byte() & 15 : next_byte();
    }
    memset(data, 0, size);
    pack_panels(format, rows, outputs, inputs, data, 1);
    free(rows);
    return (struct linear){format, inputs, outputs, data, NULL, NULL, NULL, bias};
}

static void free_linear(const struct linear *w) {
    free((void *)w->data), free((void *)w->tables), free((void *)w->offsets), free((void *)w->exceptions);
}

static void exercise_linear(const struct linear *w, int64_t most) {
    for (int64_t tokens = 1; tokens <= most; tokens += tokens < 20 ? 1 : 119) {
        int64_t padded = (w->inputs + BLOCK - 1) / BLOCK * BLOCK * SPACE;
        uint16_t *x = halves(tokens * w->inputs, 3), *out = malloc(tokens * w->outputs * 2), *alone = malloc(w->outputs * 2);
        uint16_t *space = malloc(tokens * padded * 2), *one = malloc(padded * 2);
        multiply(w, x, tokens, out, space);
        multiply(w, x + (tokens - 1) * w->inputs, 1, alone, one);
        wrong += memcmp(alone, out + (tokens - 1) * w->outputs, w->outputs * 2) != 0;
        print_checksum("product", w->format, tokens, out, tokens * w->outputs);
        free(x), free(out), free(alone), free(space), free(one);
    }
}

/* Tokens of two slots, the later ones from position `start` on. Where there is a window, heads have sinks, and a second
 * embedding enters the layer; a layer that attends to the same keys follows. */
static void exercise_layer(int64_t size, int64_t window, int64_t start) {
    int64_t hidden = 96, inner = 64, heads = 4, shared = 2, tokens = 11, length = start + 24;
    uint16_t *of_norm = halves(256, 1);
    float weights[256];
    for (int i = 0; i < 256; i++) weights[i] = float_of(of_norm[i]);
    struct norm is = {weights, NULL, 1e-6f, 1, 0}, none = {NULL, NULL, 0, 0, 0}, late = {weights, NULL, 1e-6f, 0, 0};
    struct layer layer = {
        compressed((heads + 2 * shared) * size, hidden, NULL), compressed(hidden, heads * size, NULL),
        compressed(2 * inner, hidden, NULL), quantized(4, hidden, inner, NULL),
        .before_attention = is, late, is, none, late, is, .sinks = window ? weights : NULL, .hidden = hidden, .inner = inner,
        .heads = heads, .key_heads = shared, .size = size, .rotated = size, .slope = 1, .cubic = 0.05f, .residual = 1,
        .scale = 1, .is_gated = 1, .input_gate = compressed(160, hidden, NULL),
        .input_projection = quantized(8, hidden, 160, NULL), .after_input = is, .input_size = window ? 160 : 0,
    };
    struct linear qkv = layer.qkv;
    int64_t slots[11], positions[11];
    for (int64_t t = 0; t < tokens; t++) slots[t] = t < 6 ? 0 : 1, positions[t] = t < 6 ? start + t : start / 2 + t - 6;
    uint16_t *keys = halves(2 * shared * length * size, 1), *values = halves(2 * shared * length * size, 1);
    struct kv_cache m = {keys, values, length, window, 0.125f, slots, positions, positions, NULL, NULL, NULL};
    uint16_t *inputs = halves(tokens * 192, 1);
    m.inputs = inputs, m.input_step = 192;
    uint16_t *x = halves(tokens * hidden, 1), *out = malloc(tokens * hidden * 2), *angles = halves(tokens * size, 1);
    uint16_t *space = malloc(layer_scratch(&layer, tokens, length) * 2);
    whole_layer(&layer, &m, x, tokens, angles, angles, out, space);
    print_checksum("layer", size, window, out, tokens * hidden);
    layer.reuses_keys = 1, layer.qkv = compressed(heads * size, hidden, NULL), layer.keys = none;
    whole_layer(&layer, &m, out, tokens, angles, angles, out, space);
    print_checksum("next layer", size, window, out, tokens * hidden);
    free(of_norm), free(keys), free(values), free(x), free(out), free(angles), free(space), free(inputs);
    free_linear(&qkv), free_linear(&layer.input_gate), free_linear(&layer.input_projection);
    free_linear(&layer.qkv), free_linear(&layer.out), free_linear(&layer.gate_up), free_linear(&layer.down);
}

int main(void) {
    ask_for_tiles();
    uint16_t *bias = halves(96, 1);
    int64_t sizes[][2] = {{1, 4}, {37, 132}, {96, 300}};
    for (int i = 0; i < 3; i++) {
        struct linear w = compressed(sizes[i][0], sizes[i][1], i == 1 ? bias : NULL);
        exercise_linear(&w, i == 1 ? 260 : 19);
        free_linear(&w);
    }
    for (int64_t bits = 4; bits <= 8; bits += 4) {
        struct linear few = quantized(bits, 41, 96, bias);
        exercise_linear(&few, 260);
        free_linear(&few);
    }
    for (int64_t size = 64; size <= 256; size *= 2)
        for (int64_t window = 0; window <= 7; window += 7) exercise_layer(size, window, 40);
    for (int64_t window = 0; window <= 700; window += 700) exercise_layer(64, window, 1020);
    free(bias);
    if (wrong) printf("%d results are wrong\n", wrong);
    return wrong > 0;
}
