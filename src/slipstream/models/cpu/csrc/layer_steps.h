/* A decoder layer around its attention, for layer.c and blocks/float_layer.c: pre-norm, rotary positions, a gated
 * feed-forward part. Everything here treats each token by itself, so its bits do not depend on its neighbours.
 *
 * The file that includes this one defines before: `number`, the type of the hidden states; layer_type, cache_type and
 * norm_type; load_number, store_number and round_number, of 16 numbers; rounds_first(norm); rotate(head, size, cosines,
 * sines); and multiply_by(layer, linear, x, tokens, out, space).
 */
#include <math.h>

enum { FEW = 8 /* tokens that one thread finishes before a second one has started */ };

static void normalise(const norm_type *norm, const number *x, int64_t size, number *out) {
    floats squares = all_floats(0);
    for (int64_t i = 0; i < size; i += LANES) squares = add_product(squares, load_number(x + i), load_number(x + i));
    floats scale = all_floats(1 / sqrtf(sum_of(squares) / (float)size + norm->eps));
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = multiply_floats(load_number(x + i), scale);
        if (rounds_first(norm)) y = round_number(y);
        store_number(out + i, multiply_floats(y, load_floats(norm->weight + i)));
    }
}

/* The activation of the gate [inner] times the up projection [inner] that follows it. */
static void activate_gate(const layer_type *layer, const number *both, number *out) {
    floats one = all_floats(1), slope = all_floats(layer->slope), cubic = all_floats(layer->cubic);
    for (int64_t i = 0; i < layer->inner; i += LANES) {
        floats x = load_number(both + i), up = load_number(both + layer->inner + i);
        floats z = multiply_floats(x, add_product(slope, multiply_floats(x, x), cubic));
        z = max_floats(min_floats(subtract_floats(all_floats(0), z), all_floats(88)), all_floats(-86));
        floats gate = round_number(divide_floats(x, add_floats(one, exponential(z))));
        store_number(out + i, multiply_floats(gate, up));
    }
}

/* out = x + y, all [size]; y goes through the norm first if there is one. */
static void add_residual(const norm_type *norm, const number *x, number *y, int64_t size, number *out) {
    if (norm->weight) normalise(norm, y, size, y);
    for (int64_t i = 0; i < size; i += LANES) store_number(out + i, add_floats(load_number(x + i), load_number(y + i)));
}

/* A forward of some tokens through the layer; the pointers that a step needs. */
struct pass {
    const layer_type *layer;
    const number *hidden, *cosines, *sines;
    number *normed, *heads, *both, *gated, *out;
};

static void norm_token(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden;
    normalise(&of->layer->before_attention, of->hidden + t * width, width, of->normed + t * width);
}

static void rotate_token(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, all = layer->heads + 2 * layer->key_heads;
    for (int64_t h = 0; h < layer->heads + layer->key_heads; h++) {
        const norm_type *norm = h < layer->heads ? &layer->queries : &layer->keys;
        number *head = of->heads + (t * all + h) * size;
        if (norm->weight) normalise(norm, head, size, head);
        rotate(head, size, of->cosines + t * size, of->sines + t * size);
    }
}

static void end_attention(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden, start = t * width;
    add_residual(&of->layer->after_attention, of->hidden + start, of->normed + start, width, of->out + start);
    normalise(&of->layer->before_feed_forward, of->out + start, width, of->normed + start);
}

static void gate_token(int64_t t, void *given) {
    const struct pass *of = given;
    activate_gate(of->layer, of->both + t * 2 * of->layer->inner, of->gated + t * of->layer->inner);
}

static void end_layer(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden, start = t * width;
    add_residual(&of->layer->after_feed_forward, of->out + start, of->normed + start, width, of->out + start);
}

/* From hidden [tokens][hidden] to queries, keys and values [tokens][heads + 2 * key_heads][size] for attention.
 * cosines, sines: [tokens][size]. space: see `layer_scratch`. */
void project_qkv_rope(const layer_type *layer, const number *hidden, int64_t tokens, const number *cosines,
                      const number *sines, number *out, number *space) {
    struct pass pass = {layer, hidden, cosines, sines, .normed = space, .heads = out};
    for_each(tokens, tokens > FEW, norm_token, &pass);
    multiply_by(layer, &layer->qkv, space, tokens, out, space + tokens * layer->hidden);
    for_each(tokens, tokens > FEW, rotate_token, &pass);
}

