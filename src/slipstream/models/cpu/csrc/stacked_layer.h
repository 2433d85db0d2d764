/* What both kinds of layers are stacked by. Plain C, mirrored by Python (structs.py). */
#pragma once

#include <stdint.h>

/* A layer of several that are computed one after the other: its struct, and what is its own of the cache's. rotation:
 * which of the given cosines and sines are its own. */
struct stacked_layer {
    const void *layer;
    void *keys, *values;
    int64_t length, window, rotation;
    float scaling;
};
