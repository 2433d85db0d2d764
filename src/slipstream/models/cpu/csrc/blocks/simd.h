/* Vectors of 16 numbers, of 16 integers and of 64 bytes, by the best instructions that the compiler may use.
 *
 * simd_plain.h is the specification: every variant gives the same bits. The numbers of a vector are summed by adding
 * its second half to the first, again and again, until one number is left.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define ALWAYS static inline __attribute__((always_inline))
#else
#define ALWAYS static __attribute__((noinline, unused)) /* plain C would take minutes to compile if it were inlined */
#endif

#define LARGEST_HALF 65504.0f

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

/* Whether weights are prefetched in two steps even for few tokens. Intel's processors wait less for memory then: these
 * are all that have AMX, or AVX-VNNI without AVX-512. */
#if defined(__AMX_TILE__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
enum { IN_TWO_STEPS = 1 };
#else
enum { IN_TWO_STEPS = 0 };
#endif

/* Prefetches the line 4 KB further on into the second level of the caches, and that 1 KB further on into the first. */
ALWAYS void fetch_in_two_steps(const uint8_t *line) { prefetch_later(line + 4096), prefetch(line + 1024); }

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

/* y times the sigmoid of x; y = x: SiLU. */
ALWAYS floats times_sigmoid(floats y, floats x) {
    floats z = max_floats(min_floats(subtract_floats(all_floats(0), x), all_floats(88)), all_floats(-86));
    return divide_floats(y, add_floats(all_floats(1), exponential(z)));
}

/* Rounds 16 numbers to float16, ties to even. Those beyond the largest become it, so that none becomes infinite;
 * infinities become NaN. */
ALWAYS void store_halves(uint16_t *to, floats x) {
    floats within = max_floats(all_floats(-LARGEST_HALF), min_floats(all_floats(LARGEST_HALF), x));
    store_rounded_halves(to, add_floats(within, subtract_floats(x, x)));
}

/* Adds the products of four vectors of codes, of so many bits, with the activations at words[k] + i * step to sums[i],
 * for every i below `count`. first, last: whether these are the first and the last vectors of a sum. SUMS_IN_16_BITS:
 * the first vectors replace what is in the sum, and the last leave it in 32 bits; without it, all add to the sum. */
ALWAYS void add_four_vectors(const int bits, const int count, const bytes four[4], const uint8_t *const words[4],
                             int64_t step, const int first, const int last, ints *sums) {
#ifdef SUMS_IN_16_BITS
    #pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        ints sum = bits <= 4 ? four_in_16_bits(four, words, i * step) : four_dots(four, words, i * step, bits);
        if (!first) sum = bits <= 4 ? add_in_16_bits(sums[i], sum) : add_ints(sums[i], sum);
        if (last && bits <= 4) sum = in_32_bits(sum); /* room for all 32 inputs */
        SETTLED(sum);
        sums[i] = sum;
    }
#else
    (void)first, (void)last;
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        #pragma GCC unroll 16
        for (int i = 0; i < count; i++) sums[i] = add_dot(sums[i], four[k], words[k] + i * step, bits);
#endif
}

/* The number with which a sum begins, x or 0, and the complete sum, to which x is added unless it began with it. */
#ifdef SUMS_IN_16_BITS
ALWAYS ints to_begin_with(ints x) { return (void)x, all_ints(0); }
ALWAYS ints completed(ints sum, ints x) { return add_ints(sum, x); }
#else
ALWAYS ints to_begin_with(ints x) { return x; }
ALWAYS ints completed(ints sum, ints x) { return (void)x, sum; }
#endif
