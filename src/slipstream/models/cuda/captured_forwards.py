"""What graphs capture: forwards whose tokens and places are in fixed buffers.

Bodies take everything that changes from the buffers, and only shapes as arguments.

Shapes: B rows, W columns, R >= B and C >= W those of the bucket, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.models.cuda.indexed_cache import MAX_TOKENS, Bucket, IndexedCache, IndexedForward
from slipstream.models.cuda.prefix_match import matching_prefix
from slipstream.models.cuda.tree_table import TreeBuffers, pinned
from slipstream.models.cuda.triton_layer import uses_kernels
from slipstream.models.decoder.attention import Masks
from slipstream.models.hf.backend import HFBackend


class CapturedForwards:
    """The buffers of a model's graphs and the bodies that read them. trees: the buffers of trees."""

    def __init__(self, eager: HFBackend, cache: IndexedCache) -> None:
        self._eager, self._cache, self._device = eager, cache, eager.device
        self._tokens = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=self._device)
        self._row_table = torch.zeros(MAX_TOKENS, 4, dtype=torch.int64, device=self._device)
        self._offsets = torch.arange(MAX_TOKENS, device=self._device)
        self.trees = TreeBuffers(self._device)
        self._no_masks = eager.masks.nothing(self._device)

    def fill(
        self,
        bucket: Bucket,
        tokens: Tensor,
        starts: list[int],
        counts: list[int],
        lengths: Sequence[int],
        drafted: int = 0,
    ) -> None:
        """Put a forward's input where the graphs read it; rows that only pad have no real column."""
        rows, width = tokens.shape
        padding = [0] * (bucket.rows - rows)
        table = self.table([*starts, *padding], [*counts, *padding], [*lengths, *padding], drafted)
        self._row_table[: bucket.rows].copy_(table, non_blocking=True)
        self._tokens_of(bucket)[:rows, :width].copy_(tokens)

    def table(self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], drafted: int) -> Tensor:
        """[B, 4]: per row its first position, how many real columns it has, and its draft's length and columns."""
        widths = [drafted] * len(starts)
        rows = list(zip(starts, counts, lengths, widths, strict=True))
        return pinned(torch.tensor(rows, dtype=torch.int64), self._device)

    def _tokens_of(self, bucket: Bucket) -> Tensor:
        return self._tokens[: bucket.rows * bucket.width].view(bucket.rows, bucket.width)

    def logits(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of the tokens in the buffer."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        return self._indexed_forward(self._tokens_of(bucket), starts, counts, bucket.attended)

    def draft(self, bucket: Bucket, steps: int, limit: int) -> Tensor:
        """[R, steps] greedy tokens, each fed to the next step."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        logits = self.logits(bucket)
        at = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        drafted = [logits.gather(1, at)[:, 0, :limit].argmax(-1)]
        position, real = starts + counts, counts.clamp(max=1)
        for step in range(steps - 1):
            logits = self._indexed_forward(drafted[-1][:, None], position + step, real, bucket.attended)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)

    def verify(self, bucket: Bucket) -> Tensor:
        """[R, 2] how many draft tokens are accepted and the next token."""
        table = self._row_table[: bucket.rows]
        chosen = self.logits(bucket).argmax(-1)
        return matching_prefix(self._tokens_of(bucket), chosen, *table[:, 1:].unbind(1))

    def tree(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of trees; `trees` says where tokens stand and which they follow."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        positions, stands, visible = self.trees.places(bucket, starts, self._eager.key_positions()[: bucket.attended])
        columns = self._columns(starts, counts, bucket.width)
        slots, trees = self._offsets[: bucket.rows], self.trees.of(bucket)
        forward = IndexedForward(slots, starts.contiguous(), positions, columns, bucket.attended, *trees)
        masks = partial(self._eager.masks.build, positions, stands[:, None, None], visible[:, None])
        return self._forward(self._tokens_of(bucket), forward, masks)

    def _indexed_forward(self, tokens: Tensor, starts: Tensor, counts: Tensor, attended: int) -> Tensor:
        """Logits [R, C, V] of tokens [R, C] at starts [R]; only the first counts [R] columns are cached.

        Padding stands at its row's last position: beyond the attended length a sliding window might leave it no key.
        """
        rows, width = tokens.shape
        last = (counts[:, None] - 1).clamp(min=0)
        positions = starts[:, None] + torch.minimum(self._offsets[:width], last)
        columns, slots = self._columns(starts, counts, width), self._offsets[:rows]
        forward = IndexedForward(slots, starts.contiguous(), positions, columns, attended)
        masks = partial(self._eager.masks.build, positions, self._eager.key_positions()[:attended])
        return self._forward(tokens, forward, masks)

    def _columns(self, starts: Tensor, counts: Tensor, width: int) -> Tensor:
        """[R, C] places that tokens are written to.

        Padding gets the spare positions at the end of its slot, which nothing ever attends to: NaN spreads.
        """
        offsets = self._offsets[:width]
        return torch.where(offsets < counts[:, None], starts[:, None] + offsets, self._cache.spare + offsets)

    def _forward(self, tokens: Tensor, forward: IndexedForward, masks: Callable[[], Masks]) -> Tensor:
        self._cache.index(forward)
        out = self._eager.model(
            input_ids=self.known(tokens),
            attention_mask=self._no_masks if uses_kernels(self._eager.model) else masks(),
            position_ids=forward.positions.clamp(max=self._eager.max_length - 1),
            use_cache=True,
            logits_to_keep=0,
            **{self._eager.cache_name: self._cache},
        )
        logits: Tensor = out.logits
        return logits

    def known(self, tokens: Tensor) -> Tensor:
        """Tokens that the model's embedding has."""
        return tokens.clamp(max=self._eager.vocab_size - 1)
