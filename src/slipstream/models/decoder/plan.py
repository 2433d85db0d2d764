"""The plan of a decoder: every number and switch of its layers, and of what surrounds them.

`families.plan_of` makes it from a model's configuration; `fused_layer.LayerOps` computes it by PyTorch's operators, and
the kernels compute it in one call.
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
GELU: Activation = (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))  # by its tanh formula
SQUARED = "relu2"
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), GELU),
    SQUARED: (math.inf, 0.0),  # ReLU, which is squared
}


class UnknownLayerError(Exception):
    """Why a model's layers are not computed by a plan."""


def activation_named(name: str) -> Activation:
    """The activation that configurations call so. Raises `UnknownLayerError` for one that is not computed."""
    if name not in ACTIVATIONS:
        raise UnknownLayerError(
            f"the activation {name!r} is neither SiLU nor GELU by its tanh formula, nor ReLU squared"
        )
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class NormPlan:
    """How a model's norms compute: over the root mean square, or as LayerNorm if they are centered."""

    eps: float
    offset: float = 0.0  # added to the stored weight
    rounds_first: bool = True  # rounds to the model's type before it multiplies by the weight, not only after
    is_centered: bool = False  # subtracts the mean, and adds a bias if there is one


@dataclass(frozen=True)
class ExpertsPlan:
    """The feed-forward part of a layer of which each token uses some experts. Strings are paths within its block."""

    block: str  # its path within the layer
    count: int
    used: int  # by a token
    hidden: int  # numbers of a token
    inner: int  # outputs of an expert's gate
    activation: Activation
    router: str = "gate"
    is_sigmoid: bool = False  # scores of the router; else softmax
    groups: int = 1  # of successive experts, from `used_groups` of which a token's are chosen
    used_groups: int = 1
    normalizes: bool = True  # divides the scores of the chosen experts by their sum
    floor: float = 0.0  # added to that sum
    factor: float = 1.0  # of the scores
    choice_bias: str | None = None  # added to the scores for the choice only
    bias_is_row: bool = False  # this bias is [1, count], not [count]
    expert_scales: str | None = None  # factors of the experts' outputs
    router_scale: str | None = None  # factors of the router's inputs, which are normalized by a module of its own
    shared: str | None = None  # the expert that all tokens use
    shared_inner: int = 0
    shared_gate: str | None = None  # the linear layer whose sigmoid is the shared expert's factor
    limit: float = math.inf  # gates are at most this, and ups lie within it
    shift: float = 0.0  # added to ups
    is_biased: bool = False  # the router and the experts' matrices have biases
    returns_pair: bool = False  # the block returns its sum and something else


@dataclass(frozen=True)
class LatentPlan:
    """Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). Strings are paths within the layer."""

    count: int  # of heads
    rank: int  # numbers that the cache keeps of a token, of which keys and values of all heads are made
    plain: int  # numbers of a query that are not rotated, before those that are
    values: int  # numbers of a head's values
    heads: str  # what makes keys and values of a latent
    norm: str  # of the latents
    queries_up: str | None  # what makes queries of the numbers that the first product gives; None: they are these
    queries_norm: str | None  # of those numbers

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of `heads`."""
        return self.count * (self.plain + self.values), self.rank

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices of the weight of `heads`: of queries [count * rank, plain], of values [count * values, rank]."""
        keys, values = weight.view(self.count, -1, self.rank).split((self.plain, self.values), 1)
        return keys.mT.flatten(0, 1), values.flatten(0, 1)

    def joined(self, to_latent: Tensor, from_latent: Tensor) -> Tensor:
        """The weight with these matrices, see `parts`."""
        keys, values = to_latent.view(self.count, self.rank, -1).mT, from_latent.view(self.count, -1, self.rank)
        return torch.cat([keys, values], 1).flatten(0, 1)


