/* Alternatives to plain attention, for layer_steps.h: recurrent mixers, and queries with gates. The recurrence itself is
 * in recurrence.c. Everything here treats each token by itself.
 */

/* A forward of some tokens through a mixer. x [tokens][width]: what the layer's first product has given. inputs [tokens]
 * [inputs], mixed [tokens][outputs]: what the recurrence takes and gives. */
struct mixing {
    const layer_type *layer;
    const number *x;
    int64_t width;
    number *inputs, *out;
    float *mixed;
};

static int64_t outputs_of(const struct recurrence *r) { return r->heads ? r->heads * r->value_size : r->channels; }

static void take_inputs(int64_t t, void *given) {
    const struct mixing *of = given;
    const struct mixer *m = of->layer->mixer;
    const struct recurrence *r = m->recurrence;
    const number *x = of->x + t * of->width;
    number *to = of->inputs + t * r->inputs;
    memcpy(to, x + m->channels, r->channels * sizeof *to);
    for (int64_t i = 0; m->factors >= 0 && i < r->channels; i += LANES)
        store_number(to + i, multiply_floats(load_number(to + i), load_number(x + m->factors + i)));
    memcpy(to + r->channels, x + m->gates, (r->inputs - r->channels) * sizeof *to);
}

/* The outputs of a group, normalized and multiplied by their gates z, before or after. */
static void gate_group(const struct mixer *m, float *y, const number *z, const float *weight, number *out) {
    floats squares = all_floats(0);
    for (int64_t i = 0; i < m->group; i += LANES) {
        floats x = load_floats(y + i), gate = load_number(z + i);
        x = m->gates_first ? multiply_floats(x, times_sigmoid(gate, gate)) : round_number(x);
        squares = add_product(squares, x, x);
        store_floats(y + i, x);
    }
    floats scale = all_floats(1 / sqrtf(sum_of(squares) / (float)m->group + m->eps));
    for (int64_t i = 0; i < m->group; i += LANES) {
        floats x = multiply_floats(load_floats(y + i), scale), gate = load_number(z + i), w = load_floats(weight + i);
        if (m->gates_first) x = multiply_floats(x, w);
        else x = multiply_floats(round_number(multiply_floats(round_number(x), w)), times_sigmoid(gate, gate));
        store_number(out + i, x);
    }
}

static void gate_outputs(int64_t t, void *given) {
    const struct mixing *of = given;
    const struct mixer *m = of->layer->mixer;
    int64_t outputs = outputs_of(m->recurrence);
    const number *z = of->x + t * of->width + m->rest;
    float *y = of->mixed + t * outputs;
    number *out = of->out + t * outputs;
    for (int64_t i = 0; !m->norm && i < outputs; i += LANES)
        store_number(out + i, multiply_floats(load_number(z + i), round_number(load_floats(y + i))));
    for (int64_t g = 0; m->norm && g < outputs / m->group; g++) {
        int64_t first = g * m->group, place = m->places ? m->places[g] : g;
        gate_group(m, y + first, z + first, m->norm + (m->gates_first ? first : 0), out + place * m->group);
    }
}

/* Bytes of scratch space that `mix` needs, a multiple of 64. */
static int64_t mixing_bytes(const layer_type *layer, int64_t tokens) {
    const struct recurrence *r = layer->mixer->recurrence;
    int64_t bytes = tokens * (outputs_of(r) * (int64_t)sizeof(float) + r->inputs * (int64_t)sizeof(number));
    return (bytes + 63) / 64 * 64;
}

/* x [tokens][outputs of the first product] -> out [tokens][inputs of the second]. */
static void mix(const layer_type *layer, const cache_type *memory, const number *x, int64_t tokens, number *out, void *space) {
    const struct recurrence *r = layer->mixer->recurrence;
    float *mixed = space;
    number *inputs = (number *)(mixed + tokens * outputs_of(r));
    struct mixing mixing = {layer, x, layer->qkv.outputs, inputs, out, mixed};
    for_each(tokens, tokens > FEW, take_inputs, &mixing);
    advance_states(r, memory->segments, memory->rows, inputs, memory->keys, (float *)(void *)memory->values, mixed);
    for_each(tokens, tokens > FEW, gate_outputs, &mixing);
}

/* For layers with gates, or whose keys are also the values: copies queries, keys and values to where attention expects
 * them. */
static void part_heads(int64_t t, void *given) {
    const struct mixing *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, keys = layer->key_heads * size, step = layer->gates_queries ? 2 * size : size;
    const number *x = of->x + t * of->width, *key = x + layer->heads * step;
    number *to = of->out + t * (layer->heads * size + 2 * keys), *to_key = to + layer->heads * size;
    for (int64_t h = 0; h < layer->heads; h++) memcpy(to + h * size, x + h * step, size * sizeof *to);
    memcpy(to_key, key, keys * sizeof *to);
    memcpy(to_key + keys, layer->shares_values ? key : key + keys, keys * sizeof *to);
}

/* Multiplies attention's output by the sigmoids of the gates. */
static void gate_attended(int64_t t, void *given) {
    const struct mixing *of = given;
    const layer_type *layer = of->layer;
    int64_t size = layer->size, heads = layer->heads, gates = layer->gate_size;
    const number *x = of->x + t * of->width, *last = x + (heads + 2 * layer->key_heads) * size;
    for (int64_t h = 0; h < heads; h++) {
        const number *gate = gates ? last + h * gates : x + (2 * h + 1) * size;
        number *out = of->out + (t * heads + h) * size, same[LANES];
        for (int i = 0; i < LANES; i++) same[i] = *gate;
        for (int64_t i = 0; i < size; i += LANES) {
            floats factor = round_number(times_sigmoid(all_floats(1), load_number(gates == 1 ? same : gate + i)));
            store_number(out + i, multiply_floats(load_number(out + i), factor));
        }
    }
}