/* From hidden [tokens][hidden] and attention's output [tokens][heads][size] to the next layer's hidden. */
void residual_mlp(const layer_type *layer, const number *hidden, const number *attended, int64_t tokens, number *out,
                  number *space) {
    number *both = space + tokens * layer->hidden, *gated = both + tokens * 2 * layer->inner;
    number *rest = gated + tokens * layer->inner;
    struct pass pass = {layer, hidden, .normed = space, .both = both, .gated = gated, .out = out};
    multiply_by(layer, &layer->out, attended, tokens, space, rest);
    for_each(tokens, tokens > FEW, end_attention, &pass);
    multiply_by(layer, &layer->gate_up, space, tokens, both, rest);
    for_each(tokens, tokens > 1, gate_token, &pass);
    multiply_by(layer, &layer->down, gated, tokens, space, rest);
    for_each(tokens, tokens > FEW, end_layer, &pass);
}

/* The layer after its first product, attention included. heads [tokens][heads + 2 * key_heads][size]: queries, keys and
 * values, rotated in place. out may be hidden. */
void finish_layer(const layer_type *layer, const cache_type *memory, const number *hidden, number *heads, int64_t tokens,
                  const number *cosines, const number *sines, number *out, number *space) {
    number *attended = space + attention_bytes(layer, tokens, memory->length) / (int64_t)sizeof *space;
    struct pass pass = {layer, .cosines = cosines, .sines = sines, .heads = heads};
    for_each(tokens, tokens > FEW, rotate_token, &pass);
    attend(layer, memory, heads, tokens, attended, space);
    residual_mlp(layer, hidden, attended, tokens, out, attended + tokens * layer->heads * layer->size);
}

/* The whole layer, attention included: from hidden [tokens][hidden] to the next layer's, which may take its place. */
void whole_layer(const layer_type *layer, const cache_type *memory, const number *hidden, int64_t tokens,
                 const number *cosines, const number *sines, number *out, number *space) {
    number *heads = space + attention_bytes(layer, tokens, memory->length) / (int64_t)sizeof *space;
    number *attended = heads + tokens * (layer->heads + 2 * layer->key_heads) * layer->size;
    number *rest = attended + tokens * layer->heads * layer->size;
    project_qkv_rope(layer, hidden, tokens, cosines, sines, heads, rest);
    attend(layer, memory, heads, tokens, attended, space);
    residual_mlp(layer, hidden, attended, tokens, out, rest);
}

/* The arguments of `all_layers`. */
struct stack {
    const struct stacked_layer *layers;
    int64_t count;
    const cache_type *shared;
    number *hidden;
    int64_t tokens;
    const number *const *rotations;
    number *space;
};

/* Copies the hidden states [tokens][width] that enter a layer to the places of their tokens in `entering`. */
static void keep_entering(number *entering, const cache_type *memory, const number *hidden, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens; t++) {
        int64_t to = memory->slots[t] * memory->length + memory->places[t];
        memcpy(entering + to * width, hidden + t * width, width * sizeof *hidden);
    }
}

static void compute_layers(void *given) {
    const struct stack *stack = given;
    for (const struct stacked_layer *of = stack->layers; of < stack->layers + stack->count; of++) {
        cache_type memory = *stack->shared;
        memory.keys = of->keys, memory.values = of->values;
        memory.length = of->length, memory.window = of->window, memory.scaling = of->scaling;
        const number *const *own = stack->rotations + 2 * of->rotation;
        int64_t width = ((const layer_type *)of->layer)->hidden;
        if (of->entering) keep_entering(of->entering, &memory, stack->hidden, stack->tokens, width);
        whole_layer(of->layer, &memory, stack->hidden, stack->tokens, own[0], own[1], stack->hidden, stack->space);
    }
}

/* All layers of a model: hidden [tokens][hidden] becomes the output of the last one. shared: the cache, but for keys,
 * values, length, window and scaling, which each layer has of its own. rotations: cosines and sines of each kind.
 * space: for the layer that needs the most, see `layer_scratch`. */
void all_layers(const struct stacked_layer *layers, int64_t count, const cache_type *shared, number *hidden,
                int64_t tokens, const number *const *rotations, number *space) {
    struct stack stack = {layers, count, shared, hidden, tokens, rotations, space};
    keep_team(compute_layers, &stack);
}

/* out = the norm of x, both [tokens][size]. */
void normalise_tokens(const norm_type *norm, const number *x, int64_t tokens, int64_t size, number *out) {
    for (int64_t t = 0; t < tokens; t++) normalise(norm, x + t * size, size, out + t * size);
}

/* The largest number of inputs of a product of a layer. */
static int64_t widest(const layer_type *layer) {
    int64_t most = layer->heads * layer->size;
    if (layer->inner > most) most = layer->inner;
    return layer->hidden > most ? layer->hidden : most;
}

/* How many numbers of scratch space these functions need, besides that of a product. length: of the cache; 0 for
 * functions without one. */
static int64_t numbers_needed(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t heads = (2 * layer->heads + 2 * layer->key_heads) * layer->size;
    return attention_bytes(layer, tokens, length) / (int64_t)sizeof(number) + tokens * (heads + layer->hidden + 3 * layer->inner);
}
