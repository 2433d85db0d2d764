"""The plan of a decoder: all numbers and switches of its layers and of the modules around them.

`families.plan_of` makes it from a model's configuration; `fused_layer.LayerOps` computes it with PyTorch's operators,
and the kernels compute it in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Activation = tuple[float, float]  # slope and cubic term of x * sigmoid(slope * x + cubic * x^3)
SILU: Activation = (1.0, 0.0)
GELU: Activation = (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))  # the tanh approximation
SQUARED = "relu2"
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), GELU),
    SQUARED: (math.inf, 0.0),  # ReLU, then squared
}


class UnknownLayerError(Exception):
    """A model's layers cannot be computed by a plan; the message is the reason."""


def activation_named(name: str) -> Activation:
    """The activation with this name in configurations. Raises `UnknownLayerError` for an unsupported one."""
    if name not in ACTIVATIONS:
        raise UnknownLayerError(
            f"the activation {name!r} is neither SiLU nor GELU by its tanh formula, nor ReLU squared"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class NormPlan:
    """The arithmetic of a model's norms: RMSNorm, or LayerNorm if they are centered."""

    eps: float
    offset: float = 0.0  # added to the stored weight
    rounds_first: bool = True  # rounds to the model's type before multiplying by the weight, too
    is_centered: bool = False  # subtracts the mean, and adds a bias if there is one


@dataclass(frozen=True)
class ExpertsPlan:
    """A layer's experts, a few of which each token uses. Strings are paths within their block."""

    block: str  # the block's path within the layer
    count: int
    used: int  # experts per token
    hidden: int  # size of a token's hidden state
    inner: int  # outputs of an expert's gate
    activation: Activation
    router: str = "gate"
    is_sigmoid: bool = False  # the router's scores; else softmax
    groups: int = 1  # of successive experts; a token's experts come from `used_groups` of them
    used_groups: int = 1
    normalizes: bool = True  # divides the scores of the chosen experts by their sum
    floor: float = 0.0  # added to that sum
    factor: float = 1.0  # of the scores
    choice_bias: str | None = None  # added to the scores for the choice only
    bias_is_row: bool = False  # this bias is [1, count], not [count]
    expert_scales: str | None = None  # factors of the experts' outputs
    router_scale: str | None = None  # factors of the router's inputs, after the router's own norm
    shared: str | None = None  # the expert that all tokens use
    shared_inner: int = 0
    shared_gate: str | None = None  # the linear layer whose sigmoid is the shared expert's factor
    limit: float = math.inf  # clamps gates to at most this, and ups to plus or minus this
    shift: float = 0.0  # added to ups
    is_biased: bool = False  # the router and the experts' matrices have biases
    returns_pair: bool = False  # the block returns its sum and something else


@dataclass(frozen=True)
class LatentPlan:
    """Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). Strings are paths within the layer."""

    count: int  # of heads
    rank: int  # size of a token's latent, which the cache keeps in place of all heads' keys and values
    plain: int  # size of a query's unrotated part, which comes before the rotated part
    values: int  # size of a head's value
    heads: str  # the projection from a latent to keys and values
    norm: str  # of the latents
    queries_up: str | None  # the projection from the queries' own latent; None: the first product gives queries
    queries_norm: str | None  # of the queries' latent

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of `heads`."""
        return self.count * (self.plain + self.values), self.rank

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of `heads` as matrices for queries [count * rank, plain] and values [count * values, rank]."""
        keys, values = weight.view(self.count, -1, self.rank).split((self.plain, self.values), 1)
        return keys.mT.flatten(0, 1), values.flatten(0, 1)

    def joined(self, to_latent: Tensor, from_latent: Tensor) -> Tensor:
        """The inverse of `parts`."""
        keys, values = to_latent.view(self.count, self.rank, -1).mT, from_latent.view(self.count, -1, self.rank)
        return torch.cat([keys, values], 1).flatten(0, 1)


@dataclass(frozen=True)
class InputPlan:
    """How a layer uses its numbers from a second embedding. Strings are paths within the layer."""

    size: int  # numbers per token
    gate: str  # projection of the hidden states; its activation multiplies these numbers
    projection: str
    norm: str  # of the result that is added to the hidden states


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer. Strings are paths of modules within the layer."""

    index: int
    qkv: tuple[str, ...]  # one joint projection, or those of queries, keys, values and gates
    out: str
    gate_up: tuple[str, ...]  # one joint projection or two; only up if it is not gated
    down: str | None  # None, and no gate_up, in a layer that has only experts
    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None
    head_norms: tuple[str, ...] | None  # of queries and, if the layer has any, of keys
    norm: NormPlan
    heads: int
    key_heads: int
    size: int  # numbers in a head
    inner: int
    rotated: int  # numbers at the start of a head that are rotated
    window: int | None  # positions that a token sees, including its own; None: all
    scaling: float  # factor of the products of queries and keys
    activation: str  # a key of `ACTIVATIONS`
    rotates_pairs: bool = False  # rotates neighbors as pairs, not numbers of the two halves
    parts_pairs: bool = False  # then moves the first numbers of all pairs in front of the second ones
    angles_in_pairs: bool = False  # the model's cosines and sines are in pairs, too
    rotates_first: bool = False  # heads are rotated before their norms
    squares: bool = False  # squares the activation
    norms_all_heads: bool = False  # `head_norms` span all heads, not each one
    is_gated: bool = True
    is_parallel: bool = False  # attention and feed-forward part share input and residual
    residual: float = 1.0  # factor of each addition to the hidden states
    soft_cap: float = 0.0  # of the scaled scores; 0: none
    growth: tuple[float, int] | None = None  # b, n: queries are multiplied by 1 + b * log(1 + floor(position / n))
    angles_of_pairs: bool = False  # the model has one cosine and sine per pair of numbers, not per number
    sinks: str | None = None  # a parameter: per query head, an extra score without a value
    experts: ExpertsPlan | None = None  # in place of the dense feed-forward part, or in addition if `down` is set
    # norms where experts and a dense part are added: of the router's inputs, and before and after each part
    before_router: str | None = None
    before_experts: str | None = None
    after_experts: str | None = None
    after_dense: str | None = None
    scale: str | None = None  # a number that multiplies the layer's output
    values_norm: str | None = None  # of each head's values, without a weight
    shares_values: bool = False  # the keys before their norm are also the values
    gates_queries: bool = False  # each query is followed by a gate, whose sigmoid multiplies the query's result
    gate_size: int = 0  # of each query's gate, if gates follow all values instead: `size`, or 1 for a whole head
    latent: LatentPlan | None = None  # then `size` is latent and rotated part together, and `key_heads` is 1
    recurrent: str | None = None  # the module in place of attention; `qkv` is its first product, `out` its last
    keys_of: int | None = None  # the earlier layer whose keys and values this one uses, having none itself
    input: InputPlan | None = None

    @property
    def reuses_keys(self) -> bool:
        """True if the layer uses another layer's keys and values."""
        return self.keys_of is not None

    @property
    def input_size(self) -> int:
        """How many numbers a second embedding gives the layer for each token."""
        return 0 if self.input is None else self.input.size

    @property
    def grows_queries(self) -> bool:
        """True if the queries' cosines and sines, which include `growth`, follow those of the keys."""
        return self.growth is not None

    @property
    def mixer(self) -> str | None:
        """The module that mixes tokens, if its own code is the specification of the mixing."""
        is_own = (
            self.gates_queries or self.gate_size or self.values_norm or self.latent or self.reuses_keys or self.input
        )
        return self.out.rpartition(".")[0] if is_own else self.recurrent

    @property
    def norms(self) -> tuple[str | None, ...]:
        """The paths of the norms around both parts, in the order in which they run."""
        return self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward

    @property
    def experts_norms(self) -> tuple[str | None, ...]:
        """The paths of the norms around experts and the dense part that they are added to."""
        return self.before_router, self.before_experts, self.after_experts, self.after_dense

    @property
    def modules(self) -> set[str]:
        """The paths of all modules with weights."""
        attention = *self.qkv, self.out, *(self.head_norms or ()), self.values_norm
        if latent := self.latent:
            attention = *attention, latent.heads, latent.norm, latent.queries_up, latent.queries_norm
        mixing = (self.recurrent,) if self.recurrent else attention
        experts = None if self.experts is None else self.experts.block
        entering = () if self.input is None else (self.input.gate, self.input.projection, self.input.norm)
        paths = (*mixing, *self.gate_up, self.down, experts, *self.norms, *self.experts_norms, *entering)
        return {path for path in paths if path is not None}


@dataclass(frozen=True)
class SecondEmbedding:
    """Gives each layer its own numbers for a token. Strings are paths in the module that calls the layers."""

    size: int  # numbers for a layer
    embedding: str  # of all layers' numbers, concatenated
    projection: str  # of the first layer's input to as many numbers, which are added
    norm: str  # of each layer's part of the projection
    projected: float  # factor of the projection, before the norm
    factor: float  # of the sum


@dataclass(frozen=True)
class DecoderPlan:
    """A model from its tokens to its logits."""

    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    last_norm: str = "norm"  # the norm after the last layer, in the module that calls the layers
    rotary: str = "rotary_emb"  # the module that computes rotations, in the same module
    embedding: float = 1.0  # factor of the embedding's output
    logits: float = 1.0  # factor of the output layer's output
    logit_cap: float = 0.0  # 0: none
    second_embedding: SecondEmbedding | None = None

    @property
    def rotates(self) -> bool:
        """True if any layer rotates queries and keys."""
        return any(layer.rotated for layer in self.layers)

    def with_layers(self, each: Callable[[LayerPlan], dict[str, Any]] | None = None, **changes: Any) -> DecoderPlan:
        """This plan with changed layers. each: gives further changes for a layer."""
        layers = (replace(layer, **changes, **(each(layer) if each else {})) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def enter(self, embedded: Tensor) -> Tensor:
        """The first layer's input, from the embedding's output."""
        return embedded if self.embedding == 1 else embedded * self.embedding

    def finish(self, logits: Tensor) -> Tensor:
        """The model's logits, from the output layer's output."""
        if self.logits != 1:
            logits = logits * self.logits
        return logits if not self.logit_cap else torch.tanh(logits / self.logit_cap) * self.logit_cap


def in_halves(pairs: Tensor) -> Tensor:
    """Reorders numbers [..., D] from pairs of neighbors to halves: the first of all pairs, then the second."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(halves: Tensor) -> Tensor:
    """The inverse of `in_halves`."""
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
