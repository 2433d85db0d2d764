/* Latent attention, for layer_steps.h; see `struct latent`. Everything here but attention treats each token by itself. */
#include "heads.h"

/* A forward of some tokens. projected [tokens][width]: the first product's result: queries or their own latent, then the
 * keys' latent and the rotated part of the key. queries [tokens][step]: the queries. heads [tokens][heads + 1][size]: the
 * input of attention, whose output is attended [tokens][heads][rank]. x, sums: input and output of the heads' products. */
struct latent_pass {
    const layer_type *layer;
    const number *projected, *cosines, *sines, *queries;
    number *normed, *heads, *attended, *out;
    int64_t width, step, tokens;
    float *x, *sums;
};

static inline void copy_wide(float *to, const number *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_floats(to + i, load_number(from + i));
}

static inline void copy_narrow(number *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_number(to + i, load_floats(from + i));
}

static void begin_token(int64_t t, void *given) {
    const struct latent_pass *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, rank = layer->latent->rank, inputs = layer->queries_up.inputs, turn = t * layer->rotated;
    const number *own = of->projected + t * of->width, *latent = own + of->width - size;
    number *key = of->heads + (t * (layer->heads + 1) + layer->heads) * size;
    normalize(&layer->keys, latent, rank, key);
    memcpy(key + rank, latent + rank, (size - rank) * sizeof *key);
    rotate_head(layer, key + rank, of->cosines + turn, of->sines + turn);
    if (inputs) normalize(&layer->queries, own, inputs, of->normed + t * inputs);
}

/* Item: a head of a token. The next functions take the same. */
static void begin_query(int64_t item, void *given) {
    const struct latent_pass *of = given;
    const layer_type *layer = of->layer;
    int64_t heads = layer->heads, t = item / heads, h = item % heads, plain = layer->latent->plain, rotated = layer->rotated;
    const number *query = of->queries + t * of->step + h * (plain + rotated);
    number *to = of->heads + (t * (heads + 1) + h) * layer->size + layer->latent->rank;
    copy_wide(of->x + (h * of->tokens + t) * plain, query, plain);
    memcpy(to, query + plain, rotated * sizeof *to);
    rotate_head(layer, to, of->cosines + t * rotated, of->sines + t * rotated);
}

static void end_query(int64_t item, void *given) {
    const struct latent_pass *of = given;
    int64_t heads = of->layer->heads, t = item / heads, h = item % heads, rank = of->layer->latent->rank;
    copy_narrow(of->heads + (t * (heads + 1) + h) * of->layer->size, of->sums + item * rank, rank);
}

static void begin_value(int64_t item, void *given) {
    const struct latent_pass *of = given;
    int64_t heads = of->layer->heads, t = item / heads, h = item % heads, rank = of->layer->latent->rank;
    copy_wide(of->x + (h * of->tokens + t) * rank, of->attended + item * rank, rank);
}

static void end_value(int64_t item, void *given) {
    const struct latent_pass *of = given;
    int64_t values = of->layer->latent->values;
    copy_narrow(of->out + item * values, of->sums + item * values, values);
}

/* Gives a pass its memory, in which every part begins at a multiple of 64; returns the number of bytes. */
static int64_t lay_out_latent(struct latent_pass *of, uint8_t *space, uint8_t **of_heads) {
    const layer_type *layer = of->layer;
    const struct latent *latent = layer->latent;
    int64_t tokens = of->tokens, all = tokens * layer->heads, rank = latent->rank, at = 0;
    int64_t wide = latent->plain > rank ? latent->plain : rank, sums = latent->values > rank ? latent->values : rank;
#define TAKE(to, bytes) (to) = (void *)(space + at), at += ((int64_t)(bytes) + 63) / 64 * 64
    TAKE(of->normed, tokens * layer->queries_up.inputs * (int64_t)sizeof(number));
    TAKE(of->queries, tokens * layer->queries_up.outputs * (int64_t)sizeof(number));
    TAKE(of->heads, tokens * (layer->heads + 1) * layer->size * (int64_t)sizeof(number));
    TAKE(of->attended, all * rank * (int64_t)sizeof(number));
    TAKE(of->x, all * wide * 4);
    TAKE(of->sums, all * sums * 4);
    TAKE(*of_heads, heads_scratch(layer->heads, wide, tokens, latent->planes));
#undef TAKE
    return at;
}

/* Bytes of scratch space that `attend_latent` needs, besides attention's. */
static int64_t latent_bytes(const layer_type *layer, int64_t tokens) {
    struct latent_pass pass = {layer, .tokens = tokens};
    uint8_t *of_heads;
    return layer->latent ? lay_out_latent(&pass, NULL, &of_heads) + 64 : 0;
}

/* projected [tokens][outputs of the first product] -> out [tokens][inputs of the second]. attention, space, of_product:
 * scratch memory of attention, of `latent_bytes`, and of a product. */
static void attend_latent(const layer_type *layer, const cache_type *memory, const number *projected, int64_t tokens,
                          const number *cosines, const number *sines, number *out, number *attention, number *space,
                          number *of_product) {
    const struct latent *latent = layer->latent;
    struct latent_pass pass = {layer, projected, cosines, sines, .out = out, .width = layer->qkv.outputs, .tokens = tokens};
    uint8_t *of_heads;
    int64_t all = tokens * layer->heads, rank = latent->rank;
    lay_out_latent(&pass, from_64(space), &of_heads);
    number *queries = (number *)pass.queries;
    for_each(tokens, tokens > FEW, begin_token, &pass);
    if (layer->queries_up.outputs) multiply_by(layer, &layer->queries_up, pass.normed, tokens, queries, of_product);
    pass.queries = layer->queries_up.outputs ? queries : projected;
    pass.step = layer->queries_up.outputs ? layer->queries_up.outputs : pass.width;
    for_each(all, tokens > FEW, begin_query, &pass);
    struct heads_product product = {&latent->to_latent, layer->heads, latent->plain, rank, tokens, latent->planes, pass.x,
                                    pass.sums, of_heads};
    multiply_heads(&product);
    for_each(all, tokens > FEW, end_query, &pass);
    attend(layer, memory, pass.heads, tokens, pass.attended, attention);
    for_each(all, tokens > FEW, begin_value, &pass);
    product = (struct heads_product){&latent->from_latent, layer->heads, rank, latent->values, tokens, latent->planes, pass.x,
                                     pass.sums, of_heads};
    multiply_heads(&product);
    for_each(all, tokens > FEW, end_value, &pass);
}
