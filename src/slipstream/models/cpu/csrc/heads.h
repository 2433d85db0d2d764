/* Products of latent attention's heads, see blocks/heads.c. */
#pragma once

#include "structs.h"

/* A matrix of each of some heads, in one product: x [heads][tokens][inputs] -> out [tokens][heads][outputs]. space:
 * `heads_scratch` bytes that begin at a multiple of 64. */
struct heads_product {
    const struct expert_matrix *of;
    int64_t heads, inputs, outputs, tokens, planes;
    const float *x;
    float *out;
    uint8_t *space;
};
void multiply_heads(const struct heads_product *of);
int64_t heads_scratch(int64_t heads, int64_t inputs, int64_t tokens, int64_t planes);
