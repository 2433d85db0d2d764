/* A decoder layer around its attention, for layer.c and blocks/float_layer.c: norms before and after both parts, rotary
 * positions, a feed-forward part with or without a gate. Everything here treats each token by itself, so its bits do not
 * depend on its neighbours.
 *
 * The file that includes this one defines before: `number`, the type of the hidden states; layer_type and cache_type;
 * load_number, store_number and round_number, of 16 numbers; rounds_first(norm); rotate(head, size, cosines, sines);
 * multiply_by(layer, linear, x, tokens, out, space); and multiply_by_experts(experts, x, tokens, out, space).
 */
#include <math.h>

enum { FEW = 8 /* tokens that one thread finishes before a second one has started */ };

#include "mixer_steps.h"

static void normalise(const struct norm *norm, const number *x, int64_t size, number *out) {
    floats mean = all_floats(0), squares = all_floats(0);
    if (norm->is_centred) {
        for (int64_t i = 0; i < size; i += LANES) mean = add_floats(mean, load_number(x + i));
        mean = all_floats(sum_of(mean) / (float)size);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = subtract_floats(load_number(x + i), mean);
        squares = add_product(squares, y, y);
    }
    floats scale = all_floats(1 / sqrtf(sum_of(squares) / (float)size + norm->eps));
    for (int64_t i = 0; i < size; i += LANES) {
        floats y = multiply_floats(subtract_floats(load_number(x + i), mean), scale);
        if (rounds_first(norm)) y = round_number(y);
        y = multiply_floats(y, load_floats(norm->weight + i));
        store_number(out + i, norm->bias ? add_floats(y, load_floats(norm->bias + i)) : y);
    }
}

/* The activation of the gate [inner] times the up projection [inner] that follows it; without a gate, the activation. */
static void activate(const layer_type *layer, const number *both, number *out) {
    floats one = all_floats(1), slope = all_floats(layer->slope), cubic = all_floats(layer->cubic);
    for (int64_t i = 0; i < layer->inner; i += LANES) {
        floats x = load_number(both + i);
        floats z = multiply_floats(x, add_product(slope, multiply_floats(x, x), cubic));
        z = max_floats(min_floats(subtract_floats(all_floats(0), z), all_floats(88)), all_floats(-86));
        floats y = round_number(divide_floats(x, add_floats(one, exponential(z))));
        store_number(out + i, layer->is_gated ? multiply_floats(y, load_number(both + layer->inner + i)) : y);
    }
}

/* out = x plus what a part of the layer has computed, all [size]: y, put through the norm if there is one. */
static void add_residual(const layer_type *layer, const struct norm *norm, const number *x, number *y, number *out) {
    if (norm->weight) normalise(norm, y, layer->hidden, y);
    for (int64_t i = 0; i < layer->hidden; i += LANES) {
        floats added = load_number(y + i);
        if (layer->residual != 1) added = round_number(multiply_floats(added, all_floats(layer->residual)));
        store_number(out + i, add_floats(load_number(x + i), added));
    }
}

/* A forward of some tokens through the layer; the pointers that a step needs. */
struct pass {
    const layer_type *layer;
    const number *hidden, *cosines, *sines;
    number *normed, *heads, *product, *both, *gated, *out;
};

static void norm_token(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden;
    normalise(&of->layer->before_attention, of->hidden + t * width, width, of->normed + t * width);
}

/* Rotates the first numbers of a head, neighbours with each other or those of the two halves. */
static void rotate_head(const layer_type *layer, number *head, const number *cosines, const number *sines) {
    int64_t half = layer->rotated / 2;
    number halves[MAX_HEAD_SIZE];
    if (!layer->rotates_pairs) {
        rotate(head, layer->rotated, cosines, sines);
        return;
    }
    for (int64_t i = 0; i < half; i++) halves[i] = head[2 * i], halves[half + i] = head[2 * i + 1];
    rotate(halves, layer->rotated, cosines, sines);
    for (int64_t i = 0; i < half; i++) head[2 * i] = halves[i], head[2 * i + 1] = halves[half + i];
}

static void rotate_token(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, all = layer->heads + 2 * layer->key_heads, rotated = layer->rotated;
    number *queries = of->heads + t * all * size, *keys = queries + layer->heads * size;
    if (layer->norms_all_heads) {
        normalise(&layer->queries, queries, layer->heads * size, queries);
        normalise(&layer->keys, keys, layer->key_heads * size, keys);
    }
    for (int64_t h = 0; h < layer->heads + layer->key_heads; h++) {
        const struct norm *norm = h < layer->heads ? &layer->queries : &layer->keys;
        number *head = queries + h * size;
        if (norm->weight && !layer->norms_all_heads) normalise(norm, head, size, head);
        int64_t start = layer->grows_queries ? (2 * t + (h < layer->heads)) * rotated : t * rotated;
        if (rotated) rotate_head(layer, head, of->cosines + start, of->sines + start);
    }
}

