/* bfloat16 numbers over the vectors of blocks/simd.h, by the instructions that the compiler was told of.
 *
 * AVX-512 with bfloat16 multiplies pairs of numbers and rounds as its instruction does; all others widen numbers to
 * float32, or multiply 4-bit codes as integers (int4_dots.h). So bits differ between them. 12-bit weights have the same
 * ones at every width, those of 4-bit drafts may differ (int4_pairs.h).
 */
#pragma once

#include "blocks/simd.h"

#if defined(__AVX512BF16__)
#include "bfloat16_avx512.h"
#include "expand_avx512.h"
#elif defined(__AVX512VNNI__)
#include "bfloat16_avx512f.h"
#include "expand_avx512.h"
#elif defined(__AVX2__)
#include "bfloat16_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "bfloat16_neon.h"
#else
#include "bfloat16_plain.h"
#endif

ALWAYS floats round_bf16(floats x) {
    uint16_t rounded[16];
    store_bf16(rounded, x);
    return load_bf16(rounded);
}
