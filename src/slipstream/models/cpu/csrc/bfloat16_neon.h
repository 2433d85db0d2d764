/* NEON: numbers are widened to float32. */
#pragma once

ALWAYS floats load_bf16(const uint16_t *from) {
    floats y;
    EACH y.val[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16));
    return y;
}

/* To the nearest, ties to even; what is no number stays none. */
ALWAYS void store_bf16(uint16_t *to, floats x) {
    EACH {
        uint32x4_t bits = vreinterpretq_u32_f32(x.val[i]), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000)), is_number = vceqq_f32(x.val[i], x.val[i]);
        vst1_u16(to + 4 * i, vshrn_n_u32(vbslq_u32(is_number, rounded, quiet), 16));
    }
}

/* The first and the second numbers of 16 pairs. */
ALWAYS floats load_first_of_pairs(const uint16_t *from) {
    floats y;
    EACH y.val[i] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(from + 8 * i)), 16));
    return y;
}
ALWAYS floats load_second_of_pairs(const uint16_t *from) {
    floats y;
    EACH {
        uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(from + 8 * i));
        y.val[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
    }
    return y;
}

/* 64 weights of 12 bits: a byte of sign and mantissa and a code each, which the table turns into an exponent. */
ALWAYS void join_exponents(bytes data, bytes codes, const uint8_t *table, uint16_t *to) {
    uint8x16_t uppers = vld1q_u8(table), lowests = vld1q_u8(table + 16), sign = vdupq_n_u8(0x80);
    EACH {
        uint8x16_t upper = vorrq_u8(vandq_u8(data.val[i], sign), vqtbl1q_u8(uppers, codes.val[i]));
        uint8x16_t lowest = vorrq_u8(vbicq_u8(data.val[i], sign), vqtbl1q_u8(lowests, codes.val[i]));
        vst1q_u8((uint8_t *)(to + 8 * i), vzip1q_u8(lowest, upper));
        vst1q_u8((uint8_t *)(to + 32 + 8 * i), vzip2q_u8(lowest, upper));
    }
}
