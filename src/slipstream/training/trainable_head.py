"""A draft head with weights that learn: test-time training of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.2).

The network is the one that drafts, `slipstream.models.heads.network`. In step k a row reads the token k positions
ahead, and its feature is its own output of step k - 1. It attends to the rows before it as they were in the first step,
and to itself in each later one. The loss is the divergence from the target's distribution over the draft vocabulary;
step k is weighted by 0.9^k.

B texts, W tokens of each, H hidden size, F features of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear

from slipstream.models.heads.network import HeadConfig, HeadNetwork, HeadWeights
from slipstream.models.heads.starting_weights import feature_layers, model_of, unreadable
from slipstream.models.loaded import Loaded

STEPS = 5  # steps that are unrolled; also the longest draft that is judged
DECAY = 0.9  # weight of a step's loss, relative to the step before
LAYER = "layers.0."


@dataclass(frozen=True)
class Batch:
    """Texts padded by `STEPS` tokens or more."""

    tokens: Tensor  # [B, W]
    learned: Tensor  # [B, W], true for tokens that count

    @classmethod
    def padded(cls, texts: Sequence[tuple[list[int], int]], device: torch.device) -> Batch:
        """Make a batch of texts, each given as token ids and the index of the first token that counts."""
        width = max(len(ids) for ids, _ in texts) + STEPS
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        learned = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, (ids, start) in enumerate(texts):
            tokens[row, : len(ids)] = torch.tensor(ids)
            learned[row, max(start, 2) : len(ids)] = True  # a head predicts no token before the third
        return cls(tokens.to(device), learned.to(device))

    @property
    def num_rows(self) -> int:
        """Rows of the head in each text: those whose first draft token is a token of the text."""
        return self.tokens.shape[1] - STEPS - 2

    def predicted(self, step: int) -> slice:
        """The positions of the tokens that rows predict in a step."""
        return slice(2 + step, 2 + step + self.num_rows)


class FrozenTarget:
    """Reads texts with the target's own forward. UsageError if its hidden states cannot be read."""

    def __init__(self, target: Loaded) -> None:
        self.target, self.model, self._layers = target, model_of(target), feature_layers(target)
        self.device = target.backend.device
        backend: Any = target.backend
        backend.keep_hidden_states(self._layers)
        self._backend = backend

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, W, F] and logits [B, W, V] of texts; what the KV cache holds is overwritten."""
        rows, width = tokens.shape
        self._backend.reserve(rows, width)
        logits = self._backend.forward(tokens, [0] * rows, first_slot=0, logits=True)
        features = [self._backend.hidden_states(self._layers, i, 0, width) for i in range(rows)]
        if features[0] is None:
            raise unreadable(self.target)
        return torch.stack(features), logits

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H] the target's embedding, which does not learn."""
        with torch.no_grad():
            embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded


