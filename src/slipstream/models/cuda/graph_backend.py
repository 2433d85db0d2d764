"""Hugging Face models on CUDA, replayed as captured graphs: one launch per forward, per proposal, per verification.

The specification of every method is `HFBackend`'s forward. Decoding consists of forwards of a few tokens from slot 0
on. They run in buckets of (rows, width, attended length): tokens and positions go into fixed buffers, from which the
device computes positions, mask and cache addresses. Bodies, the functions that are captured, read everything that
changes from the buffers, and take only shapes as arguments. All other forwards, mainly prompts, run eagerly.
`use_kernels` has Triton kernels compute the whole model, prompts included, if they give its own results. Then no bit
depends on the shape of a forward, and one capture serves all lengths.

Shapes: B rows, W columns, R >= B and C >= W those of the bucket, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.core.trees import TreeSegment
from slipstream.errors import SlipstreamError, first_line
from slipstream.models.cuda.graph_store import (
    MAX_BYTES,
    MAX_GRAPHS,
    Capturer,
    CudaCapturer,
    GraphMemory,
    GraphStore,
    Rerun,
    why_not_captured,
)
from slipstream.models.cuda.indexed_cache import (
    MAX_TOKENS,
    SPARE,
    Bucket,
    IndexedCache,
    IndexedForward,
    TreeBuffers,
    TreeTable,
    pinned,
    tree_table,
)
from slipstream.models.cuda.triton_layer import TritonStack, has_kernels
from slipstream.models.decoder.attention import Masks
from slipstream.models.decoder.families import plan_of_model
from slipstream.models.decoder.plan import UnknownLayerError
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import (
    OwnLogits,
    Trial,
    a_few_logits,
    difference,
    forwards_replaced,
    largest_error,
    tolerance,
)

MAX_STEPS = 16  # in one captured proposal; capturing takes as long as a few runs of all its steps


def matching_prefix(tokens: Tensor, chosen: Tensor, counts: Tensor, lengths: Tensor, widths: Tensor) -> Tensor:
    """Longest matching prefix; the specification is `acceptance.match`.

    tokens: [B, W]; row i has counts[i] tokens: the last widths[i] are its draft's columns, of which the first
    lengths[i] were proposed. chosen: [B, W], the model's own choice after each token. Returns [B, 2]: the number of
    accepted draft tokens, and the token that follows them.
    """
    last = tokens.shape[1] - 1
    steps = torch.arange(last + 1, device=tokens.device)
    index = ((counts - widths - 1).clamp(min=0)[:, None] + steps).clamp(max=last)
    choices, draft = chosen.gather(1, index), tokens.gather(1, index[:, 1:])
    agree = (choices[:, :last] == draft) & (steps[:last] < lengths[:, None])
    accepted = agree.long().cumprod(1).sum(1)
    return torch.stack([accepted, choices.gather(1, accepted[:, None])[:, 0]], dim=1)


class CapturedForwards:
    """The buffers of a model's graphs and the bodies that read them; `uncaptured` runs other forwards by kernels.

    trees: the buffers of trees. stack: the model's forward by kernels; None if there is none.
    """

    def __init__(self, eager: HFBackend, cache: IndexedCache) -> None:
        self._eager, self._cache, self._device = eager, cache, eager.device
        self.stack: TritonStack | None = None
        self._tokens = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=self._device)
        self._row_table = torch.zeros(MAX_TOKENS, 4, dtype=torch.int64, device=self._device)
        self._offsets = torch.arange(MAX_TOKENS, device=self._device)
        self.trees = TreeBuffers(self._device)

    def fill(
        self,
        bucket: Bucket,
        tokens: Tensor,
        starts: list[int],
        counts: list[int],
        lengths: Sequence[int],
        draft_width: int = 0,
    ) -> None:
        """Copy a forward's input to the buffers that the graphs read; padding rows have no real column."""
        rows, width = tokens.shape
        padding = [0] * (bucket.rows - rows)
        table = self.table([*starts, *padding], [*counts, *padding], [*lengths, *padding], draft_width)
        self._row_table[: bucket.rows].copy_(table, non_blocking=True)
        self._tokens_of(bucket)[:rows, :width].copy_(tokens)

    def table(self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], draft_width: int) -> Tensor:
        """[B, 4]: for each row its first position, its number of real columns, and its draft's length and columns."""
        widths = [draft_width] * len(starts)
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
        last_column = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        drafted = [logits.gather(1, last_column)[:, 0, :limit].argmax(-1)]
        position, real = starts + counts, counts.clamp(max=1)
        for step in range(steps - 1):
            logits = self._indexed_forward(drafted[-1][:, None], position + step, real, bucket.attended)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)

    def verify(self, bucket: Bucket) -> Tensor:
        """[R, 2], the number of accepted draft tokens, and the next token."""
        table = self._row_table[: bucket.rows]
        chosen = self.logits(bucket).argmax(-1)
        return matching_prefix(self._tokens_of(bucket), chosen, *table[:, 1:].unbind(1))

    def tree(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of trees; `trees` has the position of each token and the tokens that it follows."""
        starts, counts = self._row_table[: bucket.rows, 0], self._row_table[: bucket.rows, 1]
        depths, _, ancestors = self.trees.of(bucket)
        positions, columns = starts[:, None] + depths, self._columns(starts, counts, bucket.width)
        slots = self._offsets[: bucket.rows]
        forward = IndexedForward(slots, starts.contiguous(), positions, columns, bucket.attended, ancestors)

        def masks() -> Masks:
            places, visible = self.trees.places(bucket, starts, self._eager.key_positions()[: bucket.attended])
            return self._eager.masks.build(positions, places[:, None, None], visible[:, None])

        return self._forward(self._tokens_of(bucket), forward, masks)

    def uncaptured(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        slots: Sequence[int],
        columns: Tensor | None = None,
        tree: TreeTable | None = None,
    ) -> Tensor:
        """Logits [B, W, V] of tokens [B, W] in any slots, or of some columns, by kernels.

        tree: of the tokens, if they are not chains.
        """
        assert self.stack is not None
        (rows, width), end = tokens.shape, max(starts) + tokens.shape[1]
        self._cache.hold(max(slots) + 1, end + SPARE)
        if max(slots) >= self._cache.held[0] or end > self._cache.held[1]:
            raise SlipstreamError(f"slot {max(slots)}, position {end - 1}; reserved: {self._cache.shape}")
        first = torch.tensor(starts, device=self._device)
        written = first[:, None] + torch.arange(width, device=self._device)
        positions, ancestors = written, None
        if tree is not None:
            depths, _, ancestors = (part.to(self._device) for part in tree.padded(rows, width))
            positions = first[:, None] + depths
        forward = IndexedForward(torch.tensor(slots, device=self._device), first, positions, written, end, ancestors)
        return self.stack.logits(self.embeddable(tokens), self._model_positions(forward), self._cache, forward, columns)

    def _indexed_forward(self, tokens: Tensor, starts: Tensor, counts: Tensor, attended: int) -> Tensor:
        """Logits [R, C, V] of tokens [R, C] at starts [R]; only the first counts [R] columns are cached.

        Padding gets its row's last position: beyond the attended length, a sliding window might leave it no key.
        """
        rows, width = tokens.shape
        last = (counts[:, None] - 1).clamp(min=0)
        positions = starts[:, None] + torch.minimum(self._offsets[:width], last)
        columns, slots = self._columns(starts, counts, width), self._offsets[:rows]
        forward = IndexedForward(slots, starts.contiguous(), positions, columns, attended)
        masks = partial(self._eager.masks.build, positions, self._eager.key_positions()[:attended])
        return self._forward(tokens, forward, masks)

    def _columns(self, starts: Tensor, counts: Tensor, width: int) -> Tensor:
        """The places [R, C] to which tokens are written.

        Padding goes to the spare positions at the end of its slot. Nothing attends to them, so a NaN there cannot
        spread.
        """
        offsets = self._offsets[:width]
        return torch.where(offsets < counts[:, None], starts[:, None] + offsets, self._cache.spare + offsets)

    def _model_positions(self, forward: IndexedForward) -> Tensor:
        return forward.positions.clamp(max=self._eager.max_length - 1)

    def _forward(self, tokens: Tensor, forward: IndexedForward, masks: Callable[[], Masks]) -> Tensor:
        if self.stack is not None:
            return self.stack.logits(self.embeddable(tokens), self._model_positions(forward), self._cache, forward)
        self._cache.index(forward)
        out = self._eager.model(
            input_ids=self.embeddable(tokens),
            attention_mask=masks(),
            position_ids=self._model_positions(forward),
            use_cache=True,
            logits_to_keep=0,
            **{self._eager.cache_name: self._cache},
        )
        logits: Tensor = out.logits
        return logits

    def embeddable(self, tokens: Tensor) -> Tensor:
        """The tokens; ids beyond the model's embedding become its last id."""
        return tokens.clamp(max=self._eager.vocab_size - 1)


class GraphedBackend:
    """An `HFBackend` that replays captured graphs where it can, and logs once why it cannot elsewhere.

    Optional capabilities: `GreedyRounds`, `PromptLogits`, `LayerSubsets`, `LongTexts`, `TreeForwards`, `HiddenStates`,
    `ShapeIndependent`.
    """

    branching = True

    def __init__(
        self,
        model: Any,
        capturer: Capturer | None = None,
        max_graphs: int = MAX_GRAPHS,
        max_bytes: int = MAX_BYTES,
        cache: IndexedCache | None = None,
    ) -> None:
        """capturer: by default CUDA graphs, and on other devices plain reruns.

        cache: another backend's, to share it; by default a new one.
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
        reason = why_not_captured(model)
        if reason is None and self.longest_short is not None:
            reason = "its rotations depend on how long each text is"
        if reason is not None:
            self._graphs.disable(reason)
        self._captured_moves = self.cache.moves  # when graphs were captured with the cache's addresses
        self._bodies = CapturedForwards(self.eager, self.cache)

    @property
    def attended_unit(self) -> int:
        return self.cache.attended_unit

    @attended_unit.setter
    def attended_unit(self, unit: int) -> None:
        self.cache.attended_unit = unit

    @property
    def shape_independent(self) -> bool:
        """True if kernels with a fixed order of sums compute all forwards, captured or not."""
        return self._bodies.stack is not None

    @property
    def flat(self) -> bool:
        """True only with those kernels: only they give a branch the same bits as in a row of its own."""
        return self.shape_independent

    def use_stack(self, stack: TritonStack | None) -> None:
        """Compute all forwards by these kernels from now on, or stop doing so (None); drops all captures."""
        self._graphs.clear()
        self._bodies.stack = stack

    def weights_digest(self) -> str:
        return self.eager.weights_digest()

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """Also drops all graphs, since they were captured without keeping hidden states."""
        self._graphs.clear()
        self.eager.keep_hidden_states(layers)

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor | None:
        return self.eager.hidden_states(layers, slot, start, stop)

    def layer_subset(self, layers: Sequence[int]) -> GraphedBackend:
        """The subset has its own graphs."""
        subset = GraphedBackend(self.eager.layer_subset(layers).model, cache=self.cache)
        if self._bodies.stack is not None:
            subset.use_stack(self._bodies.stack.subset(layers))
        if self._graphs.reason is not None and subset._graphs.reason is None:
            subset._graphs.disable(self._graphs.reason)
        return subset

    def graph_memory(self) -> GraphMemory:
        """Number of captured graphs and the device memory they hold."""
        return self._graphs.memory

    def reserve(self, rows: int, length: int) -> None:
        """Reserve more slots or positions, which drops all graphs.

        To do so rarely, it at least doubles slots, and grows positions by at least half.
        """
        slots, positions = self.cache.shape
        needed = -(-(length + SPARE) // self.attended_unit) * self.attended_unit
        if rows <= slots and needed <= positions and positions % self.attended_unit == 0:
            return
        self._graphs.clear()
        self.eager.reserve(max(rows, 2 * slots) if rows > slots else slots, needed)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """`HFBackend.forward`, replayed from a capture if it is narrow and begins at slot 0."""
        rows, width = tokens.shape
        bucket = self._bucket(starts, width, max(starts) + width) if logits and first_slot == 0 else None
        if bucket is not None:
            self._bodies.fill(bucket, tokens, starts, [width] * rows, [0] * rows)
            out = self._run(self._bodies.logits, bucket)
            if out is not None:
                return out[:rows, :width].clone()
        return self._eagerly(tokens, starts, first_slot, logits=logits)

    def _eagerly(self, tokens: Tensor, starts: list[int], first_slot: int, *, logits: bool) -> Tensor:
        if not self.shape_independent:
            return self.eager.forward(tokens, starts, first_slot=first_slot, logits=logits)
        nothing = None if logits else tokens.new_empty(0)
        return self._bodies.uncaptured(tokens, starts, range(first_slot, first_slot + len(starts)), nothing)

    @torch.inference_mode()
    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """Replayed from a capture if it is narrow and begins at slot 0.

        A row's tokens are written to its slot in order, and a mask tells which of them each token follows. Without the
        kernels, masked tokens between those of a branch's path therefore change its rounding.
        """
        table = tree_table(segments)
        starts, counts = table.starts, table.counts
        padding = len(tokens) - sum(counts)
        is_batch = (not padding or self.shape_independent) and table.slots == list(range(len(starts)))
        width = max(counts)
        bucket = self._bucket(starts, width, max(starts) + width) if is_batch else None
        if bucket is None and not self.shape_independent:
            return self.eager.forward_tree(self._bodies.embeddable(tokens), segments, widths=widths)
        rows, columns = (part.to(self.device, non_blocking=True) for part in table.cells())
        laid_out, out = tokens.new_zeros(len(starts), width), None
        laid_out[rows, columns] = tokens[: sum(counts)]
        if bucket is not None:
            self._bodies.fill(bucket, laid_out, starts, counts, [0] * len(starts))
            self._bodies.trees.fill(bucket, table)
            out = self._run(self._bodies.tree, bucket)
        if out is None and not self.shape_independent:
            return self.eager.forward_tree(self._bodies.embeddable(tokens), segments, widths=widths)
        if out is None:
            out = self._bodies.uncaptured(laid_out, starts, table.slots, tree=table)
        logits = out[rows, columns]
        return torch.cat([logits, logits[-1:].expand(padding, -1)]) if padding else logits

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        self.eager.move(slot, places, start)

    @torch.inference_mode()
    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """Run eagerly: prompts have too many different lengths to capture."""
        if self.shape_independent:
            return self._bodies.uncaptured(tokens, [start], [slot], columns)
        return self.eager.answer(tokens, start, slot=slot, columns=columns)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self.eager.copy(source, destination, length)

    @torch.inference_mode()
    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """All steps in one replay."""
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
        """Forward, choice and comparison in one replay."""
        bucket = self._bucket(starts, tokens.shape[1], max(starts) + tokens.shape[1])
        if bucket is not None:
            self._bodies.fill(bucket, tokens, starts, counts, lengths, width)
            out = self._run(self._bodies.verify, bucket)
            if out is not None:
                return out[: len(starts)].clone()
        chosen = self._eagerly(self._bodies.embeddable(tokens), starts, 0, logits=True).argmax(-1)
        table = self._bodies.table(starts, counts, lengths, width).to(self.device)
        return matching_prefix(tokens, chosen, *table[:, 1:].unbind(1))

    def _bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        """The bucket of forwards that write positions below `end`; None if they must run eagerly.

        If the cache must grow, all graphs are dropped, since they have its addresses. That costs little: the cache
        doubles, so it grows rarely, and a longer attended length needs new graphs anyway.
        """
        if self._graphs.reason is not None or not self.cache.allocated:
            return None
        bucket = self.cache.bucket(starts, width, end)
        if bucket is not None:
            self.cache.hold(bucket.rows, max(bucket.attended, end + SPARE))
            if self.shape_independent:  # the kernels skip positions after a row's end: one capture for all lengths
                bucket = replace(bucket, attended=self.cache.held[1])
        if self._captured_moves != self.cache.moves:
            self._graphs.clear()
            self._captured_moves = self.cache.moves
        return bucket

    def _run(self, body: Callable[..., Tensor], bucket: Bucket, *options: int) -> Tensor | None:
        return self._graphs.run((body.__name__, bucket, *options), partial(body, bucket, *options))

    def _draft_by_forwards(
        self, tokens: Tensor, starts: list[int], counts: list[int], steps: int, limit: int
    ) -> Tensor:
        """The specification of `CapturedForwards.draft`: one forward per step."""
        logits = self._eagerly(self._bodies.embeddable(tokens), starts, 0, logits=True)
        last = torch.tensor(counts, device=self.device) - 1
        drafted = [logits[torch.arange(len(starts), device=self.device), last, :limit].argmax(-1)]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        for step in range(steps - 1):
            positions = [start + step for start in ends]
            logits = self._eagerly(drafted[-1][:, None], positions, 0, logits=True)
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)


def use_kernels(backend: GraphedBackend, own_logits: OwnLogits, *, may_join: bool = False) -> str | None:
    """Compute the model by Triton kernels if they give its own results. Returns None, or the reason they do not.

    may_join: the model's weights may move in memory.
    """
    if not has_kernels():
        return "Triton is not installed"
    if backend.longest_short is not None:
        return "its rotations depend on how long each text is"
    try:
        plan = plan_of_model(backend.model, backend.eager.masks.windows)
        stack = TritonStack(backend.model, plan, may_join=may_join)
    except UnknownLayerError as unknown:
        return str(unknown)
    if "kernels" not in own_logits.passed:
        try:
            error = _error_of_kernels(backend, stack)
        except Exception as failed:  # kernels are compiled at first use, by compilers that may raise anything
            return f"the kernels cannot be compiled or run: {first_line(failed)}"
        if error > tolerance(backend.model):
            return f"the kernels give different results (by {error:.2g})"
        own_logits.passed.add("kernels")
    backend.use_stack(stack)
    return None


def _error_of_kernels(backend: GraphedBackend, stack: TritonStack) -> float:
    """The largest difference of a layer from the model's own, and of all of them at once from one after the other.

    Logits are not compared with the model's own: in models such as Gemma 3, later layers amplify rounding.
    """
    rerun = GraphedBackend(backend.model, Rerun(), cache=backend.cache)
    a_few_logits(rerun)  # allocates keys and values
    forwards = [(layer.module, layer.within_model(backend.cache)) for layer in stack.layers]
    with torch.cuda.device_of(backend.eager.key_positions()):  # Triton launches on the current device
        error = largest_error(rerun, [Trial(module, module.forward, forward) for module, forward in forwards])
        with forwards_replaced(forwards):
            one_by_one = a_few_logits(rerun)
    rerun.use_stack(stack)
    return max(error, difference(a_few_logits(rerun), one_by_one))
