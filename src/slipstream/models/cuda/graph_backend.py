"""Hugging Face models on CUDA, replayed as captured graphs: one launch per forward, per proposal, per verification.

The specification of every method is `HFBackend`'s forward. Forwards of a few tokens from slot 0 on, which is what
decoding consists of, run in buckets of (rows, width, attended length): tokens and positions go into fixed buffers;
positions, mask and cache addresses are computed from them on the device. Everything else, mainly prompts, runs eagerly.

Shapes: B rows, W columns, R >= B and C >= W those of the bucket, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment
from slipstream.models.cuda.graph_store import (
    MAX_BYTES,
    MAX_GRAPHS,
    Capturer,
    CudaCapturer,
    GraphMemory,
    GraphStore,
    Rerun,
    unsupported,
)
from slipstream.models.cuda.indexed_cache import MAX_TOKENS, SPARE, WIDTHS, Bucket, IndexedCache, IndexedForward
from slipstream.models.cuda.prefix_match import matching_prefix
from slipstream.models.cuda.tree_table import tree_table
from slipstream.models.hf.attention_masks import Masks
from slipstream.models.hf.backend import HFBackend

MAX_STEPS = 16  # steps of one captured proposal; capturing takes as long as a few runs of all of them


class GraphedBackend:
    """An `HFBackend` that replays captured graphs where it can, and says once why where it cannot.

    Optional capabilities: `GreedyRounds`, `PromptLogits`, `LayerSubsets`, `TreeForwards`. branching, flat: see there.
    """

    branching, flat = True, False

    def __init__(
        self,
        model: Any,
        capturer: Capturer | None = None,
        max_graphs: int = MAX_GRAPHS,
        max_bytes: int = MAX_BYTES,
        cache: IndexedCache | None = None,
    ) -> None:
        """capturer: what captures; by default CUDA graphs, and on other devices plain reruns.

        cache: of another backend, to share it; by default a new one.
        """
        self.cache = IndexedCache(model.config.get_text_config().num_hidden_layers) if cache is None else cache
        self.eager = HFBackend(model, self.cache)  # runs what is not captured
        self.model, self.device, self.num_layers = self.eager.model, self.eager.device, self.eager.num_layers
        self.vocab_size, self.max_length = self.eager.vocab_size, self.eager.max_length
        if capturer is None:
            capturer = CudaCapturer(self.device) if self.device.type == "cuda" else Rerun()
        self._graphs = GraphStore(type(model).__name__, capturer, max_graphs, max_bytes)
        reason = unsupported(model)
        if reason is not None:
            self._graphs.disable(reason)
        self._captured_shape = self.cache.shape  # of the cache whose addresses the graphs have
        self._tokens = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=self.device)
        # per row: first position, number of real columns, length of its draft
        self._row_table = torch.zeros(MAX_TOKENS, 3, dtype=torch.int64, device=self.device)
        self._offsets = torch.arange(MAX_TOKENS, device=self.device)
        self.attends_itself = False  # whether all layers read the cache by `IndexedForward`, without masks
        self._no_masks = self.eager.masks.nothing(self.device)
        # of a forward over trees, per token: how far its position is behind its row's first, and which it may see
        self._depths = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=self.device)
        self._visible = torch.zeros(MAX_TOKENS * WIDTHS[-1], dtype=torch.bool, device=self.device)

    @property
    def attended_unit(self) -> int:
        """See `Backend`."""
        return self.cache.attended_unit

    @attended_unit.setter
    def attended_unit(self, unit: int) -> None:
        self.cache.attended_unit = unit

    def weights_digest(self) -> str:
        """See `LayerSubsets.weights_digest`."""
        return self.eager.weights_digest()

    def layer_subset(self, layers: Sequence[int]) -> GraphedBackend:
        """See `LayerSubsets.layer_subset`; with graphs of its own."""
        subset = GraphedBackend(self.eager.layer_subset(layers).model, cache=self.cache)
        subset.attends_itself = self.attends_itself
        if self._graphs.reason is not None and subset._graphs.reason is None:
            subset._graphs.disable(self._graphs.reason)
        return subset

    def graph_memory(self) -> GraphMemory:
        """Number of captured graphs and the device memory they hold."""
        return self._graphs.memory

    def reserve(self, rows: int, length: int) -> None:
        """Grow the cache, which moves it and drops all graphs: so rarely, slots by doubling, positions by half."""
        slots, positions = self.cache.shape
        needed = -(-(length + SPARE) // self.attended_unit) * self.attended_unit
        if rows <= slots and needed <= positions:
            return
        self._graphs.clear()
        self.eager.reserve(max(rows, 2 * slots) if rows > slots else slots, needed)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """As `HFBackend.forward`; captured if it is narrow and from slot 0 on."""
        rows, width = tokens.shape
        bucket = self._bucket(starts, width, max(starts) + width) if logits and first_slot == 0 else None
        if bucket is not None:
            self._fill(bucket, tokens, starts, [width] * rows, [0] * rows)
            out = self._run(self._logits, bucket)
            if out is not None:
                return out[:rows, :width].clone()
        return self.eager.forward(tokens, starts, first_slot=first_slot, logits=logits)

    @torch.inference_mode()
    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """See `TreeForwards.forward_tree`; captured if it is narrow, from slot 0 on.

        A row's tokens stand in its slot as they are numbered, and a mask says which of them each one follows; so a
        branch attends to its path among others that are masked, and rounds as that does.
        """
        table = tree_table(segments)
        starts, counts = table.starts, table.counts
        whole = len(tokens) == sum(counts) and table.slots == list(range(len(starts)))
        width = max(counts)
        bucket = self._bucket(starts, width, max(starts) + width) if whole else None
        if bucket is not None:
            rows, columns = (part.to(self.device, non_blocking=True) for part in table.cells())
            laid_out = tokens.new_zeros(len(starts), width)
            laid_out[rows, columns] = tokens
            self._fill(bucket, laid_out, starts, counts, [0] * len(starts))
            depths, visible = table.padded(bucket.rows, bucket.width)
            self._depths_of(bucket).copy_(self._pinned(depths), non_blocking=True)
            self._visible_of(bucket).copy_(self._pinned(visible), non_blocking=True)
            out = self._run(self._tree, bucket)
            if out is not None:
                return out[rows, columns]
        return self.eager.forward_tree(self._known(tokens), segments, widths=widths)

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """See `TreeForwards.move`."""
        self.eager.move(slot, places, start)

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """See `PromptLogits.answer`; never captured."""
        return self.eager.answer(tokens, start, slot=slot, columns=columns)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self.eager.copy(source, destination, length)

    @torch.inference_mode()
    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """See `GreedyRounds.draft_greedy`: all steps in one replay."""
        last = max(start + count for start, count in zip(starts, counts, strict=True))
        bucket = self._bucket(starts, tokens.shape[1], last + steps - 1)
        limit = min(vocab_size, self.vocab_size)
        if bucket is not None and steps <= MAX_STEPS:
            self._fill(bucket, tokens, starts, counts, [0] * len(starts))
            out = self._run(self._draft, bucket, steps, limit)
            if out is not None:
                return out[: len(starts)].clone()
        return self._draft_by_forwards(tokens, starts, counts, steps, limit)

    @torch.inference_mode()
    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """See `GreedyRounds.verify_greedy`: forward, choice and comparison in one replay."""
        bucket = self._bucket(starts, tokens.shape[1], max(starts) + tokens.shape[1])
        if bucket is not None:
            self._fill(bucket, tokens, starts, counts, lengths)
            out = self._run(self._verify, bucket, width)
            if out is not None:
                return out[: len(starts)].clone()
        chosen = self.eager.forward(self._known(tokens), starts, first_slot=0, logits=True).argmax(-1)
        table = self._table(starts, counts, lengths).to(self.device)
        return matching_prefix(tokens, chosen, table[:, 1], table[:, 2], width)

    def _bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        """The bucket of forwards that write positions below `end`; None if they must run eagerly."""
        if self._graphs.reason is not None or not self.cache.allocated:
            return None
        if self._captured_shape != self.cache.shape:  # it has moved
            self._graphs.clear()
            self._captured_shape = self.cache.shape
        return self.cache.bucket(starts, width, end)

    def _run(self, body: Callable[..., Tensor], bucket: Bucket, *options: int) -> Tensor | None:
        key = (body.__name__, bucket, *options, self.eager.masks.repeats)
        return self._graphs.run(key, partial(body, bucket, *options))

    def _fill(
        self, bucket: Bucket, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int]
    ) -> None:
        """Put a forward's input where the graphs read it; rows that only pad have no real column."""
        rows, width = tokens.shape
        padding = [0] * (bucket.rows - rows)
        table = self._table([*starts, *padding], [*counts, *padding], [*lengths, *padding])
        self._row_table[: bucket.rows].copy_(table, non_blocking=True)
        self._tokens_of(bucket)[:rows, :width].copy_(tokens)

    def _table(self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._pinned(torch.tensor(list(zip(starts, counts, lengths, strict=True)), dtype=torch.int64))

    def _pinned(self, values: Tensor) -> Tensor:
        # pinned memory is what lets the host go on while it is copied; the allocator keeps it until then
        return values.pin_memory() if self.device.type == "cuda" else values

    def _tokens_of(self, bucket: Bucket) -> Tensor:
        return self._tokens[: bucket.rows * bucket.width].view(bucket.rows, bucket.width)

    def _depths_of(self, bucket: Bucket) -> Tensor:
        return self._depths[: bucket.rows * bucket.width].view(bucket.rows, bucket.width)

    def _visible_of(self, bucket: Bucket) -> Tensor:
        shape = (bucket.rows, bucket.width, bucket.width)
        return self._visible[: bucket.rows * bucket.width * bucket.width].view(shape)

    # Bodies: what is captured. They take everything that changes from the buffers, and only shapes as arguments.

    def _logits(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of the tokens in the buffer."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        return self._indexed_forward(self._tokens_of(bucket), starts, counts, bucket.attended)

    def _draft(self, bucket: Bucket, steps: int, limit: int) -> Tensor:
        """[R, steps] greedy tokens, each fed to the next step."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        logits = self._logits(bucket)
        at = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        drafted = [logits.gather(1, at)[:, 0, :limit].argmax(-1)]
        position, real = starts + counts, counts.clamp(max=1)
        for step in range(steps - 1):
            logits = self._indexed_forward(drafted[-1][:, None], position + step, real, bucket.attended)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)

    def _verify(self, bucket: Bucket, width: int) -> Tensor:
        """[R, 2] how many draft tokens are accepted and the next token."""
        table = self._row_table[: bucket.rows]
        return matching_prefix(
            self._tokens_of(bucket), self._logits(bucket).argmax(-1), table[:, 1], table[:, 2], width
        )

    def _tree(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of trees; `_depths` and `_visible` say where tokens stand and which they follow."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        depths, keys = self._depths_of(bucket), self.eager.key_positions()[: bucket.attended]
        positions, behind = starts[:, None] + depths, keys - starts[:, None]  # [R, C], [R, S]
        at = behind.clamp(0, bucket.width - 1)
        own = (behind >= 0) & (behind < bucket.width)
        visible = self._visible_of(bucket).gather(2, at[:, None].expand(-1, bucket.width, -1))
        visible = torch.where(own[:, None], visible, behind[:, None] < 0)
        stands = torch.where(own, starts[:, None] + depths.gather(1, at), keys)
        masks = partial(self.eager.masks.build, positions, stands[:, None, None], visible[:, None])
        tree = depths, self._visible_of(bucket)
        return self._masked_forward(self._tokens_of(bucket), (starts, counts, positions), bucket.attended, masks, tree)

    def _indexed_forward(self, tokens: Tensor, starts: Tensor, counts: Tensor, attended: int) -> Tensor:
        """Logits [R, C, V] of tokens [R, C] at starts [R]; only the first counts [R] columns are cached.

        Padding stands at its row's last position: beyond the attended length a sliding window might leave it no key.
        """
        positions = starts[:, None] + torch.minimum(
            self._offsets[: tokens.shape[1]], (counts[:, None] - 1).clamp(min=0)
        )
        masks = partial(self.eager.masks.build, positions, self.eager.key_positions()[:attended])
        return self._masked_forward(tokens, (starts, counts, positions), attended, masks)

    def _masked_forward(
        self,
        tokens: Tensor,
        where: tuple[Tensor, Tensor, Tensor],
        attended: int,
        masks: Callable[[], Masks],
        tree: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> Tensor:
        """The same where rows start at [R], have so many real columns [R], and these stand at positions [R, C].

        Padding is written to the spare positions at the end of its slot, which nothing ever attends to: NaN spreads.
        tree: depths and visible tokens, as in `IndexedForward`.
        """
        starts, counts, positions = where
        rows, width = tokens.shape
        offsets = self._offsets[:width]
        columns = torch.where(offsets < counts[:, None], starts[:, None] + offsets, self.cache.spare + offsets)
        self.cache.index(IndexedForward(self._offsets[:rows], starts.contiguous(), positions, columns, attended, *tree))
        out = self.model(
            input_ids=self._known(tokens),
            attention_mask=self._no_masks if self.attends_itself else masks(),
            position_ids=positions.clamp(max=self.max_length - 1),
            use_cache=True,
            logits_to_keep=0,
            **{self.eager.cache_name: self.cache},
        )
        logits: Tensor = out.logits
        return logits

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens.clamp(max=self.vocab_size - 1)

    def _draft_by_forwards(
        self, tokens: Tensor, starts: list[int], counts: list[int], steps: int, limit: int
    ) -> Tensor:
        """The specification of `_draft`: one forward per step."""
        logits = self.eager.forward(self._known(tokens), starts, first_slot=0, logits=True)
        last = torch.tensor(counts, device=self.device) - 1
        drafted = [logits[self._offsets[: len(starts)], last, :limit].argmax(-1)]
        at = [start + count for start, count in zip(starts, counts, strict=True)]
        for step in range(steps - 1):
            positions = [start + step for start in at]
            logits = self.eager.forward(drafted[-1][:, None], positions, first_slot=0, logits=True)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)