class TrainableHead(nn.Module):
    """A head's parameters in float32; it computes in the precision of `dtype`.

    feature_size: [F] the usual size of each feature, by which features are divided before `fc`: a few of a target's
    features are a hundred times larger than the others. In the head's files the weights of `fc` include it.
    """

    def __init__(
        self, config: HeadConfig, weights: Mapping[str, Tensor], feature_size: Tensor, target: FrozenTarget
    ) -> None:
        super().__init__()
        assert config.token_ids is not None
        self.config, self.target, self.feature_size = config, target, feature_size.to(target.device)
        self.token_ids = config.token_ids.to(target.device)
        self.dtype: torch.dtype = precision(target.model.dtype)
        self.weights = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})

    def served_weights(self) -> dict[str, Tensor]:
        """The tensors of the head's files, in float32."""
        weights = {name.replace("/", "."): weight.detach() for name, weight in self.weights.items()}
        return weights | {"fc": weights["fc"] / self.feature_size}

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """The sum of the loss over all tokens that count, and the number of these tokens."""
        features, logits = self.target.read(batch.tokens)
        logits = logits[..., self.token_ids]
        total = torch.zeros((), device=logits.device)
        for step, outputs in enumerate(self._unrolled(batch, features)):
            place = batch.predicted(step)
            counted = batch.learned[:, place]
            expected = logits[:, place.start - 1 : place.stop - 1][counted].float().softmax(-1)
            drafted = outputs[counted].float().log_softmax(-1)
            total = total + DECAY**step * kl_div(drafted, expected, reduction="sum")
        return total, int(batch.learned.sum())

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        """[B, rows, STEPS] true where the draft that begins at a row has the text's own token."""
        features, _ = self.target.read(batch.tokens)
        hits = [
            self.token_ids[outputs.argmax(-1)] == batch.tokens[:, batch.predicted(step)]
            for step, outputs in enumerate(self._unrolled(batch, features))
        ]
        return torch.stack(hits, -1)

    def _unrolled(self, batch: Batch, features: Tensor) -> Iterator[Tensor]:
        """Logits [B, rows, draft vocabulary] of each step."""
        network, rows = self._network(), batch.num_rows
        keys: list[Tensor] = []
        values: list[Tensor] = []
        later = torch.ones(rows, rows, dtype=torch.bool, device=features.device).triu(1)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return unrolled_attention(query, keys, values, later)

        entered = network.enter((features[:, :rows] / self.feature_size).to(self.dtype))
        for step in range(STEPS):
            place = slice(1 + step, 1 + step + rows)
            positions = torch.arange(place.start, place.stop, device=features.device)[None]
            residual, heads = network.project(batch.tokens[:, place], entered)
            outputs = network.finish(residual, heads, positions, attend)
            yield network.draft_logits(outputs)
            entered = network.returned(outputs)

    def _network(self) -> HeadNetwork:
        """The network of these weights, through which gradients flow."""
        tensors = {name.replace("/", "."): weight.to(self.dtype) for name, weight in self.weights.items()}

        def product(*names: str) -> _Product:
            return _Product(torch.cat([tensors[name] for name in names]))

        weights = HeadWeights(
            fc=product("fc"),
            qkv=product(*(f"{LAYER}self_attn.{name}_proj" for name in "qkv")),
            out=product(f"{LAYER}self_attn.o_proj"),
            gate_up=product(f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"),
            down=product(f"{LAYER}mlp.down_proj"),
            lm_head=product("lm_head"),
            token_norm=tensors[f"{LAYER}input_layernorm"],
            hidden_norm=tensors[f"{LAYER}hidden_norm"],
            middle_norm=tensors[f"{LAYER}post_attention_layernorm"],
            final_norm=tensors["norm"],
        )
        return HeadNetwork(self.config, weights, self.target.embed)


def unrolled_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], later: Tensor) -> Tensor:
    """Attention [B, heads, rows, D] to earlier rows in the first step and to the row itself in the later ones.

    keys, values: [B, key heads, rows, D] of each step; later: [rows, rows], true where a row must not be seen. The
    later steps add one product per row, not a matrix: a mask over the rows of all steps would take twice the time.
    """
    batch, heads, rows, size = query.shape
    key_heads = keys[0].shape[1]
    grouped = query.reshape(batch, key_heads, heads // key_heads, rows, size) * size**-0.5
    scores = (grouped @ keys[0][:, :, None].mT).float().masked_fill(later, float("-inf"))
    if len(keys) > 1:
        of_itself = torch.einsum("bkgsd,bksjd->bkgsj", grouped, torch.stack(list(keys[1:]), -2))
        scores = torch.cat([scores, of_itself.float()], -1)
    shares = scores.softmax(-1).to(query.dtype)
    attended: Tensor = shares[..., :rows] @ values[0][:, :, None]
    if len(keys) > 1:
        of_itself = torch.stack(list(values[1:]), -2)
        attended = attended + torch.einsum("bkgsj,bksjd->bkgsd", shares[..., rows:], of_itself)
    return attended.reshape(batch, heads, rows, size)


@dataclass(frozen=True)
class _Product:
    """The product with a weight [outputs, inputs]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a head computes: the target's, but not float16, whose range is too small for gradients."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


@torch.no_grad()
def usual_sizes(target: FrozenTarget, batches: Sequence[Batch]) -> Tensor:
    """[F] the root mean square of each feature before tokens that count."""
    total, count = torch.zeros(()), 0
    for batch in batches:
        features, _ = target.read(batch.tokens)
        squares = features[:, : batch.num_rows][batch.learned[:, batch.predicted(0)]].double() ** 2
        total, count = total + squares.sum(0), count + len(squares)
    return (total / count).sqrt().clamp(min=1e-6).float()
