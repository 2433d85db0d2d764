/* NEON of 64-bit ARM with dot products: each vector is four registers. */
#pragma once

#include <arm_neon.h>

enum { SUBTRACTS_128 = 1 }; /* whether `add_dot` subtracts 128 from codes of 8 bits: it multiplies signed bytes */

typedef float32x4x4_t floats;
typedef int32x4x4_t ints;
typedef uint8x16x4_t bytes;

#define EACH for (int i = 0; i < 4; i++)

ALWAYS floats load_floats(const float *from) { floats y; EACH y.val[i] = vld1q_f32(from + 4 * i); return y; }
ALWAYS void store_floats(float *to, floats x) { EACH vst1q_f32(to + 4 * i, x.val[i]); }
ALWAYS floats all_floats(float x) { floats y; EACH y.val[i] = vdupq_n_f32(x); return y; }
ALWAYS floats add_floats(floats a, floats b) { EACH a.val[i] = vaddq_f32(a.val[i], b.val[i]); return a; }
ALWAYS floats subtract_floats(floats a, floats b) { EACH a.val[i] = vsubq_f32(a.val[i], b.val[i]); return a; }
ALWAYS floats multiply_floats(floats a, floats b) { EACH a.val[i] = vmulq_f32(a.val[i], b.val[i]); return a; }
ALWAYS floats divide_floats(floats a, floats b) { EACH a.val[i] = vdivq_f32(a.val[i], b.val[i]); return a; }
/* If one number is NaN, the second, as by x86's instructions; vmaxq_f32 would return NaN. */
ALWAYS floats max_floats(floats a, floats b) {
    EACH a.val[i] = vbslq_f32(vcgtq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]);
    return a;
}
ALWAYS floats min_floats(floats a, floats b) {
    EACH a.val[i] = vbslq_f32(vcltq_f32(a.val[i], b.val[i]), a.val[i], b.val[i]);
    return a;
}
/* Of all numbers of both; NaN if one is NaN. Without the sign, bits have the order of the numbers. */
ALWAYS float largest_magnitude(floats x, floats y) {
    uint32x4_t most = vdupq_n_u32(0);
    EACH {
        most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(x.val[i])));
        most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(y.val[i])));
    }
    uint32_t bits = vmaxvq_u32(most);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
ALWAYS floats add_product(floats sum, floats a, floats b) {
    EACH sum.val[i] = vfmaq_f32(sum.val[i], a.val[i], b.val[i]);
    return sum;
}
ALWAYS floats take_product(floats sum, floats a, floats b) {
    EACH sum.val[i] = vfmsq_f32(sum.val[i], a.val[i], b.val[i]);
    return sum;
}
/* x where first <= lane <= last, else y. */
ALWAYS floats only_lanes(floats x, int first, int last, floats y) {
    static const int32_t numbers[4] = {0, 1, 2, 3};
    int32x4_t lane = vld1q_s32(numbers);
    EACH {
        uint32x4_t in = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcleq_s32(lane, vdupq_n_s32(last)));
        x.val[i] = vbslq_f32(in, x.val[i], y.val[i]);
        lane = vaddq_s32(lane, vdupq_n_s32(4));
    }
    return x;
}
ALWAYS floats nearest(floats x) { EACH x.val[i] = vrndnq_f32(x.val[i]); return x; }
ALWAYS float largest(floats x) {
    float four[4];
    for (int half = 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x.val[i] = vbslq_f32(vcgtq_f32(x.val[i], x.val[i + half]), x.val[i], x.val[i + half]);
    vst1q_f32(four, x.val[0]);
    for (int half = 2; half; half /= 2)
        for (int i = 0; i < half; i++) four[i] = four[i] > four[i + half] ? four[i] : four[i + half];
    return four[0];
}
ALWAYS float sum_of(floats x) {
    float32x4_t four = vaddq_f32(vaddq_f32(x.val[0], x.val[2]), vaddq_f32(x.val[1], x.val[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
ALWAYS floats power_of_two(floats n) {
    EACH {
        int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n.val[i]), vdupq_n_s32(127));
        n.val[i] = vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    }
    return n;
}

ALWAYS ints all_ints(int32_t x) { ints y; EACH y.val[i] = vdupq_n_s32(x); return y; }
/* NaN and numbers that are too large become INT32_MIN, as by x86's instructions. */
ALWAYS ints to_ints(floats x) {
    ints y;
    EACH {
        uint32x4_t fits = vandq_u32(vcgeq_f32(x.val[i], vdupq_n_f32(-0x1p31f)), vcltq_f32(x.val[i], vdupq_n_f32(0x1p31f)));
        y.val[i] = vbslq_s32(fits, vcvtnq_s32_f32(x.val[i]), vdupq_n_s32(INT32_MIN));
    }
    return y;
}
ALWAYS floats to_floats(ints x) { floats y; EACH y.val[i] = vcvtq_f32_s32(x.val[i]); return y; }
ALWAYS ints add_ints(ints a, ints b) { EACH a.val[i] = vaddq_s32(a.val[i], b.val[i]); return a; }
ALWAYS ints subtract_ints(ints a, ints b) { EACH a.val[i] = vsubq_s32(a.val[i], b.val[i]); return a; }
ALWAYS ints over_128(ints x) { EACH x.val[i] = vshrq_n_s32(x.val[i], 7); return x; }
ALWAYS ints times_128(ints x) { EACH x.val[i] = vshlq_n_s32(x.val[i], 7); return x; }
ALWAYS int32_t int_sum(ints x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.val[0], x.val[1]), vaddq_s32(x.val[2], x.val[3])));
}
ALWAYS void store_narrow(uint8_t *to, ints x) {
    int16x8_t low = vcombine_s16(vmovn_s32(x.val[0]), vmovn_s32(x.val[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(x.val[2]), vmovn_s32(x.val[3]));
    vst1q_u8(to, vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high))));
}

