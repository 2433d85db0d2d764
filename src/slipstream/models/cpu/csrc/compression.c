/* Compresses bfloat16 weights to 12 bits each, for compressed.c.
 *
 * data [panels][inputs / 4][192] bytes: the signs and mantissas of two pairs of inputs, 64 bytes each, and 64 bytes of
 * their 4-bit codes, those of the first pair in the low half-bytes and of the second in the high ones. Byte
 * L * 16 + z * 8 + o * 2 + i of a pair is output z * 16 + L * 4 + o and input i: two unpacking instructions then give
 * operands of vdpbf16ps, 16 outputs by 2 inputs. tables [panels][32]: each code's exponent; bytes 0 to 15 are the upper
 * 7 bits, 16 to 31 the lowest one. exceptions: place in the expanded block << 16 | weight, block by block. offsets
 * [panels * blocks + 1]: where the exceptions of each block begin.
 */
#include "kernels.h"

#include <string.h>

enum {
    CODES = 15,  /* exponents that have a code; one more code stands for 0 */
    TALLIES = 4, /* counters of every exponent, so that neighbors of equal exponent do not wait for each other */
    PAIRS = 16   /* pairs of inputs that are compressed together */
};

static int exponent(uint16_t weight) { return weight >> 7 & 0xff; }

/* How often each exponent occurs among `count` weights. */
static void tally(const uint16_t *weights, int64_t count, uint32_t seen[TALLIES][256]) {
    int64_t i = 0;
    for (; i + TALLIES <= count; i += TALLIES)
        for (int j = 0; j < TALLIES; j++) seen[j][exponent(weights[i + j])]++;
    for (; i < count; i++) seen[0][exponent(weights[i])]++;
}

/* The largest of the CODES successive exponents that cover most weights. */
static int choose_highest(const uint32_t seen[TALLIES][256]) {
    int64_t total[256], most = -1;
    int highest = CODES;
    for (int i = 0; i < 256; i++) total[i] = (int64_t)seen[0][i] + seen[1][i] + seen[2][i] + seen[3][i];
    for (int top = CODES; top < 256; top++) {
        int64_t reached = 0;
        for (int code = 0; code < CODES; code++) reached += total[top - code];
        if (reached > most) most = reached, highest = top;
    }
    return highest;
}

static int is_exception(uint16_t weight, int highest) {
    uint16_t below = (uint16_t)(highest - exponent(weight));
    return (exponent(weight) != 0) & (below >= CODES);
}

struct matrix {
    const uint16_t *weights;
    int64_t outputs, inputs, blocks;
    uint8_t *tables;
    int32_t *counts;
    const int32_t *offsets;
    uint8_t *data;
    uint32_t *exceptions;
};

static void choose_of_panel(int64_t panel, void *given) {
    const struct matrix *m = given;
    uint32_t seen[TALLIES][256] = {0};
    int64_t first = panel * PANEL, last = least(m->outputs, first + PANEL);
    tally(m->weights + first * m->inputs, (last - first) * m->inputs, seen);
    int highest = choose_highest((const uint32_t(*)[256])seen);
    for (int code = 0; code <= CODES; code++) {
        int stands_for = code < CODES ? highest - code : 0;
        m->tables[panel * 32 + code] = (uint8_t)(stands_for >> 1);
        m->tables[panel * 32 + 16 + code] = (uint8_t)(stands_for << 7);
    }
    for (int64_t block = 0; block < m->blocks; block++) {
        int64_t end = least(m->inputs, (block + 1) * BLOCK);
        int32_t count = 0;
        for (int64_t output = first; output < last; output++) {
            const uint16_t *row = m->weights + output * m->inputs;
            for (int64_t input = block * BLOCK; input < end; input++) count += is_exception(row[input], highest);
        }
        m->counts[panel * m->blocks + block] = count;
    }
}

/* Fills the tables of all panels, and counts [panels * blocks] with the number of each block's exceptions. */
void choose_codes(const uint16_t *weights, int64_t outputs, int64_t inputs, uint8_t *tables, int32_t *counts) {
    struct matrix matrix = {weights, outputs, inputs, (inputs + BLOCK - 1) / BLOCK, tables, .counts = counts};
    for_each((outputs + PANEL - 1) / PANEL, 1, choose_of_panel, &matrix);
}

