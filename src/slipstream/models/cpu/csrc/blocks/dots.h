/* Integer products of codes with the rounded activations of some tokens, for integer_sums.h and ../int4_dots.h. */
#pragma once

#include "simd.h"

/* Four vectors of codes, of so many bits, times what stands at words[k] + i * step, for the sums of every i below
 * `count`. first, last: of the vectors whose products one sum holds. A sum has to begin with something, and each further
 * call adds to it; where sums are kept in 16 bits, it begins anew with the first vectors and is complete after the last. */
ALWAYS void add_four_vectors(const int bits, const int count, const bytes four[4], const uint8_t *const words[4],
                             int64_t step, const int first, const int last, ints *sums) {
#ifdef SUMS_IN_16_BITS
    #pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        ints sum = bits == 4 ? four_in_16_bits(four, words, i * step) : four_dots(four, words, i * step, bits);
        if (!first) sum = bits == 4 ? add_in_16_bits(sums[i], sum) : add_ints(sums[i], sum);
        if (last && bits == 4) sum = in_32_bits(sum); /* room for all 32 inputs */
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

/* What a sum is to begin with, and what is added to it when it is complete. */
#ifdef SUMS_IN_16_BITS
ALWAYS ints to_begin_with(ints x) { return (void)x, all_ints(0); }
ALWAYS ints completed(ints sum, ints x) { return add_ints(sum, x); }
#else
ALWAYS ints to_begin_with(ints x) { return x; }
ALWAYS ints completed(ints sum, ints x) { return (void)x, sum; }
#endif
