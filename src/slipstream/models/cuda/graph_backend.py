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
from slipstream.models.cuda.captured_forwards import CapturedForwards
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
from slipstream.models.cuda.indexed_cache import SPARE, Bucket, IndexedCache
from slipstream.models.cuda.prefix_match import matching_prefix
from slipstream.models.cuda.tree_table import tree_table
from slipstream.models.hf.backend import HFBackend

MAX_STEPS = 16  # steps of one captured proposal; capturing takes as long as a few runs of all of them


class GraphedBackend:
    """An `HFBackend` that replays captured graphs where it can, and says once why where it cannot.

    Optional capabilities: `GreedyRounds`, `PromptLogits`, `LayerSubsets`, `LongTexts`, `TreeForwards`. branching, flat:
    see there.
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
        self.longest_short, self.reads_anew = self.eager.longest_short, self.eager.reads_anew
        self.read_as = self.eager.read_as
        reason = unsupported(model)
        if reason is None and self.longest_short is not None:
            reason = "its rotations depend on how long each text is"
        if reason is not None:
            self._graphs.disable(reason)
        self._captured_moves = self.cache.moves  # of the cache whose addresses the graphs have
        self._bodies = CapturedForwards(self.eager, self.cache)

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
        if self._graphs.reason is not None and subset._graphs.reason is None:
            subset._graphs.disable(self._graphs.reason)
        return subset

    def graph_memory(self) -> GraphMemory:
        """Number of captured graphs and the device memory they hold."""
        return self._graphs.memory

    def reserve(self, rows: int, length: int) -> None:
        """Grow what is reserved, which drops all graphs: so rarely, slots by doubling, positions by half."""
        slots, positions = self.cache.shape
        needed = -(-(length + SPARE) // self.attended_unit) * self.attended_unit
        if rows <= slots and needed <= positions and positions % self.attended_unit == 0:
            return
        self._graphs.clear()
        self.eager.reserve(max(rows, 2 * slots) if rows > slots else slots, needed)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """As `HFBackend.forward`; captured if it is narrow and from slot 0 on."""
        rows, width = tokens.shape
        bucket = self._bucket(starts, width, max(starts) + width) if logits and first_slot == 0 else None
        if bucket is not None:
            self._bodies.fill(bucket, tokens, starts, [width] * rows, [0] * rows)
            out = self._run(self._bodies.logits, bucket)
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
            self._bodies.fill(bucket, laid_out, starts, counts, [0] * len(starts))
            self._bodies.trees.fill(bucket, table)
            out = self._run(self._bodies.tree, bucket)
            if out is not None:
                return out[rows, columns]
        return self.eager.forward_tree(self._bodies.known(tokens), segments, widths=widths)

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
            self._bodies.fill(bucket, tokens, starts, counts, [0] * len(starts))
            out = self._run(self._bodies.draft, bucket, steps, limit)
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
            self._bodies.fill(bucket, tokens, starts, counts, lengths, width)
            out = self._run(self._bodies.verify, bucket)
            if out is not None:
                return out[: len(starts)].clone()
        chosen = self.eager.forward(self._bodies.known(tokens), starts, first_slot=0, logits=True).argmax(-1)
        table = self._bodies.table(starts, counts, lengths, width).to(self.device)
        return matching_prefix(tokens, chosen, *table[:, 1:].unbind(1))

    def _bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        """The bucket of forwards that write positions below `end`; None if they must run eagerly.

        Where the cache must grow for it, all graphs are dropped, since they have its addresses. It doubles, and a
        longer attended length takes graphs of its own, so few are captured again that would have been of use.
        """
        if self._graphs.reason is not None or not self.cache.allocated:
            return None
        bucket = self.cache.bucket(starts, width, end)
        if bucket is not None:
            self.cache.hold(bucket.rows, max(bucket.attended, end + SPARE))
        if self._captured_moves != self.cache.moves:
            self._graphs.clear()
            self._captured_moves = self.cache.moves
        return bucket

    def _run(self, body: Callable[..., Tensor], bucket: Bucket, *options: int) -> Tensor | None:
        key = (body.__name__, bucket, *options, self.eager.masks.repeats)
        return self._graphs.run(key, partial(body, bucket, *options))

    def _draft_by_forwards(
        self, tokens: Tensor, starts: list[int], counts: list[int], steps: int, limit: int
    ) -> Tensor:
        """The specification of `CapturedForwards.draft`: one forward per step."""
        logits = self.eager.forward(self._bodies.known(tokens), starts, first_slot=0, logits=True)
        last = torch.tensor(counts, device=self.device) - 1
        drafted = [logits[torch.arange(len(starts), device=self.device), last, :limit].argmax(-1)]
        at = [start + count for start, count in zip(starts, counts, strict=True)]
        for step in range(steps - 1):
            positions = [start + step for start in at]
            logits = self.eager.forward(drafted[-1][:, None], positions, first_slot=0, logits=True)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)
