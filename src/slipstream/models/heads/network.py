"""The network of EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840): a decoder layer over tokens and hidden states.

Row s of a head holds token x_s and the feature of the position before: the inputs of some of the target's layers there
or, if the target has not read that position yet, the head's own output. The row predicts x_{s+1}. In some heads
ordinary decoder layers follow the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from slipstream.models.cpu.compiled_norm import CompiledNorm, compiled_norm

Linear = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadConfig:
    """A head's settings, as its files declare them."""

    layers: tuple[int, ...]  # the target's layers whose inputs are the features, as in transformers' `hidden_states`
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    vocab_size: int  # the target's
    eps: float
    rope_theta: float
    max_length: int
    token_ids: Tensor | None = None  # [draft vocabulary], the target's id of each token; None: all, in order
    norm_before_residual: bool = False  # the residual is the normalized feature
    norm_output: bool = False  # the output that the head feeds back to itself is normalized
    inverse_frequencies: Tensor | None = None  # [head_dim / 2]; None: those of rope_theta
    rotation_scale: float = 1.0  # of cosines and sines
    windows: tuple[int | None, ...] = (None,)  # positions that a row sees in each layer, including its own; None: all
    unclear: tuple[str, ...] = ()  # settings that the files leave open, or that readers interpret in two ways
    listed_layers: tuple[int, ...] = ()  # `layers` in the files' order, if the files list any

    @property
    def draft_vocab_size(self) -> int:
        """The number of tokens that the head can propose."""
        return self.vocab_size if self.token_ids is None else len(self.token_ids)