@dataclass(frozen=True)
class InputPlan:
    """What a layer makes of its numbers of a second embedding. Strings are paths within the layer."""

    size: int  # numbers for each token
    gate: str  # of the hidden states; its activation multiplies these numbers
    projection: str
    norm: str  # of what is added to the hidden states


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer. Modules are named by their paths within the layer."""

    index: int
    qkv: tuple[str, ...]  # one joint projection, or those of queries, keys, values and gates
    out: str
    gate_up: tuple[str, ...]  # one joint projection or two; only the first half of these if it is not gated
    down: str | None  # None, and no gate_up, in a layer that has experts alone
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
    rotated: int  # how many of a head's first numbers are rotated; 0: none
    window: int | None  # how many positions a token sees, itself included; None if it sees all
    scaling: float  # of the products of queries and keys
    activation: str  # a key of `ACTIVATIONS`
    rotates_pairs: bool = False  # neighboring numbers with each other, not those of the two halves
    parts_pairs: bool = False  # and leaves the first numbers of all pairs in front of the second ones
    angles_in_pairs: bool = False  # the model's cosines and sines stand in that order, too
    rotates_first: bool = False  # heads are rotated before their norms
    squares: bool = False  # the activation
    norms_all_heads: bool = False  # `head_norms` are of all heads together, not of each
    is_gated: bool = True
    is_parallel: bool = False  # attention and feed-forward part have one input, and one residual
    residual: float = 1.0  # factor of what is added to the hidden states
    soft_cap: float = 0.0  # of the scaled products of queries and keys; 0: none
    growth: tuple[float, int] | None = None  # b, n: queries are multiplied by 1 + b * log(1 + floor(position / n))
    angles_of_pairs: bool = False  # the model has one cosine and one sine for each pair of numbers, not one for each
    sinks: str | None = None  # a parameter: for each query head a score without a value
    experts: ExpertsPlan | None = None  # in place of the dense feed-forward part or, with `down`, beside it
    before_router: str | None = (
        None  # norms of experts beside a dense part: of their router's inputs, their own inputs,
    )
    before_experts: str | None = None
    after_experts: str | None = None  # their sum,
    after_dense: str | None = None  # and what the dense part gives
    scale: str | None = None  # a number that multiplies what leaves the layer
    values_norm: str | None = None  # of the values of each head; it has no weight
    shares_values: bool = False  # keys, before their norm, are the values, too
    gates_queries: bool = False  # each query is followed by a gate, whose sigmoid multiplies what the query attends to
    gate_size: int = 0  # numbers of each query's gate, which follow all values instead: `size`, or 1 for all of a head
    latent: LatentPlan | None = None  # `size` is that of a latent and the rotated part together, `key_heads` is 1
    recurrent: str | None = None  # what mixes tokens in place of attention; `qkv` is its first product, `out` its last
    keys_of: int | None = None  # the earlier layer whose keys and values it attends to; it has none of its own
    input: InputPlan | None = None

    @property
    def reuses_keys(self) -> bool:
        """True if the layer attends to what another one has written."""
        return self.keys_of is not None

    @property
    def input_size(self) -> int:
        """How many numbers a second embedding gives the layer for each token."""
        return 0 if self.input is None else self.input.size

    @property
    def grows_queries(self) -> bool:
        """True if queries have cosines and sines of their own, `growth` included, after those of the keys."""
        return self.growth is not None

    @property
    def mixer(self) -> str | None:
        """The module that mixes tokens, where its own code is the specification of that."""
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
        """The paths of the norms around experts that stand beside a dense part."""
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
    """What gives each layer numbers of its own for a token. Strings are paths in the module that calls the layers."""

    size: int  # numbers for a layer
    embedding: str  # of all layers' numbers, one layer after the other
    projection: str  # from what enters the first layer to as many numbers, which are added
    norm: str  # of the projection's numbers for a layer
    projected: float  # factor of the projection, before the norm
    factor: float  # of the sum


@dataclass(frozen=True)
class DecoderPlan:
    """A model between its tokens and its logits."""

    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    last_norm: str = "norm"  # the norm after the last layer, in the module that calls the layers
    rotary: str = "rotary_emb"  # what computes the rotations, there too
    embedding: float = 1.0  # factor of what the embedding returns
    logits: float = 1.0  # factor of what the output layer returns
    logit_cap: float = 0.0  # 0: none
    second_embedding: SecondEmbedding | None = None

    @property
    def rotates(self) -> bool:
        """True if any layer rotates queries and keys."""
        return any(layer.rotated for layer in self.layers)

    def with_layers(self, each: Callable[[LayerPlan], dict[str, Any]] | None = None, **changes: Any) -> DecoderPlan:
        """This plan with changed layers. each: further changes, which differ by layer."""
        layers = (replace(layer, **changes, **(each(layer) if each else {})) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def enter(self, embedded: Tensor) -> Tensor:
        """What enters the first layer, from what the embedding returned."""
        return embedded if self.embedding == 1 else embedded * self.embedding

    def finish(self, logits: Tensor) -> Tensor:
        """The model's logits, from what the output layer returned."""
        if self.logits != 1:
            logits = logits * self.logits
        return logits if not self.logit_cap else torch.tanh(logits / self.logit_cap) * self.logit_cap


def in_halves(pairs: Tensor) -> Tensor:
    """Numbers [..., D] of which neighbors belong together, with the first of each pair in front of the second."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(halves: Tensor) -> Tensor:
    """The inverse of `in_halves`."""
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