static void end_attention(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t width = layer->hidden, start = t * width;
    if (layer->is_parallel) normalise(&layer->before_attention, of->hidden + start, width, of->normed + start);
    add_residual(layer, &layer->after_attention, of->hidden + start, of->product + start, of->out + start);
    if (layer->before_feed_forward.weight)
        normalise(&layer->before_feed_forward, of->out + start, width, of->normed + start);
}

static void activate_token(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t inner = of->layer->inner;
    activate(of->layer, of->both + t * (of->layer->is_gated ? 2 : 1) * inner, of->gated + t * inner);
}

static void end_layer(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t start = t * of->layer->hidden;
    add_residual(of->layer, &of->layer->after_feed_forward, of->out + start, of->product + start, of->out + start);
}

/* The norm and the first product: out [tokens][outputs]. space: see `layer_scratch`. */
static void project(const layer_type *layer, const number *hidden, int64_t tokens, number *out, number *space) {
    struct pass pass = {layer, hidden, .normed = space};
    const number *entering = layer->before_attention.weight ? space : hidden;
    if (entering == space) for_each(tokens, tokens > FEW, norm_token, &pass);
    multiply_by(layer, &layer->qkv, entering, tokens, out, space + tokens * layer->hidden);
}

/* From hidden [tokens][hidden] to queries, keys and values [tokens][heads + 2 * key_heads][size] for attention.
 * cosines, sines: [tokens][rotated], or [tokens][2][rotated] for keys and queries. space: see `layer_scratch`. */
void project_qkv_rope(const layer_type *layer, const number *hidden, int64_t tokens, const number *cosines,
                      const number *sines, number *out, number *space) {
    struct pass pass = {layer, hidden, cosines, sines, .heads = out};
    project(layer, hidden, tokens, out, space);
    for_each(tokens, tokens > FEW, rotate_token, &pass);
}

/* From hidden [tokens][hidden] and attention's output [tokens][heads][size] to the next layer's hidden. */
void residual_mlp(const layer_type *layer, const number *hidden, const number *attended, int64_t tokens, number *out,
                  number *space) {
    number *normed = space + tokens * layer->hidden, *both = normed + tokens * layer->hidden;
    number *gated = both + tokens * 2 * layer->inner, *rest = gated + tokens * layer->inner;
    struct pass pass = {layer, hidden, .normed = normed, .product = space, .both = both, .gated = gated, .out = out};
    const number *entering = layer->is_parallel || layer->before_feed_forward.weight ? normed : out;
    multiply_by(layer, &layer->out, attended, tokens, space, rest);
    for_each(tokens, tokens > FEW, end_attention, &pass);
    if (layer->experts) {
        multiply_by_experts(layer->experts, entering, tokens, space, rest);
    } else {
        multiply_by(layer, &layer->gate_up, entering, tokens, both, rest);
        for_each(tokens, tokens > 1, activate_token, &pass);
        multiply_by(layer, &layer->down, gated, tokens, space, rest);
    }
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

/* Numbers of scratch space of whatever mixes the tokens. length: of the cache. */
static int64_t mixing_space(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t bytes = layer->mixer ? mixing_bytes(layer, tokens) : attention_bytes(layer, tokens, length);
    return bytes / (int64_t)sizeof(number);
}

/* The whole layer, attention included: from hidden [tokens][hidden] to the next layer's, which may take its place. */
void whole_layer(const layer_type *layer, const cache_type *memory, const number *hidden, int64_t tokens,
                 const number *cosines, const number *sines, number *out, number *space) {
    number *projected = space + mixing_space(layer, tokens, memory->length);
    number *attended = projected + tokens * layer->qkv.outputs, *rest = attended + tokens * layer->out.inputs;
    number *heads = layer->gates_queries ? rest : projected;
    project(layer, hidden, tokens, projected, rest);
    if (layer->mixer) {
        mix(layer, memory, projected, tokens, attended, space);
    } else {
        struct pass pass = {layer, .cosines = cosines, .sines = sines, .heads = heads};
        struct mixing mixing = {layer, projected, layer->qkv.outputs, .out = heads};
        if (layer->gates_queries) for_each(tokens, tokens > FEW, part_queries, &mixing);
        for_each(tokens, tokens > FEW, rotate_token, &pass);
        attend(layer, memory, heads, tokens, attended, space);
        mixing.out = attended;
        if (layer->gates_queries) for_each(tokens, tokens > FEW, gate_attended, &mixing);
    }
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
void normalise_tokens(const struct norm *norm, const number *x, int64_t tokens, int64_t size, number *out) {
    for (int64_t t = 0; t < tokens; t++) normalise(norm, x + t * size, size, out + t * size);
}

/* The largest number of inputs of a product of a layer. */
static int64_t widest(const layer_type *layer) {
    int64_t most = layer->out.inputs;
    if (layer->inner > most) most = layer->inner;
    return layer->hidden > most ? layer->hidden : most;
}

/* How many numbers of scratch space these functions need, besides that of a product. length: of the cache; 0 for
 * functions without one. */
static int64_t numbers_needed(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t both = layer->qkv.outputs + layer->out.inputs, rest = 2 * layer->hidden + 3 * layer->inner;
    if (layer->gates_queries) both += layer->qkv.outputs;
    return mixing_space(layer, tokens, length) + tokens * (both + rest);
}
