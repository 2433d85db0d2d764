/* Plain C: what the variants that widen numbers to float32 give too. */
#pragma once

ALWAYS float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
ALWAYS floats load_bf16(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[i]); return y; }

/* To the nearest, ties to even; what is no number stays none. */
ALWAYS void store_bf16(uint16_t *to, floats x) {
    EACH {
        uint32_t bits;
        memcpy(&bits, &x.v[i], 4);
        bits = x.v[i] == x.v[i] ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
        to[i] = (uint16_t)(bits >> 16);
    }
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[2 * i]); return y; }
ALWAYS floats load_second_of_pairs(const uint16_t *from) { floats y; EACH y.v[i] = bf16_to_float(from[2 * i + 1]); return y; }

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    for (int i = 0; i < 64; i++) {
        int lane = i / 16, within = i % 16, place = within / 8 * 32 + lane * 8 + within % 8, code = codes.v[i];
        uint8_t upper = (data.v[i] & 0x80) | table[code], lowest = (data.v[i] & 0x7f) | table[16 + code];
        to[place] = (uint16_t)(upper << 8 | lowest);
    }
}
