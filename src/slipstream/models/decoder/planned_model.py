"""A model built from the plan of its family, without transformers, which takes seconds to import.

Modules, parameters and calls are named as in transformers, so kernels, draft heads and loaders treat both alike.
transformers' own model is the specification.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from slipstream.models.cpu.block_experts import EmptyExperts
from slipstream.models.cpu.block_linear import ScaledEmbedding
from slipstream.models.cpu.latent_heads import latent_of
from slipstream.models.decoder.around_layers import STATIC, layer_inputs
from slipstream.models.decoder.attention import GROUPED, MaskBuilder
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.families import plan_of
from slipstream.models.decoder.fused_layer import FusedLayer, fused_layers
from slipstream.models.decoder.plan import LayerPlan, NormPlan, UnknownLayerError
from slipstream.models.decoder.planned_attention import Keys, PlannedAttention
from slipstream.models.decoder.recurrent_mixers import recurrent_states
from slipstream.models.decoder.rotary import LONGROPE, RotaryAngles

FULL = "full_attention"
LATENT_NORM = NormPlan(1e-6)  # transformers' classes take no other epsilon
# types whose plan describes the whole model, with transformers' class; tests compare both
PLANNED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}


class Configuration(SimpleNamespace):
    """The fields of a model's configuration, with the methods of transformers' class that Slipstream calls."""

    _attn_implementation = GROUPED

    @property
    def architectures(self) -> list[str]:
        """The name of transformers' class for the model."""
        return [PLANNED[self.model_type]]

    @property
    def is_heterogeneous(self) -> bool:
        """True if layers without a window have heads of their own."""
        return hasattr(self, "global_head_dim")

    @property
    def per_layer_config(self) -> list[SimpleNamespace]:
        """The heads of each layer of such a model."""
        of_windows = {"head_dim": self.head_dim, "num_key_value_heads": self.num_key_value_heads}
        key_heads = self.num_global_key_value_heads or self.num_key_value_heads
        of_others = {"head_dim": self.global_head_dim, "num_key_value_heads": key_heads}
        return [SimpleNamespace(**(of_others if kind == FULL else of_windows)) for kind in self.layer_types]

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """Of each layer: "reuse" if it has no keys, "store" if it is the last of its type that has keys."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        last = {kind: index for index, kind in enumerate(self.layer_types[:first])}
        stored = [*last.values()]
        return ["reuse" if i >= first else "store" if i in stored else None for i in range(self.num_hidden_layers)]

    def get_text_config(self, decoder: bool | None = None) -> Configuration:
        """The configuration itself: it describes only a language model."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def planned_model(settings: Mapping[str, Any]) -> PlannedModel | None:
    """The empty model of a configuration with these fields; None if no plan describes the whole model."""
    rope_types = {rope["rope_type"] for rope in _ropes(settings).values()}
    if settings["model_type"] not in PLANNED or not rope_types <= STATIC | {LONGROPE}:
        return None
    try:
        model = PlannedModel(settings)
    except UnknownLayerError:
        return None
    latent = model.plan.layers[0].latent
    is_computed = latent is None or latent_of(model.config, f"layers.0.{latent.heads}") is not None
    return model if is_computed else None