/* PAIRS pairs of inputs of a panel: each [2 sides][16 outputs][2], the order of the expanded block. */
union square {
    float words[PAIRS][PANEL]; /* as `transpose` takes them */
    uint16_t weights[PAIRS][64];
};

/* Collects the weights of PAIRS pairs from `pair` on; 0 past the last output and input. */
static void gather(const struct matrix *m, int64_t first, int64_t pair, union square *to) {
    int64_t count = least(PAIRS, m->inputs / 2 - pair), rows = least(PANEL, m->outputs - first), stride = m->inputs;
    const uint16_t *from = m->weights + first * m->inputs + pair * 2;
    uint16_t edge[PANEL][2 * PAIRS];
    if (count < PAIRS || rows < PANEL) {
        memset(edge, 0, sizeof edge);
        for (int64_t row = 0; row < rows; row++) memcpy(edge[row], from + row * stride, count * 4);
        from = edge[0], stride = 2 * PAIRS;
    }
    for (int side = 0; side < 2; side++)
        transpose((const float *)(const void *)(from + side * 16 * stride), stride / 2, to->words[0] + side * 16, PANEL);
}

/* Writes the signs and mantissas of 64 weights and their codes, ordered as in the data; returns whether any weight is
 * an exception. */
static int encode(const uint16_t weights[64], int highest, uint8_t *data, uint8_t codes[64]) {
    uint8_t bytes_of[64], codes_of[64];
    uint16_t odd = 0;
    for (int i = 0; i < 64; i++) {
        uint16_t power = weights[i] >> 7 & 0xff, below = (uint16_t)(highest - power);
        uint16_t reached = (uint16_t)((below < CODES) & (power != 0));
        codes_of[i] = (uint8_t)(reached ? below : CODES);
        bytes_of[i] = (uint8_t)((weights[i] >> 8 & 0x80) | (weights[i] & 0x7f));
        odd |= (uint16_t)((power != 0) & !reached);
    }
    for (int part = 0; part < 8; part++) { /* 4 outputs of one side, then of the other */
        int place = part % 4 * 16 + part / 4 * 8;
        memcpy(data + place, bytes_of + part * 8, 8), memcpy(codes + place, codes_of + part * 8, 8);
    }
    return odd;
}

/* Appends the exceptions of a pair of inputs to `next`. */
static uint32_t *append_exceptions(const uint16_t weights[64], int highest, int64_t pair, uint32_t *next) {
    for (int i = 0; i < 64; i++)
        if (is_exception(weights[i], highest)) *next++ = (uint32_t)(pair % (BLOCK / 2) * 64 + i) << 16 | weights[i];
    return next;
}

static void compress_panel(int64_t panel, void *given) {
    const struct matrix *m = given;
    int highest = m->tables[panel * 32] << 1 | m->tables[panel * 32 + 16] >> 7;
    uint32_t *next = m->exceptions + m->offsets[panel * m->blocks];
    for (int64_t pair = 0; pair < m->inputs / 2; pair += PAIRS) {
        union square square;
        gather(m, panel * PANEL, pair, &square);
        uint8_t *quad = m->data + (panel * m->inputs / 4 + pair / 2) * QUAD;
        for (int64_t i = 0; i < least(PAIRS, m->inputs / 2 - pair); i += 2, quad += QUAD) {
            uint8_t codes[2][64];
            for (int64_t j = 0; j < 2; j++)
                if (encode(square.weights[i + j], highest, quad + 64 * j, codes[j]))
                    next = append_exceptions(square.weights[i + j], highest, pair + i + j, next);
            for (int k = 0; k < 64; k++) quad[128 + k] = (uint8_t)(codes[0][k] | codes[1][k] << 4);
        }
    }
}

/* Fills data and exceptions. tables: of `choose_codes`; offsets: running sums of its counts. */
void compress_weights(const uint16_t *weights, int64_t outputs, int64_t inputs, const uint8_t *tables,
                      const int32_t *offsets, uint8_t *data, uint32_t *exceptions) {
    struct matrix matrix = {weights, outputs, inputs, (inputs + BLOCK - 1) / BLOCK, (uint8_t *)tables, NULL, offsets, data,
                            exceptions};
    for_each((outputs + PANEL - 1) / PANEL, 1, compress_panel, &matrix);
}
