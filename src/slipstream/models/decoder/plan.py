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
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), GELU),
}


class UnknownLayerError(Exception):
    """Why a model's layers are not computed by a plan."""


def activation_named(name: str) -> Activation:
    """The activation that configurations call so. Raises `UnknownLayerError` for all others than SiLU and GELU."""
    if name not in ACTIVATIONS:
        raise UnknownLayerError(f"the activation {name!r} is neither SiLU nor GELU by its tanh formula")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class NormPlan:
    """How a model's norms compute: over the root mean square, or as LayerNorm if they are centred."""

    eps: float
    offset: float = 0.0  # added to the stored weight
    rounds_first: bool = True  # rounds to the model's type before it multiplies by the weight, not only after
    is_centred: bool = False  # subtracts the mean, and adds a bias if there is one


@dataclass(frozen=True)
class ExpertsPlan:
    """The feed-forward part of a layer of which each token uses some experts. Strings are paths within its block."""

    block: str  # its path within the layer
    count: int
    used: int  # by a token
    inner: int  # outputs of an expert's gate
    activation: Activation
    router: str = "gate"
    is_sigmoid: bool = False  # scores of the router; else softmax
    normalises: bool = True  # divides the scores of the chosen experts by their sum
    floor: float = 0.0  # added to that sum
    factor: float = 1.0  # of the scores
    choice_bias: str | None = None  # added to the scores for the choice only
    shared: str | None = None  # the expert that all tokens use
    shared_inner: int = 0
    shared_gate: str | None = None  # the linear layer whose sigmoid is the shared expert's factor
    limit: float = math.inf  # gates are at most this, and ups lie within it
    shift: float = 0.0  # added to ups
    is_biased: bool = False  # the router and the experts' matrices have biases
    returns_pair: bool = False  # the block returns its sum and something else


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer. Modules are named by their paths within the layer."""

    index: int
    qkv: tuple[str, ...]  # one joint projection, or those of queries, keys and values
    out: str
    gate_up: tuple[str, ...]  # one joint projection or two; only the first half of these if it is not gated
    down: str | None  # None, and no gate_up, in a layer of experts
    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None
    head_norms: tuple[str, str] | None  # of queries and of keys
    norm: NormPlan
    heads: int
    key_heads: int
    size: int  # numbers in a head
    inner: int
    rotated: int  # how many of a head's first numbers are rotated; 0: none
    window: int | None  # how many positions a token sees, itself included; None if it sees all
    scaling: float  # of the products of queries and keys
    activation: str  # a key of `ACTIVATIONS`
    rotates_pairs: bool = False  # neighbouring numbers with each other, not those of the two halves
    angles_in_pairs: bool = False  # the model's cosines and sines stand in that order, too
    norms_all_heads: bool = False  # `head_norms` are of all heads together, not of each
    is_gated: bool = True
    is_parallel: bool = False  # attention and feed-forward part have one input, and one residual
    residual: float = 1.0  # factor of what is added to the hidden states
    soft_cap: float = 0.0  # of the scaled products of queries and keys; 0: none
    growth: tuple[float, int] | None = None  # b, n: queries are multiplied by 1 + b * log(1 + floor(position / n))
    angles_of_pairs: bool = False  # the model has one cosine and one sine for each pair of numbers, not one for each
    sinks: str | None = None  # a parameter: for each query head a score without a value
    experts: ExpertsPlan | None = None
    gates_queries: bool = False  # each query is followed by a gate, whose sigmoid multiplies what the query attends to
    recurrent: str | None = None  # what mixes tokens in place of attention; `qkv` is its first product, `out` its last

    @property
    def grows_queries(self) -> bool:
        """True if queries have cosines and sines of their own, `growth` included, after those of the keys."""
        return self.growth is not None

    @property
    def mixer(self) -> str | None:
        """The module that mixes tokens, where its own code is the specification of that."""
        return self.out.rpartition(".")[0] if self.gates_queries else self.recurrent

    @property
    def norms(self) -> tuple[str | None, ...]:
        """The paths of the norms around both parts, in the order in which they run."""
        return self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward

    @property
    def modules(self) -> set[str]:
        """The paths of all modules with weights."""
        mixing = (self.recurrent,) if self.recurrent else (*self.qkv, self.out, *(self.head_norms or ()))
        feed_forward = (*self.gate_up, self.down) if self.experts is None else (self.experts.block,)
        paths = (*mixing, *feed_forward, *self.norms)
        return {path for path in paths if path is not None}


@dataclass(frozen=True)
class DecoderPlan:
    """A model between its tokens and its logits."""

    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    last_norm: str = "norm"  # the norm after the last layer, in the module that calls the layers
    embedding: float = 1.0  # factor of what the embedding returns
    logits: float = 1.0  # factor of what the output layer returns
    logit_cap: float = 0.0  # 0: none

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
    """Numbers [..., D] of which neighbours belong together, with the first of each pair in front of the second."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(halves: Tensor) -> Tensor:
    """The inverse of `in_halves`."""
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
