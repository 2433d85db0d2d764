/* A decoder layer around its attention, for layer.c and blocks/float_layer.c: norms before and after both parts, rotary
 * positions, a feed-forward part with or without a gate. Everything here treats each token by itself, so its bits do not
 * depend on its neighbors.
 *
 * The file that includes this one defines before: `number`, the type of the hidden states; layer_type and cache_type;
 * load_number, store_number and round_number, of 16 numbers; rounds_first(norm); rotate(head, size, cosines, sines);
 * multiply_by(layer, linear, x, tokens, out, space); and multiply_by_experts(experts, x, routed, tokens, out, space).
 */
#include <math.h>

enum { FEW = 8 /* tokens that one thread finishes before a second one has started */ };

#include "mixer_steps.h"

static void normalize(const struct norm *norm, const number *x, int64_t size, number *out) {
    floats mean = all_floats(0), squares = all_floats(0);
    if (norm->is_centered) {
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

/* The activation of the gate [size] times the numbers of `up`; NULL: the activation. */
static void activate(const layer_type *layer, const number *gate, const number *up, int64_t size, number *out) {
    floats slope = all_floats(layer->slope), cubic = all_floats(layer->cubic);
    for (int64_t i = 0; i < size; i += LANES) {
        floats x = load_number(gate + i);
        floats z = multiply_floats(x, add_product(slope, multiply_floats(x, x), cubic));
        floats positive = max_floats(x, all_floats(0));
        floats y = round_number(layer->squares ? multiply_floats(positive, positive) : times_sigmoid(x, z));
        store_number(out + i, up ? multiply_floats(y, load_number(up + i)) : y);
    }
}

/* out = x plus the result y of a part of the layer, normalized if there is a norm; all [size]. */
static void add_residual(const layer_type *layer, const struct norm *norm, const number *x, number *y, number *out) {
    if (norm->weight) normalize(norm, y, layer->hidden, y);
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
    number *normed, *heads, *product, *both, *gated, *entering, *routed, *out;
    const cache_type *memory;
};

static void norm_token(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden;
    normalize(&of->layer->before_attention, of->hidden + t * width, width, of->normed + t * width);
}

/* Rotates the first numbers of a head, neighbors with each other or those of the two halves. */
static void rotate_head(const layer_type *layer, number *head, const number *cosines, const number *sines) {
    int64_t half = layer->rotated / 2;
    number halves[MAX_HEAD_SIZE];
    if (!layer->rotates_pairs) {
        rotate(head, layer->rotated, cosines, sines);
        return;
    }
    for (int64_t i = 0; i < half; i++) halves[i] = head[2 * i], halves[half + i] = head[2 * i + 1];
    rotate(halves, layer->rotated, cosines, sines);
    if (layer->parts_pairs) memcpy(head, halves, layer->rotated * sizeof *head);
    for (int64_t i = 0; i < half && !layer->parts_pairs; i++) head[2 * i] = halves[i], head[2 * i + 1] = halves[half + i];
}

#include "latent_steps.h"

static void rotate_token(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, all = heads_of_token(layer), rotated = layer->rotated;
    int64_t keys_too = layer->heads + (layer->reuses_keys ? 0 : layer->key_heads);
    number *queries = of->heads + t * all * size, *keys = queries + layer->heads * size;
    if (layer->norms_all_heads) {
        normalize(&layer->queries, queries, layer->heads * size, queries);
        normalize(&layer->keys, keys, layer->key_heads * size, keys);
    }
    for (int64_t h = 0; h < keys_too; h++) {
        const struct norm *norm = h < layer->heads ? &layer->queries : &layer->keys;
        number *head = queries + h * size;
        int is_normed = norm->weight && !layer->norms_all_heads;
        if (is_normed && !layer->rotates_first) normalize(norm, head, size, head);
        int64_t start = layer->grows_queries ? (2 * t + (h < layer->heads)) * rotated : t * rotated;
        if (rotated) rotate_head(layer, head, of->cosines + start, of->sines + start);
        if (is_normed && layer->rotates_first) normalize(norm, head, size, head);
    }
    number *values = keys + layer->key_heads * size;
    for (int64_t h = 0; layer->values.weight && h < layer->key_heads; h++)
        normalize(&layer->values, values + h * size, size, values + h * size);
}

static void end_attention(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t width = layer->hidden, start = t * width;
    if (layer->is_parallel) normalize(&layer->before_attention, of->hidden + start, width, of->normed + start);
    add_residual(layer, &layer->after_attention, of->hidden + start, of->product + start, of->out + start);
    if (layer->before_feed_forward.weight)
        normalize(&layer->before_feed_forward, of->out + start, width, of->normed + start);
}

static void activate_token(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t inner = of->layer->inner;
    const number *gate = of->both + t * (of->layer->is_gated ? 2 : 1) * inner;
    activate(of->layer, gate, of->layer->is_gated ? gate + inner : NULL, inner, of->gated + t * inner);
}

/* The norms of the inputs of experts that are added to a dense part. */
static void norm_for_experts(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden, start = t * width;
    normalize(&of->layer->before_experts, of->out + start, width, of->entering + start);
    normalize(&of->layer->before_router, of->out + start, width, of->routed + start);
}

/* Adds the dense part's result, in `normed`, to the experts' sum. */
static void add_dense(int64_t t, void *given) {
    const struct pass *of = given;
    const layer_type *layer = of->layer;
    int64_t width = layer->hidden;
    number *sum = of->product + t * width, *dense = of->normed + t * width;
    if (layer->after_experts.weight) normalize(&layer->after_experts, sum, width, sum);
    if (layer->after_dense.weight) normalize(&layer->after_dense, dense, width, dense);
    for (int64_t i = 0; i < width; i += LANES) store_number(sum + i, add_floats(load_number(dense + i), load_number(sum + i)));
}

static void scale_token(const layer_type *layer, number *out) {
    floats scale = all_floats(layer->scale);
    for (int64_t i = 0; layer->scale != 1 && i < layer->hidden; i += LANES)
        store_number(out + i, multiply_floats(load_number(out + i), scale));
}

static void end_feed_forward(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden;
    number *out = of->out + t * width;
    add_residual(of->layer, &of->layer->after_feed_forward, out, of->product + t * width, out);
    if (!of->layer->input_size) scale_token(of->layer, out);
}

static void gate_inputs(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t size = of->layer->input_size;
    number *gated = of->gated + t * size;
    activate(of->layer, gated, (const number *)of->memory->inputs + t * of->memory->input_step, size, gated);
}

static void end_inputs(int64_t t, void *given) {
    const struct pass *of = given;
    int64_t width = of->layer->hidden;
    number *out = of->out + t * width;
    add_residual(of->layer, &of->layer->after_input, out, of->product + t * width, out);
    scale_token(of->layer, out);
}

/* Adds to out [tokens][hidden] the contribution of a second embedding. */
static void add_inputs(const layer_type *layer, const cache_type *memory, int64_t tokens, number *out, number *space) {
    number *product = space + tokens * layer->input_size, *rest = product + tokens * layer->hidden;
    struct pass pass = {layer, .gated = space, .product = product, .out = out, .memory = memory};
    multiply_by(layer, &layer->input_gate, out, tokens, space, rest);
    for_each(tokens, tokens > FEW, gate_inputs, &pass);
    multiply_by(layer, &layer->input_projection, space, tokens, product, rest);
    for_each(tokens, tokens > FEW, end_inputs, &pass);
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

/* From hidden [tokens][hidden] and attention's output [tokens][heads][size] to the next layer's hidden, but for what a
 * second embedding adds. */
void residual_mlp(const layer_type *layer, const number *hidden, const number *attended, int64_t tokens, number *out,
                  number *space) {
    number *normed = space + tokens * layer->hidden, *both = normed + tokens * layer->hidden;
    number *gated = both + tokens * 2 * layer->inner, *rest = gated + tokens * layer->inner;
    struct pass pass = {layer, hidden, .normed = normed, .product = space, .both = both, .gated = gated, .out = out};
    const number *entering = layer->is_parallel || layer->before_feed_forward.weight ? normed : out;
    multiply_by(layer, &layer->out, attended, tokens, space, rest);
    for_each(tokens, tokens > FEW, end_attention, &pass);
    if (layer->experts && layer->before_experts.weight) {
        pass.entering = rest, pass.routed = rest + tokens * layer->hidden;
        for_each(tokens, tokens > FEW, norm_for_experts, &pass);
        multiply_by_experts(layer->experts, pass.entering, pass.routed, tokens, space, rest + 2 * tokens * layer->hidden);
    } else if (layer->experts) {
        multiply_by_experts(layer->experts, entering, NULL, tokens, space, rest);
    }
    if (layer->inner) {
        multiply_by(layer, &layer->gate_up, entering, tokens, both, rest);
        for_each(tokens, tokens > 1, activate_token, &pass);
        multiply_by(layer, &layer->down, gated, tokens, layer->experts ? normed : space, rest);
        if (layer->experts) for_each(tokens, tokens > FEW, add_dense, &pass);
    }
    for_each(tokens, tokens > FEW, end_feed_forward, &pass);
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

/* Scratch space for mixing tokens, in numbers. length: of the cache. */
static int64_t mixing_space(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t bytes = layer->mixer ? mixing_bytes(layer, tokens) : attention_bytes(layer, tokens, length);
    return bytes / (int64_t)sizeof(number);
}

/* The whole layer, attention included: from hidden [tokens][hidden] to the next layer's, which may take its place. */
void whole_layer(const layer_type *layer, const cache_type *memory, const number *hidden, int64_t tokens,
                 const number *cosines, const number *sines, number *out, number *space) {
    number *projected = space + mixing_space(layer, tokens, memory->length);
    number *attended = projected + tokens * layer->qkv.outputs, *rest = attended + tokens * layer->out.inputs;
    int is_gated = layer->gates_queries || layer->gate_size, is_parted = is_gated || layer->shares_values;
    number *heads = is_parted ? rest : projected;
    project(layer, hidden, tokens, projected, rest);
    if (layer->mixer) {
        mix(layer, memory, projected, tokens, attended, space);
    } else if (layer->latent) {
        number *of_product = rest + latent_bytes(layer, tokens) / (int64_t)sizeof *rest;
        attend_latent(layer, memory, projected, tokens, cosines, sines, attended, space, rest, of_product);
    } else {
        struct pass pass = {layer, .cosines = cosines, .sines = sines, .heads = heads};
        struct mixing mixing = {layer, projected, layer->qkv.outputs, .out = heads};
        if (is_parted) for_each(tokens, tokens > FEW, part_heads, &mixing);
        for_each(tokens, tokens > FEW, rotate_token, &pass);
        attend(layer, memory, heads, tokens, attended, space);
        mixing.out = attended;
        if (is_gated) for_each(tokens, tokens > FEW, gate_attended, &mixing);
    }
    residual_mlp(layer, hidden, attended, tokens, out, rest);
    if (layer->input_size) add_inputs(layer, memory, tokens, out, rest);
}

/* The arguments of `all_layers`. */
struct stack {
    const struct stacked_layer *layers;
    int64_t count;
    const cache_type *shared;
    number *hidden;
    int64_t tokens;
    const number *const *rotations;
    const struct norm *norm;
    number *space;
};

/* Copies the hidden states [tokens][width] that enter a layer to the places of their tokens in `entering`. */
static void keep_entering(number *entering, const cache_type *memory, const number *hidden, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens; t++) {
        int64_t to = memory->slots[t] * memory->length + memory->places[t];
        memcpy(entering + to * width, hidden + t * width, width * sizeof *hidden);
    }
}

/* out = the norm of x, both [tokens][size]. */
void normalize_tokens(const struct norm *norm, const number *x, int64_t tokens, int64_t size, number *out) {
    for (int64_t t = 0; t < tokens; t++) normalize(norm, x + t * size, size, out + t * size);
}

static void compute_layers(void *given) {
    const struct stack *stack = given;
    for (const struct stacked_layer *of = stack->layers; of < stack->layers + stack->count; of++) {
        cache_type memory = *stack->shared;
        memory.keys = of->keys, memory.values = of->values;
        memory.length = of->length, memory.window = of->window, memory.scaling = of->scaling;
        const number *const *own = stack->rotations + 2 * of->rotation;
        const layer_type *layer = of->layer;
        int64_t width = layer->hidden;
        if (layer->input_size) memory.inputs = (const number *)memory.inputs + (of - stack->layers) * layer->input_size;
        if (of->entering) keep_entering(of->entering, &memory, stack->hidden, stack->tokens, width);
        whole_layer(layer, &memory, stack->hidden, stack->tokens, own[0], own[1], stack->hidden, stack->space);
    }
    if (!stack->norm) return;
    const struct stacked_layer *end = stack->layers + stack->count;
    int64_t width = ((const layer_type *)stack->layers->layer)->hidden;
    cache_type memory = *stack->shared;
    memory.length = end->length;
    if (end->entering) keep_entering(end->entering, &memory, stack->hidden, stack->tokens, width);
    normalize_tokens(stack->norm, stack->hidden, stack->tokens, width, stack->hidden);
}

/* All layers of a model: hidden [tokens][hidden] becomes the output of the last one or, with a norm, that norm of it;
 * layers[count] then has the place for what enters the norm. shared: the cache, but for keys, values, length, window and
 * scaling, which each layer has of its own; a second embedding's numbers for each layer follow those for the one before.
 * rotations: cosines and sines of each kind. space: for the layer that needs the most, see `layer_scratch`. */
void all_layers(const struct stacked_layer *layers, int64_t count, const cache_type *shared, number *hidden,
                int64_t tokens, const number *const *rotations, const struct norm *norm, number *space) {
    struct stack stack = {layers, count, shared, hidden, tokens, rotations, norm, space};
    keep_team(compute_layers, &stack);
}

/* The largest number of inputs of a product of a layer. */
static int64_t widest(const layer_type *layer) {
    int64_t most = layer->out.inputs > layer->queries_up.inputs ? layer->out.inputs : layer->queries_up.inputs;
    if (layer->inner > most) most = layer->inner;
    if (layer->input_size > most) most = layer->input_size;
    return layer->hidden > most ? layer->hidden : most;
}

/* How many numbers of scratch space these functions need, besides that of a product. length: of the cache; 0 for
 * functions without one. */
static int64_t numbers_needed(const layer_type *layer, int64_t tokens, int64_t length) {
    int64_t both = layer->qkv.outputs + layer->out.inputs, rest = 2 * layer->hidden + 3 * layer->inner + layer->input_size;
    if (layer->gates_queries || layer->gate_size || layer->shares_values) both += (layer->heads + 2 * layer->key_heads) * layer->size;
    if (layer->before_experts.weight) rest += 2 * layer->hidden;
    int64_t of_latent = latent_bytes(layer, tokens) / (int64_t)sizeof(number);
    return mixing_space(layer, tokens, length) + tokens * (both + rest) + of_latent;
}
