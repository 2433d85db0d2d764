/* Vectors of 16 numbers, of 16 integers and of 64 bytes, by the instructions that the compiler was told of.
 *
 * simd_plain.h is the specification: every variant gives the same bits. A vector's numbers are summed in halves: its
 * second half is added to the first until one number is left.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define ALWAYS static inline __attribute__((always_inline))
#else
#define ALWAYS static __attribute__((noinline, unused)) /* plain C inlined as often takes minutes to compile */
#endif

/* A float16 number. */
ALWAYS float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = half & 0x7fff;
    float value;
    if (bits >= 0x7c00) {
        bits = sign | 0x7f800000 | (bits & 0x3ff) << 13;
    } else if (bits >= 0x0400) {
        bits = sign | ((bits << 13) + 0x38000000);
    } else {
        value = (float)bits * 0x1p-24f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_plain.h"
#endif

#ifndef SETTLED
#define SETTLED(x) ((void)0) /* where registers suffice */
#endif

/* e to the x, for x from -87 to 88: 2^n times a polynomial of degree 6, within 2 units of the last place. At -88 it is
 * 0. */
ALWAYS floats exponential(floats x) {
    floats n = nearest(multiply_floats(x, all_floats(1.44269504f)));
    floats r = add_product(x, n, all_floats(-0.693359375f));
    r = add_product(r, n, all_floats(2.12194440e-4f));
    floats y = all_floats(1.0f / 720);
    y = add_product(all_floats(1.0f / 120), y, r);
    y = add_product(all_floats(1.0f / 24), y, r);
    y = add_product(all_floats(1.0f / 6), y, r);
    y = add_product(all_floats(0.5f), y, r);
    y = add_product(all_floats(1.0f), y, r);
    y = add_product(all_floats(1.0f), y, r);
    return multiply_floats(y, power_of_two(n));
}
