/* Attention over a cache of bfloat16 numbers. */
#include "kernels.h"

typedef uint16_t number;
typedef struct layer layer_type;
typedef struct kv_cache cache_type;
enum { MAX_HEAD = MAX_HEAD_SIZE, MAX_SHARED = MAX_SHARED_HEADS };
#define NUMBERS_ARE_FLOATS 0
#define LOWEST (-87)
#define load_number load_bf16
#define store_number store_bf16

#include "attention.h"