@dataclass(kw_only=True)
class LayerWeights:
    """A decoder layer's products and norms, except the norms of its inputs. qkv and gate_up are joint products.

    head_norms: [heads + key heads, 1, D] of queries and keys, or None.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    middle_norm: Tensor
    head_norms: Tensor | None = None


@dataclass(kw_only=True)
class FurtherLayer(LayerWeights):
    """A decoder layer after the first."""

    first_norm: Tensor


@dataclass(kw_only=True)
class HeadWeights(LayerWeights):
    """A head's products and norms, including those of its first layer. Each norm is one vector.

    feature_norms: [norms, size], one for each layer's hidden states, or one for all of them together; None if none.
    """

    fc: Linear
    lm_head: Linear
    token_norm: Tensor
    hidden_norm: Tensor
    final_norm: Tensor
    feature_norms: Tensor | None = None
    further: Sequence[FurtherLayer] = ()


class Network(Protocol):
    """The forward of a head, with B rows of W tokens and hidden size H."""

    config: HeadConfig
    dtype: torch.dtype
    device: torch.device

    def enter(self, features: Tensor) -> Tensor:
        """The inputs [N, H] of rows, from their features [N, layers * target's hidden size]."""

    def layer(self, tokens: Tensor, entered: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The outputs [B, W, H] of rows with tokens [B, W], entered [B, W, H] and positions [B, W].

        attend: from queries [B, heads, W, D], and keys and values [B, key heads, W, D] to add, to [B, heads, W, D];
        called once for each layer, in order.
        """

    def returned(self, outputs: Tensor) -> Tensor:
        """The next row's feature, from a row's outputs."""

    def draft_logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] from outputs [..., H]."""


class HeadLayers:
    """Shared by all heads: norms, rotary positions, and a decoder layer from its queries, keys and values on."""

    def __init__(self, config: HeadConfig, norm: Tensor) -> None:
        """norm: any norm of the head, whose type and device the head has."""
        self.config, self.dtype, self.device = config, norm.dtype, norm.device
        self._cosines, self._sines = rotations(config, norm.dtype, norm.device)
        self._norms: dict[int, tuple[Tensor, CompiledNorm | None]] = {}  # by the identity of their weights

    def _finish(
        self, weights: LayerWeights, residual: Tensor, heads: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """A layer's outputs [B, W, H]. residual: [B, W, H] to add to attention's; heads: [B, W, all heads * D]."""
        config = self.config
        qkv = heads.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        both = config.num_heads + config.num_key_heads
        unrotated = qkv[:, :both]
        if weights.head_norms is not None:
            unrotated = self._norm(unrotated, None) * weights.head_norms
        rotated = self._rotate(unrotated, positions)
        attended = attend(rotated[:, : config.num_heads], rotated[:, config.num_heads :], qkv[:, both:])
        hidden = residual + weights.out(attended.transpose(1, 2).flatten(2))
        gate, up = weights.gate_up(self._norm(hidden, weights.middle_norm)).chunk(2, -1)
        return hidden + weights.down(silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or torch.is_grad_enabled():  # kernels have no gradients
            return rms_norm(x, x.shape[-1:], weight, self.config.eps)
        if id(weight) not in self._norms:
            self._norms[id(weight)] = weight, compiled_norm(weight, self.config.eps)
        _, compiled = self._norms[id(weight)]
        return rms_norm(x, x.shape[-1:], weight, self.config.eps) if compiled is None else compiled(x)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [B, heads, W, D] at positions [B, W]."""
        cosines, sines = self._cosines[positions][:, None], self._sines[positions][:, None]
        return x * cosines + x.roll(x.shape[-1] // 2, -1) * sines


class HeadNetwork(HeadLayers):
    """The network of EAGLE-3."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, embed: Callable[[Tensor], Tensor]) -> None:
        """embed: the target's embedding, or the head's own."""
        super().__init__(config, weights.final_norm)
        self.weights, self.embed = weights, embed
        norms = weights.feature_norms
        self._ones = None if norms is None else torch.ones_like(norms[0])

    @property
    def rope(self) -> Tensor:
        """[2, positions, D] cosines and sines."""
        half = self.config.head_dim // 2
        return torch.stack([self._cosines, torch.cat([-self._sines[:, :half], self._sines[:, half:]], -1)])

    def enter(self, features: Tensor) -> Tensor:
        norms, features = self.weights.feature_norms, features.to(self.dtype)
        if norms is not None:
            features = self._norm(features.unflatten(-1, norms.shape), self._ones).mul_(norms).flatten(-2)
        return self.weights.fc(features)

    def layer(self, tokens: Tensor, entered: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = self.finish(*self.project(tokens, entered), positions, attend)
        for further in self.weights.further:
            hidden = self._finish(
                further, hidden, further.qkv(self._norm(hidden, further.first_norm)), positions, attend
            )
        return hidden

    def project(self, tokens: Tensor, entered: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [B, W, H], to which attention's output is added, and queries, keys and values [B, W, all heads *
        D] of the first layer."""
        normed = self._norm(entered, self.weights.hidden_norm)
        embedded = self._norm(self.embed(tokens).to(self.dtype), self.weights.token_norm)
        heads = self.weights.qkv(torch.cat([embedded, normed], -1))
        return normed if self.config.norm_before_residual else entered, heads

    def finish(self, residual: Tensor, heads: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The rest of the first layer."""
        return self._finish(self.weights, residual, heads, positions, attend)

    def returned(self, outputs: Tensor) -> Tensor:
        return self._norm(outputs, self.weights.final_norm) if self.config.norm_output else outputs

    def draft_logits(self, outputs: Tensor) -> Tensor:
        return self.weights.lm_head(self._norm(outputs, self.weights.final_norm))


def rotations(config: HeadConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [positions, D]."""
    half = config.head_dim // 2
    inverse = config.inverse_frequencies
    if inverse is None:
        inverse = config.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(config.max_length, dtype=torch.float32)[:, None] * inverse
    cosines, sines = config.rotation_scale * angles.cos(), config.rotation_scale * angles.sin()
    parts = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
    return parts[0].to(device, dtype), parts[1].to(device, dtype)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries [B, heads, W, D] over keys [B, key heads, L, D]; mask [B, W, L], true where a key is seen.

    Queries that share a key head are treated as further positions, so keys are not copied.
    """
    batch, heads, width, size = query.shape
    shared = heads // key.shape[1]
    rows = query.reshape(batch, key.shape[1], shared * width, size)
    seen = None if mask is None else mask.repeat(1, shared, 1)[:, None]
    return scaled_dot_product_attention(rows, key, value, attn_mask=seen).reshape(batch, heads, width, size)


def all_scores(drafted: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Scores [..., V] from those of a draft vocabulary: tokens that a head cannot propose get -infinity.

    token_ids: as `HeadConfig.token_ids`.
    """
    if token_ids is None:
        return drafted[..., :vocab_size]
    scores = drafted.new_full((*drafted.shape[:-1], vocab_size), float("-inf"))
    return scores.index_copy_(-1, token_ids, drafted)
