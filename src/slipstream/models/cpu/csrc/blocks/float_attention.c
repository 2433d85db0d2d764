/* Attention over a cache of float32 numbers. */
#include "blocks.h"

typedef float number;
typedef struct float_layer layer_type;
typedef struct float_cache cache_type;
enum { MAX_SHARED = MAX_REPEATS };
#define NUMBERS_ARE_FLOATS 1
#define LOWEST (-86)
#define load_number load_floats
#define store_number store_floats

#include "../attention.h"
