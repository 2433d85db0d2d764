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

enum {
    CODES = 15,  /* exponents that have a code; one more code stands for 0 */
    TALLIES = 4, /* counts of every exponent, so that equal neighbours do not wait for each other */
    PAIRS = 16   /* pairs of inputs that are compressed together */
};

static int exponent(uint16_t weight) { return weight >> 7 & 0xff; }

/* How often each exponent occurs among `count` weights. */
static void tally(const uint16_t *weights, long count, uint32_t seen[TALLIES][256]) {
    long i = 0;
    for (; i + TALLIES <= count; i += TALLIES)
        for (int j = 0; j < TALLIES; j++) seen[j][exponent(weights[i + j])]++;
    for (; i < count; i++) seen[0][exponent(weights[i])]++;
}

/* The largest of the neighbouring exponents that most weights have. */
static int choose_highest(const uint32_t seen[TALLIES][256]) {
    long total[256], most = -1;
    int highest = CODES;
    for (int i = 0; i < 256; i++) total[i] = (long)seen[0][i] + seen[1][i] + seen[2][i] + seen[3][i];
    for (int top = CODES; top < 256; top++) {
        long reached = 0;
        for (int code = 0; code < CODES; code++) reached += total[top - code];
        if (reached > most) most = reached, highest = top;
    }
    return highest;
}

/* Which of 32 weights are exceptions, and in codes [32] the code of each. */
static inline __mmask32 encode(__m512i weights, int highest, __m512i *codes) {
    __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(weights, 7), _mm512_set1_epi16(0xff));
    __m512i below = _mm512_sub_epi16(_mm512_set1_epi16((short)highest), exponents), none = _mm512_set1_epi16(CODES);
    __mmask32 nonzero = _mm512_test_epi16_mask(exponents, exponents);
    __mmask32 reached = _mm512_mask_cmplt_epu16_mask(nonzero, below, none);
    *codes = _mm512_mask_blend_epi16(reached, none, below);
    return nonzero & ~reached;
}

/* tables of all panels, and in counts [panels * blocks] how many exceptions each block has. */
void choose_codes(const uint16_t *weights, long outputs, long inputs, uint8_t *tables, int32_t *counts) {
    long panels = (outputs + PANEL - 1) / PANEL, blocks = (inputs + BLOCK - 1) / BLOCK;
    #pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; panel++) {
        uint32_t seen[TALLIES][256] = {0};
        long first = panel * PANEL, last = min_long(outputs, first + PANEL);
        tally(weights + first * inputs, (last - first) * inputs, seen);
        int highest = choose_highest((const uint32_t(*)[256])seen);
        for (int code = 0; code <= CODES; code++) {
            int stands_for = code < CODES ? highest - code : 0;
            tables[panel * 32 + code] = (uint8_t)(stands_for >> 1);
            tables[panel * 32 + 16 + code] = (uint8_t)(stands_for << 7);
        }
        memset(counts + panel * blocks, 0, blocks * sizeof *counts);
        for (long output = first; output < last; output++)
            for (long input = 0; input < inputs; input += 32) {
                __mmask32 there = inputs - input >= 32 ? ~0u : (1u << (inputs - input)) - 1;
                __m512i codes, some = _mm512_maskz_loadu_epi16(there, weights + output * inputs + input);
                counts[panel * blocks + input / BLOCK] += __builtin_popcount(encode(some, highest, &codes));
            }
    }
}

/* The words [PAIRS][16 outputs] of up to PAIRS pairs of inputs from `pair` on; 0 past the last output and input. */
static inline __attribute__((always_inline)) void gather(const uint16_t *weights, long outputs, long inputs, long first,
                                                         long pair, __m512i to[PAIRS]) {
    long left = inputs / 2 - pair;
    __mmask16 there = (__mmask16)(left >= PAIRS ? 0xffff : (1u << left) - 1);
    #pragma GCC unroll 16
    for (int i = 0; i < PAIRS; i++)
        to[i] = _mm512_maskz_loadu_epi32(first + i < outputs ? there : 0, weights + (first + i) * inputs + pair * 2);
    transpose_16x16(to);
}

/* Sign and mantissa of 32 weights. */
static inline __m512i without_exponents(__m512i weights) {
    __m512i sign = _mm512_and_si512(_mm512_srli_epi16(weights, 8), _mm512_set1_epi16(0x80));
    return _mm512_or_si512(sign, _mm512_and_si512(weights, _mm512_set1_epi16(0x7f)));
}

/* A pair of inputs [2][16 outputs]: its 64 bytes, and the codes that go with them. Appends exceptions to `next`. */
static inline uint32_t *compress_pair(const __m512i words[2], int highest, long pair, uint8_t *bytes, __m512i *codes,
                                      uint32_t *next) {
    __m512i part[2];
    __mmask32 odd[2] = {encode(words[0], highest, part), encode(words[1], highest, part + 1)};
    _mm512_storeu_si512(bytes, _mm512_packus_epi16(without_exponents(words[0]), without_exponents(words[1])));
    *codes = _mm512_packus_epi16(part[0], part[1]);
    if (odd[0] | odd[1]) {
        _Alignas(64) uint16_t weights[2][32];
        for (int side = 0; side < 2; side++) {
            _mm512_store_si512(weights[side], words[side]);
            for (__mmask32 rest = odd[side]; rest; rest &= rest - 1) {
                int word = __builtin_ctz(rest), lane = word >> 3; /* byte lane * 16 + side * 8 + word % 8 */
                uint32_t place = (uint32_t)(pair % (BLOCK / 2) * 64 + side * 32 + lane * 8 + (word & 7));
                *next++ = place << 16 | weights[side][word];
            }
        }
    }
    return next;
}

/* data and exceptions, as the tables and offsets of choose_codes say. */
void compress_weights(const uint16_t *weights, long outputs, long inputs, const uint8_t *tables, const int32_t *offsets,
          uint8_t *data, uint32_t *exceptions) {
    long panels = (outputs + PANEL - 1) / PANEL, blocks = (inputs + BLOCK - 1) / BLOCK;
    #pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; panel++) {
        int highest = tables[panel * 32] << 1 | tables[panel * 32 + 16] >> 7;
        uint32_t *next = exceptions + offsets[panel * blocks];
        for (long pair = 0; pair < inputs / 2; pair += PAIRS) {
            __m512i left[PAIRS], right[PAIRS];
            gather(weights, outputs, inputs, panel * PANEL, pair, left);
            gather(weights, outputs, inputs, panel * PANEL + 16, pair, right);
            uint8_t *quad = data + (panel * inputs / 4 + pair / 2) * QUAD;
            for (int i = 0; i < min_long(PAIRS, inputs / 2 - pair); i += 2, quad += QUAD) {
                __m512i codes[2], one[2] = {left[i], right[i]}, other[2] = {left[i + 1], right[i + 1]};
                next = compress_pair(one, highest, pair + i, quad, codes, next);
                next = compress_pair(other, highest, pair + i + 1, quad + 64, codes + 1, next);
                _mm512_storeu_si512(quad + 128, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
            }
        }
    }
}
