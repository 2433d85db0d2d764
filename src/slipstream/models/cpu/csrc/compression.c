/* How bfloat16 weights become 12 bits each, for compressed.c.
 *
 * Layout: data [panels][K / 4][192] bytes: signs and mantissas of two pairs of inputs, 64 each, and their 4-bit codes,
 * one pair's in the low and the other's in the high halves. Byte L * 16 + z * 8 + o * 2 + i of a pair is output
 * z * 16 + L * 4 + o and input i: two unpacking instructions then give operands of vdpbf16ps, 16 outputs by 2 inputs.
 * tables [panels][32]: the exponent of each code, its upper 7 bits and its lowest one. The exceptions of a block of a
 * panel follow each other: place in the expanded block << 16 | weight; offsets [panels * blocks + 1]: where they begin.
 */
#include "kernels.h"

#include <string.h>

enum { CODES = 15 /* exponents that have a code; one more code stands for 0 */ };

static int exponent(uint16_t weight) { return weight >> 7 & 0xff; }

/* The weight at a byte of a pair of inputs; 0 past the last output. */
static uint16_t at(const uint16_t *weights, long outputs, long inputs, long panel, long pair, int byte) {
    long output = panel * PANEL + (byte >> 3 & 1) * 16 + (byte >> 4) * 4 + (byte >> 1 & 3);
    return output < outputs ? weights[output * inputs + pair * 2 + (byte & 1)] : 0;
}

/* Place of that byte's weight in an expanded block. */
static int place(long pair, int byte) {
    return (int)(pair % (BLOCK / 2)) * 64 + (byte >> 3 & 1) * 32 + (byte >> 4) * 8 + (byte & 7);
}

static int code_of(uint16_t weight, int highest) {
    int code = highest - exponent(weight);
    return code >= 0 && code < CODES && exponent(weight) ? code : CODES;
}

/* tables of all panels, and in counts [panels * blocks] how many exceptions each block has. */
void choose_codes(const uint16_t *weights, long outputs, long inputs, uint8_t *tables, int32_t *counts) {
    long panels = (outputs + PANEL - 1) / PANEL, blocks = (inputs + BLOCK - 1) / BLOCK;
    #pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; panel++) {
        long seen[256] = {0}, most = -1;
        int highest = CODES;
        for (long output = panel * PANEL; output < min_long(outputs, (panel + 1) * PANEL); output++)
            for (long input = 0; input < inputs; input++) seen[exponent(weights[output * inputs + input])]++;
        for (int top = CODES; top < 256; top++) {
            long reached = 0;
            for (int code = 0; code < CODES; code++) reached += seen[top - code];
            if (reached > most) most = reached, highest = top;
        }
        for (int code = 0; code <= CODES; code++) {
            int stands_for = code < CODES ? highest - code : 0;
            tables[panel * 32 + code] = (uint8_t)(stands_for >> 1);
            tables[panel * 32 + 16 + code] = (uint8_t)(stands_for << 7);
        }
        memset(counts + panel * blocks, 0, blocks * sizeof *counts);
        for (long output = panel * PANEL; output < min_long(outputs, (panel + 1) * PANEL); output++)
            for (long input = 0; input < inputs; input++) {
                uint16_t weight = weights[output * inputs + input];
                counts[panel * blocks + input / BLOCK] += exponent(weight) && code_of(weight, highest) == CODES;
            }
    }
}

/* data and exceptions, as the tables and offsets of choose_codes say. */
void compress_weights(const uint16_t *weights, long outputs, long inputs, const uint8_t *tables, const int32_t *offsets,
          uint8_t *data, uint32_t *exceptions) {
    long panels = (outputs + PANEL - 1) / PANEL, blocks = (inputs + BLOCK - 1) / BLOCK;
    #pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; panel++) {
        int highest = tables[panel * 32] << 1 | tables[panel * 32 + 16] >> 7;
        uint32_t *next = exceptions + offsets[panel * blocks];
        for (long pair = 0; pair < inputs / 2; pair++) {
            uint8_t *quad = data + (panel * (inputs / 4) + pair / 2) * QUAD;
            int second = pair & 1;
            for (int byte = 0; byte < 64; byte++) {
                uint16_t weight = at(weights, outputs, inputs, panel, pair, byte);
                int code = code_of(weight, highest);
                quad[second * 64 + byte] = (uint8_t)((weight >> 8 & 0x80) | (weight & 0x7f));
                quad[128 + byte] = (uint8_t)(second ? quad[128 + byte] | code << 4 : code);
                if (code == CODES && exponent(weight)) *next++ = (uint32_t)place(pair, byte) << 16 | weight;
            }
        }
    }
}