class PlannedModel(nn.Module):
    """A decoder of one of the types `PLANNED`, on the device "meta" until its tensors are filled in."""

    generation_config: Any = None  # the settings of its checkpoint
    drops_cache = True  # if its rotations depend on the length of the text, as only those of Phi 3 do

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: the fields of its configuration."""
        super().__init__()
        self._dtype = torch.float32
        self.config = Configuration(**settings)
        # this module's angles come in halves, whatever the order of transformers'
        plan = plan_of(self.config, MaskBuilder(self).windows)
        self.plan = plan.with_layers(angles_in_pairs=False, angles_of_pairs=False)
        self._fused: list[tuple[nn.Module, FusedLayer]] = []
        hidden, vocabulary = self.config.hidden_size, self.config.vocab_size
        is_gemma = self.config.model_type.startswith("gemma")
        decoder = nn.Module()
        decoder.embed_tokens = _embedding(vocabulary, hidden, hidden**0.5 if is_gemma else 1.0)
        decoder.layers = nn.ModuleList(_layer(plan, settings) for plan in self.plan.layers)
        _put(decoder, self.plan.last_norm, PlannedNorm(hidden, self.plan.norm, has_bias=_has_norm_bias(settings)))
        kinds = zip(_kinds(settings), self.plan.layers, strict=True)
        sizes = {kind: layer.rotated if layer.latent else layer.size for kind, layer in kinds}
        is_complex = self.config.model_type == "deepseek_v2"
        _put(decoder, self.plan.rotary, RotaryAngles(_ropes(settings), sizes, is_complex=is_complex))
        if (second := self.plan.second_embedding) is not None:
            numbers = len(self.plan.layers) * second.size
            table = _embedding(settings["vocab_size_per_layer_input"], numbers, second.size**0.5)
            _put(decoder, second.embedding, table)
            _put(decoder, second.projection, _empty_linear(hidden, numbers, has_bias=False))
            _put(decoder, second.norm, PlannedNorm(second.size, self.plan.norm))
        self.model: Any = decoder
        self.lm_head: Any = _empty_linear(hidden, vocabulary, has_bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it computes."""
        return self._dtype

    def compute_on(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute on this device, where its tensors have been placed, in this type."""
        self._dtype = dtype
        self.model.get_submodule(self.plan.rotary).compute_on(device)

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.parameters()).device

    def get_decoder(self) -> nn.Module:
        """Everything except the output layer."""
        module: nn.Module = self.model
        return module

    def get_input_embeddings(self) -> Any:
        """The embedding of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The layer that gives the logits."""
        return self.lm_head

    def set_input_embeddings(self, embedding: nn.Module) -> None:
        self.model.embed_tokens = embedding

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def new_cache(self) -> SlotCache:
        """An empty cache, with the states of any recurrent layers."""
        cache = SlotCache(len(self.plan.layers))
        cache.states = recurrent_states(self)
        return cache

    def linear_calls(self) -> list[tuple[nn.Linear, Tensor]]:
        """The result of `fused_linear.linear_calls`, which needs a forward, derived without one."""
        calls: list[tuple[nn.Linear, Tensor]] = []
        for layer, plan in zip(self.model.layers, self.plan.layers, strict=True):
            up = plan.latent and plan.latent.queries_up
            after = (None, None) if plan.input is None else (plan.input.gate, plan.input.projection)
            for paths in (plan.qkv, (up,), (plan.out,), plan.gate_up, (plan.down,), *zip(after)):
                entering = torch.empty(0)
                calls += [(layer.get_submodule(path), entering) for path in paths if path is not None]
        second = self.plan.second_embedding
        around = [] if second is None else [self.model.get_submodule(second.projection)]
        return [*calls, *((linear, torch.empty(0)) for linear in (*around, self.lm_head))]

    def fused_layers(self) -> list[tuple[nn.Module, FusedLayer]]:
        """The layers and their forwards, which run PyTorch's operators until `use_compiled_ops` replaces them."""
        if not self._fused:
            self._fused = fused_layers(self, self.plan)
            for layer, forward in self._fused:
                layer.forward = forward
        return self._fused

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: SlotCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> SimpleNamespace:
        """Logits of tokens [B, W], layer by layer; without a cache the tokens are complete sequences."""
        self.fused_layers()  # gives them their forward
        if past_key_values is None or position_ids is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            past_key_values, position_ids = self.new_cache(), positions
            position_ids = position_ids.expand(input_ids.shape)
            past_key_values.reserve(*input_ids.shape)
            attended = past_key_values.place(0, [0] * len(input_ids), position_ids)
            masks, states = MaskBuilder(self), past_key_values.states
            build = masks.build if states is None else masks.build_hybrid
            attention_mask = build(position_ids, torch.arange(attended, device=input_ids.device))
            if states is not None:
                states.begin(0, [0] * len(input_ids), input_ids.shape[1])
        hidden = self.plan.enter(self.model.embed_tokens(input_ids))
        kinds = _kinds(vars(self.config))
        rotary = self.model.get_submodule(self.plan.rotary)
        ropes = {kind: rotary(hidden, position_ids, layer_type=kind) for kind in set(kinds)}
        further: list[tuple[Tensor, ...]] = [()] * len(kinds)
        if (second := self.plan.second_embedding) is not None:
            norm = self.model.get_submodule(second.norm)
            further = [(part,) for part in layer_inputs(self.model, self.plan, input_ids, hidden, norm).unbind(2)]
        shared = dict[int, Keys]()
        for layer, kind, inputs in zip(self.model.layers, kinds, further, strict=True):
            hidden = layer(
                hidden,
                *inputs,
                shared_kv_states=shared,
                attention_mask=attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=ropes[kind],
            )
        hidden = self.model.get_submodule(self.plan.last_norm)(hidden)
        kept = hidden[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.plan.finish(self.lm_head(kept)))


class PlannedNorm(nn.Module):
    """A norm as its formula says; `fused_layer.Norm` computes it in one operator."""

    def __init__(self, size: int, plan: NormPlan, *, has_weight: bool = True, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(size) if has_weight else None
        self.bias = _empty(size) if has_bias else None
        self.eps, self._plan = plan.eps, plan

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] over its last dimension."""
        if self._plan.is_centered:
            return layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return normed.to(x.dtype)
        factors = self._plan.offset + self.weight.float()
        return ((normed.to(x.dtype) if self._plan.rounds_first else normed) * factors).to(x.dtype)


class GatedNorm(nn.Module):
    """A norm of groups of numbers that are gated: before it in Mamba-2, after it in gated delta nets."""

    def __init__(self, size: int, groups: int, eps: float, *, gates_first: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.group_size = _empty(size), eps, size // groups
        self._gates_first = gates_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., size]."""
        entering = (x * silu(gate) if self._gates_first else x).unflatten(-1, (-1, self.group_size))
        normed = entering * torch.rsqrt(entering.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed = self.weight * normed.flatten(-2)
        return normed if self._gates_first else normed * silu(gate)


def _layer(plan: LayerPlan, settings: Mapping[str, Any]) -> nn.Module:
    """An empty layer with the modules of its plan, in transformers' order, on which `digest` depends."""
    hidden, kind, use_bias = settings["hidden_size"], settings["model_type"], settings.get("use_bias", False)
    in_mlp = settings.get("mlp_bias", use_bias)
    # where a router has its own input, the layer itself is the block that holds router and experts
    layer = nn.Module() if plan.experts is None or plan.before_router is None else EmptyExperts(plan.experts)
    mixing = _attention(plan, settings) if plan.recurrent is None else _recurrent(plan, settings)
    norms = [
        (path, PlannedNorm(hidden, plan.norm, has_bias=_has_norm_bias(settings))) for path in filter(None, plan.norms)
    ]
    inner = [plan.inner * (2 if plan.is_gated and len(plan.gate_up) == 1 else 1)] * len(plan.gate_up)
    mlp = [(path, _empty_linear(hidden, n, has_bias=in_mlp)) for path, n in zip(plan.gate_up, inner, strict=True)]
    if plan.down is not None:
        mlp += [(plan.down, _empty_linear(plan.inner, hidden, has_bias=in_mlp))]
    parts: list[tuple[str, nn.Module]] = [*mixing, *norms, *mlp]
    if kind == "granitemoehybrid":
        parts = [*norms, *mlp, *mixing]
    if (entering := plan.input) is not None:
        parts += [
            (entering.gate, _empty_linear(hidden, entering.size, has_bias=False)),
            (entering.projection, _empty_linear(entering.size, hidden, has_bias=False)),
            (entering.norm, PlannedNorm(hidden, plan.norm)),
        ]
    around_experts = plan.after_dense, plan.after_experts, plan.before_experts
    parts += [(path, PlannedNorm(hidden, plan.norm)) for path in around_experts if path is not None]
    if plan.experts is not None and plan.before_router is None:
        parts += [(plan.experts.block, EmptyExperts(plan.experts))]
    for path, module in parts:
        _put(layer, path, module)
    if plan.scale is not None:
        layer.register_buffer(plan.scale, torch.empty(1, device="meta"))
    if plan.sinks is not None:
        layer.get_submodule("self_attn").register_parameter("sinks", _empty(plan.heads))
    return layer


def _attention(plan: LayerPlan, settings: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """The modules of a layer's attention, by their paths."""
    hidden, kind = settings["hidden_size"], settings["model_type"]
    enters = settings.get("attention_bias", settings.get("qkv_bias", settings.get("use_bias", False)))
    enters = enters or kind == "qwen2"
    leaves = enters and not kind.startswith(("qwen2", "glm4"))
    heads, keys = plan.heads * plan.size, plan.key_heads * plan.size
    sizes = (heads, keys) if plan.norms_all_heads else (plan.size, plan.size)
    qkv = [heads * (2 if plan.gates_queries else 1), keys, keys]
    parts: list[tuple[str, nn.Module]] = []
    if plan.mixer is not None:
        parts += [(plan.mixer, PlannedAttention(plan))]
    elif len(plan.qkv) == 1:
        qkv = [sum(qkv)]
    parts += [(path, PlannedNorm(size, plan.norm)) for path, size in zip(plan.head_norms or (), sizes, strict=False)]
    if plan.values_norm is not None:
        parts += [(plan.values_norm, PlannedNorm(plan.size, plan.norm, has_weight=False))]
    after = list[tuple[str, nn.Module]]()
    if (latent := plan.latent) is not None:
        heads, rank = plan.heads * latent.values, settings["q_lora_rank"]
        qkv[0] = queries = plan.heads * (latent.plain + plan.rotated)
        if latent.queries_up is not None and latent.queries_norm is not None:
            qkv[0] = rank
            parts += [(latent.queries_norm, PlannedNorm(rank, LATENT_NORM))]
            after += [(latent.queries_up, _empty_linear(rank, queries, has_bias=False))]
        parts += [(latent.norm, PlannedNorm(latent.rank, LATENT_NORM))]
        after += [(latent.heads, _empty_linear(latent.rank, latent.shape[0], has_bias=False))]
    # without strict: some layers have no values, or neither keys nor values
    parts += [(path, _empty_linear(hidden, n, has_bias=enters)) for path, n in zip(plan.qkv, qkv, strict=False)]
    return [*parts, *after, (plan.out, _empty_linear(heads, hidden, has_bias=leaves))]


def _recurrent(plan: LayerPlan, settings: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """An empty module of `recurrent_mixers.FORMS` and its products, by their paths."""
    mixer: Any = nn.Module()
    mixer.layer_idx, hidden = plan.index, settings["hidden_size"]
    entering: list[int]  # outputs of the first products
    inner = hidden
    if plan.recurrent == "conv":
        mixer.conv_kernel_size, mixer.bias = settings["conv_L_cache"], settings["conv_bias"]
        mixer.conv = _convolution(hidden, mixer.conv_kernel_size, has_bias=mixer.bias)
        entering = [3 * hidden]
    elif plan.recurrent == "linear_attn":
        heads, mixer.num_k_heads, mixer.head_v_dim, mixer.head_k_dim = (
            settings[f"linear_{name}"]
            for name in ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim")
        )
        mixer.num_v_heads, inner = heads, heads * mixer.head_v_dim
        mixer.value_dim, mixer.key_dim = inner, mixer.num_k_heads * mixer.head_k_dim
        channels = 2 * mixer.key_dim + inner
        mixer.conv1d = _convolution(channels, settings["linear_conv_kernel_dim"], has_bias=False)
        mixer.norm = GatedNorm(mixer.head_v_dim, 1, plan.norm.eps, gates_first=False)
        mixer.dt_bias, mixer.A_log = _empty(heads), _empty(heads)
        entering = [channels, inner, heads, heads]
    else:
        heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size = (
            settings[f"mamba_{name}"] for name in ("n_heads", "d_head", "n_groups", "d_state")
        )
        mixer.num_heads, inner = heads, settings["mamba_expand"] * hidden
        mixer.intermediate_size, channels = inner, inner + 2 * mixer.n_groups * mixer.ssm_state_size
        mixer.conv1d = _convolution(channels, settings["mamba_d_conv"], has_bias=settings["mamba_conv_bias"])
        mixer.norm = GatedNorm(inner, mixer.n_groups, plan.norm.eps, gates_first=True)
        mixer.dt_bias, mixer.A_log, mixer.D = _empty(heads), _empty(heads), _empty(heads)
        entering = [inner + channels + heads]
    first = [(path, _empty_linear(hidden, n, has_bias=False)) for path, n in zip(plan.qkv, entering, strict=True)]
    last = [(plan.out, _empty_linear(inner, hidden, has_bias=False))]
    return [(str(plan.recurrent), mixer), *(last + first if plan.recurrent == "linear_attn" else first + last)]


def _convolution(channels: int, taps: int, *, has_bias: bool) -> nn.Module:
    convolution = nn.Module()
    convolution.weight = _empty(channels, 1, taps)
    convolution.register_parameter("bias", _empty(channels) if has_bias else None)
    return convolution


def _embedding(count: int, size: int, scale: float) -> nn.Embedding:
    rows = torch.empty(count, size, device="meta")
    return nn.Embedding(count, size, _weight=rows) if scale == 1 else ScaledEmbedding(rows, scale)


def _empty_linear(inputs: int, outputs: int, *, has_bias: bool) -> nn.Linear:
    """A layer without initialized weights: `nn.Linear` draws them, which imports `torch._dynamo`."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = _empty(outputs, inputs)
    linear.register_parameter("bias", _empty(outputs) if has_bias else None)
    return linear


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    if parent and parent not in dict(layer.named_children()):
        layer.add_module(parent, nn.Module())
    layer.get_submodule(parent).add_module(name, module)


def _has_norm_bias(settings: Mapping[str, Any]) -> bool:
    return bool(settings["model_type"] == "starcoder2")


def _kinds(settings: Mapping[str, Any]) -> list[str]:
    """The type of each layer."""
    return list(settings.get("layer_types") or [FULL] * settings["num_hidden_layers"])


def _ropes(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rotary settings of each type of layer."""
    parameters = settings["rope_parameters"]
    if parameters.get("rope_type") == LONGROPE:
        factor = settings["max_position_embeddings"] / parameters["original_max_position_embeddings"]
        parameters = {"factor": factor, **parameters}
    return {
        kind: parameters if "rope_type" in parameters else parameters[kind] for kind in sorted(set(_kinds(settings)))
    }
