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
from slipstream.models.decoder.around_layers import STATIC
from slipstream.models.decoder.attention import GROUPED, MaskBuilder
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.families import plan_of
from slipstream.models.decoder.fused_layer import FusedLayer, fused_layers
from slipstream.models.decoder.plan import LayerPlan, NormPlan, UnknownLayerError
from slipstream.models.decoder.recurrent_mixers import recurrent_states
from slipstream.models.decoder.rotary import RotaryAngles

FULL = "full_attention"
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
}


class Configuration(SimpleNamespace):
    """The fields of a model's configuration, with the methods of transformers' class that Slipstream calls."""

    _attn_implementation = GROUPED

    @property
    def architectures(self) -> list[str]:
        """The name of transformers' class for the model."""
        return [PLANNED[self.model_type]]

    def get_text_config(self, decoder: bool | None = None) -> Configuration:
        """The configuration itself: it describes only a language model."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json_string(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def planned_model(settings: Mapping[str, Any]) -> PlannedModel | None:
    """The empty model of a configuration with these fields; None if no plan describes the whole model."""
    if settings["model_type"] not in PLANNED or {rope["rope_type"] for rope in _ropes(settings).values()} - STATIC:
        return None
    try:
        return PlannedModel(settings)
    except UnknownLayerError:
        return None


class PlannedModel(nn.Module):
    """A decoder of one of the types `PLANNED`, on the device "meta" until its tensors are filled in."""

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
        rows = torch.empty(vocabulary, hidden, device="meta")
        plain = nn.Embedding(vocabulary, hidden, _weight=rows)
        decoder.embed_tokens = ScaledEmbedding(rows, hidden**0.5) if is_gemma else plain
        decoder.layers = nn.ModuleList(_layer(plan, settings) for plan in self.plan.layers)
        _put(decoder, self.plan.last_norm, PlannedNorm(hidden, self.plan.norm, has_bias=_has_norm_bias(settings)))
        _put(decoder, self.plan.rotary, RotaryAngles(_ropes(settings), self.config.head_dim))
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
            for paths in (plan.qkv, (plan.out,), plan.gate_up, (plan.down,)):
                entering = torch.empty(0)
                calls += [(layer.get_submodule(path), entering) for path in paths if path is not None]
        return [*calls, (self.lm_head, torch.empty(0))]

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
        ropes = {kind: rotary(hidden, position_ids, kind) for kind in set(kinds)}
        for layer, kind in zip(self.model.layers, kinds, strict=True):
            hidden = layer(
                hidden,
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

    def __init__(self, size: int, plan: NormPlan, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = _empty(size)
        self.bias = _empty(size) if has_bias else None
        self.eps, self._plan = plan.eps, plan

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] over its last dimension."""
        if self._plan.is_centered:
            return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self._plan.offset + self.weight)


class GatedNorm(nn.Module):
    """The norm of Mamba-2: multiplies by the gates, then normalizes groups."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.group_size = _empty(size), eps, size // groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., size]."""
        gated = (x * silu(gate)).unflatten(-1, (-1, self.group_size))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.flatten(-2)


def _layer(plan: LayerPlan, settings: Mapping[str, Any]) -> nn.Module:
    """An empty layer with the modules of its plan; norms come in transformers' order, on which `digest` depends."""
    layer, hidden, heads = nn.Module(), settings["hidden_size"], plan.heads * plan.size
    keys = plan.key_heads * plan.size
    kind, use_bias = settings["model_type"], settings.get("use_bias", False)
    enters = settings.get("attention_bias", settings.get("qkv_bias", use_bias)) or kind == "qwen2"
    leaves = enters and not kind.startswith(("qwen2", "glm4"))
    in_mlp = settings.get("mlp_bias", use_bias)
    qkv = [heads, keys, keys] if len(plan.qkv) > 1 else [heads + 2 * keys]
    inner = [plan.inner * (2 if plan.is_gated and len(plan.gate_up) == 1 else 1)] * len(plan.gate_up)
    sizes = (heads, keys) if plan.norms_all_heads else (plan.size, plan.size)
    for path, size in zip(plan.head_norms or (), sizes, strict=False):
        _put(layer, path, PlannedNorm(size, plan.norm, has_bias=False))
    for norm in filter(None, plan.norms):
        _put(layer, norm, PlannedNorm(hidden, plan.norm, has_bias=_has_norm_bias(settings)))
    mixing = list[tuple[str, nn.Module]]()
    if plan.recurrent is not None:
        mixer, outputs, heads = _recurrent(plan, settings)
        mixing, qkv, enters, leaves = [(plan.recurrent, mixer)], [outputs], False, False
    mixing += [(path, _empty_linear(hidden, n, has_bias=enters)) for path, n in zip(plan.qkv, qkv, strict=True)]
    mixing += [(plan.out, _empty_linear(heads, hidden, has_bias=leaves))]
    mlp = [(path, _empty_linear(hidden, n, has_bias=in_mlp)) for path, n in zip(plan.gate_up, inner, strict=True)]
    if plan.down is not None:
        mlp += [(plan.down, _empty_linear(plan.inner, hidden, has_bias=in_mlp))]
    for path, module in (*mlp, *mixing) if kind == "granitemoehybrid" else (*mixing, *mlp):
        _put(layer, path, module)
    if plan.experts is not None:
        _put(layer, plan.experts.block, EmptyExperts(plan.experts))
    if plan.sinks is not None:
        layer.get_submodule("self_attn").register_parameter("sinks", _empty(plan.heads))
    return layer


def _recurrent(plan: LayerPlan, settings: Mapping[str, Any]) -> tuple[nn.Module, int, int]:
    """An empty module of `recurrent_mixers.FORMS` without its products, and their sizes: first outputs, last inputs."""
    mixer: Any = nn.Module()
    mixer.layer_idx, hidden = plan.index, settings["hidden_size"]
    if plan.recurrent == "conv":
        mixer.conv_kernel_size, mixer.bias = settings["conv_L_cache"], settings["conv_bias"]
        mixer.conv = _convolution(hidden, mixer.conv_kernel_size, has_bias=mixer.bias)
        return mixer, 3 * hidden, hidden
    heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size = (
        settings[f"mamba_{name}"] for name in ("n_heads", "d_head", "n_groups", "d_state")
    )
    mixer.num_heads, inner = heads, settings["mamba_expand"] * hidden
    mixer.intermediate_size, channels = inner, inner + 2 * mixer.n_groups * mixer.ssm_state_size
    mixer.conv1d = _convolution(channels, settings["mamba_d_conv"], has_bias=settings["mamba_conv_bias"])
    mixer.norm = GatedNorm(inner, mixer.n_groups, plan.norm.eps)
    mixer.dt_bias, mixer.A_log, mixer.D = _empty(heads), _empty(heads), _empty(heads)
    return mixer, inner + channels + heads, inner


def _convolution(channels: int, taps: int, *, has_bias: bool) -> nn.Module:
    convolution = nn.Module()
    convolution.weight = _empty(channels, 1, taps)
    convolution.register_parameter("bias", _empty(channels) if has_bias else None)
    return convolution


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
    return {
        kind: parameters if "rope_type" in parameters else parameters[kind] for kind in sorted(set(_kinds(settings)))
    }