/* 16 float16 numbers, bytes and signed bytes. */
ALWAYS floats load_halves(const uint8_t *from) {
    floats y;
    EACH y.val[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i)));
    return y;
}
ALWAYS void store_rounded_halves(uint16_t *to, floats x) {
    EACH vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.val[i])));
}
ALWAYS floats four_vectors(int16x8_t low, int16x8_t high) {
    floats y;
    y.val[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), y.val[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    y.val[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), y.val[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    return y;
}
ALWAYS floats load_unsigned(const uint8_t *from) {
    uint8x16_t x = vld1q_u8(from);
    return four_vectors(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(x))));
}
ALWAYS floats load_signed(const uint8_t *from) {
    int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(from));
    return four_vectors(vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)));
}
/* 16 powers of 2, by their exponents plus 128. */
ALWAYS floats load_powers(const uint8_t *from) {
    uint8x16_t bytes = vld1q_u8(from);
    uint16x8_t two[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    floats y;
    EACH {
        int32x4_t e = vreinterpretq_s32_u32(vmovl_u16(i % 2 ? vget_high_u16(two[i / 2]) : vget_low_u16(two[i / 2])));
        int32x4_t subnormal = vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(1)), 21);
        y.val[i] = vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(e, vdupq_n_s32(1)), 23), subnormal));
    }
    return y;
}
/* 16 numbers of 4 bits of exponent and 3 of fraction, over 256. */
ALWAYS floats load_small_floats(const uint8_t *from) {
    uint8x16_t bytes = vld1q_u8(from);
    uint16x8_t two[2] = {vshll_n_u8(vget_low_u8(bytes), 7), vshll_n_u8(vget_high_u8(bytes), 7)};
    floats y;
    EACH {
        uint16x4_t halves = i % 2 ? vget_high_u16(two[i / 2]) : vget_low_u16(two[i / 2]);
        y.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(halves));
    }
    return y;
}

/* A table of 16 bytes, and what it holds for bytes below 16. */
ALWAYS bytes load_table(const uint8_t *from) { bytes y; EACH y.val[i] = vld1q_u8(from); return y; }
ALWAYS bytes look_up(bytes table, bytes x) { EACH x.val[i] = vqtbl1q_u8(table.val[i], x.val[i]); return x; }

ALWAYS bytes load_bytes(const uint8_t *from) { bytes y; EACH y.val[i] = vld1q_u8(from + 16 * i); return y; }
ALWAYS bytes low_bits(bytes x) { EACH x.val[i] = vandq_u8(x.val[i], vdupq_n_u8(15)); return x; }
ALWAYS bytes high_bits(bytes x) { EACH x.val[i] = vshrq_n_u8(x.val[i], 4); return x; }

/* Adds to x, as bits `to` and up, the `count` bits of y from bit `at` on. */
ALWAYS bytes with_bits(bytes x, bytes y, const int at, const int count, const int to) {
    uint8x16_t kept = vdupq_n_u8((uint8_t)(((1 << count) - 1) << to));
    int8x16_t left = vdupq_n_s8((int8_t)(to - at)); /* to the right if negative */
    EACH x.val[i] = vorrq_u8(x.val[i], vandq_u8(vshlq_u8(y.val[i], left), kept));
    return x;
}

/* Adds to each integer the products of its 4 bytes of codes, of so many bits, with the 4 signed bytes at x. */
ALWAYS ints add_dot(ints sum, bytes codes, const uint8_t *x, const int bits) {
    int32_t all;
    memcpy(&all, x, 4);
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(all));
    EACH {
        uint8x16_t own = bits < 8 ? codes.val[i] : veorq_u8(codes.val[i], vdupq_n_u8(0x80));
        sum.val[i] = vdotq_s32(sum.val[i], vreinterpretq_s8_u8(own), four);
    }
    return sum;
}

/* Into the first level of the caches, and into the second. */
ALWAYS void prefetch(const uint8_t *from) { __builtin_prefetch(from); }
ALWAYS void prefetch_later(const uint8_t *from) { __builtin_prefetch(from, 0, 2); }

/* 16 rows of 16 numbers, `stride` apart, to columns `step` apart. */
ALWAYS void transpose(const float *from, int64_t stride, float *to, int64_t step) {
    for (int row = 0; row < 16; row += 4)
        for (int column = 0; column < 16; column += 4) {
            float32x4_t r[4];
            EACH r[i] = vld1q_f32(from + (row + i) * stride + column);
            float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
            float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
            float *out = to + column * step + row;
            vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
            vst1q_f32(out + step, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
            vst1q_f32(out + 2 * step, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
            vst1q_f32(out + 3 * step, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
        }
}
