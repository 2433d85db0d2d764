"""Hugging Face models on CUDA, replayed as captured graphs: one launch per forward.

The specification of every method is `HFBackend`'s forward. Decoding consists of forwards of a few tokens from slot 0
on. They run in buckets of (rows, width, attended length): tokens and positions go into fixed buffers, from which the
device computes positions, mask and cache addresses. Bodies, the functions that are captured, read everything that
changes from the buffers, and take only shapes as arguments. What follows a forward, such as the choice of a token, is a
few operators, which the host launches while the device computes. All other forwards, mainly prompts, run eagerly.
`use_kernels` has Triton kernels compute the whole model, prompts included, if they give its own results. Then no bit
depends on the shape of a forward, and one capture serves all lengths.

Shapes: B rows, W columns, R >= B and C >= W those of the bucket, V the vocabulary.
"""

from __future__ import annotations

import hashlib
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
    SPARE,
    Bucket,
    BucketBuffers,
    Buffer,
    IndexedCache,
    IndexedForward,
    TreeTable,
    tree_table,
)
from slipstream.models.cuda.stored_weights import stored_weights
from slipstream.models.cuda.triton_layer import TritonStack
from slipstream.models.decoder.attention import Masks
from slipstream.models.decoder.families import plan_of_model
from slipstream.models.decoder.plan import DecoderPlan, UnknownLayerError
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
from slipstream.models.notices import announce, progress_bar

ROWS_AHEAD, WIDTHS_AHEAD = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)  # of forwards that are captured at load
POSITIONS_AHEAD = 8192  # reserved for each row at load, if they fit into a share of the free memory
MEMORY_SHARE = 0.25
UNIT = 1024  # of positions reserved at load: a multiple of all units in which forwards attend


def matching_prefix(tokens: Tensor, chosen: Tensor, counts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Longest matching prefix; the specification is `acceptance.match`.

    tokens: [B, W]; row i has counts[i] tokens: the last `width` are its draft's columns, of which the first lengths[i]
    were proposed. chosen: [B, W], the model's own choice after each token. Returns [B, 2]: the number of accepted draft
    tokens, and the token that follows them.
    """
    last = tokens.shape[1] - 1
    steps = torch.arange(last + 1, device=tokens.device)
    index = ((counts - width - 1)[:, None] + steps).clamp(max=last)
    choices, draft = chosen.gather(1, index), tokens.gather(1, index[:, 1:])
    agree = (choices[:, :last] == draft) & (steps[:last] < lengths[:, None])
    accepted = agree.long().cumprod(1).sum(1)
    return torch.stack([accepted, choices.gather(1, accepted[:, None])[:, 0]], dim=1)


class CapturedForwards:
    """The buffers of a model's graphs and the bodies that read them; `uncaptured` runs other forwards by kernels.

    stack: the model's forward by kernels; None if there is none.
    """

    def __init__(self, eager: HFBackend, cache: IndexedCache) -> None:
        self._eager, self._cache, self._device = eager, cache, eager.device
        self.stack: TritonStack | None = None
        self._buffers: dict[tuple[int, int], BucketBuffers] = {}

    def buffers(self, bucket: Bucket) -> BucketBuffers:
        """The buffers from which all graphs of this shape read."""
        key = bucket.rows, bucket.width
        if key not in self._buffers:
            self._buffers[key] = BucketBuffers(*key, self._device)
        return self._buffers[key]

    def logits(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of the tokens in the buffer.

        Padding gets its row's last position: beyond the attended length, a sliding window might leave it no key.
        """
        buffers = self.buffers(bucket)
        starts, counts = buffers.table.values.unbind(1)
        offsets = torch.arange(bucket.width, device=self._device)
        positions = starts[:, None] + torch.minimum(offsets, (counts[:, None] - 1).clamp(min=0))
        forward = self._indexed_forward(bucket, positions)
        masks = partial(self._eager.masks.build, positions, self._eager.key_positions()[: bucket.attended])
        return self._forward(buffers.tokens, forward, masks)

    def tree(self, bucket: Bucket) -> Tensor:
        """[R, C, V] logits of trees; the buffers have the position of each token and the tokens that it follows."""
        buffers = self.buffers(bucket)
        starts, (depths, _, ancestors) = buffers.table.values[:, 0], buffers.tree
        positions = starts[:, None] + depths.values
        forward = self._indexed_forward(bucket, positions, ancestors.values)

        def masks() -> Masks:
            places, visible = buffers.places(starts, self._eager.key_positions()[: bucket.attended])
            return self._eager.masks.build(positions, places[:, None, None], visible[:, None])

        return self._forward(buffers.tokens, forward, masks)

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

    def _indexed_forward(self, bucket: Bucket, positions: Tensor, ancestors: Tensor | None = None) -> IndexedForward:
        """A forward of the tokens in the buffers.

        Padding is written to the spare positions at the end of its slot. Nothing attends to them, so a NaN there cannot
        spread.
        """
        starts, counts = (part.contiguous() for part in self.buffers(bucket).table.values.unbind(1))
        slots, offsets = (torch.arange(n, device=self._device) for n in (bucket.rows, bucket.width))
        written = starts[:, None] + offsets
        columns = torch.where(offsets < counts[:, None], written, self._cache.spare + offsets)
        return IndexedForward(slots, starts, positions, columns, bucket.attended, ancestors)

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
    `PreparedForwards`, `ShapeIndependent`.
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
        self._numbers: dict[torch.Size, Buffer] = {}

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
        digest = self.eager.weights_digest()
        if stored := stored_weights(self.model):
            first_rows = torch.cat([weight.data[:1].flatten().cpu() for weight in stored])
            digest = hashlib.sha256(digest.encode() + first_rows.numpy().tobytes()).hexdigest()[:20]
        return digest

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
    def prepare(self, rows: int) -> None:
        """Reserve memory for texts of up to `rows` rows, and capture their forwards, the largest first.

        Later captures then find the memory that they need in the pool, and no growing text moves the cache.
        """
        if self._graphs.reason is not None or not self.cache.allocated:
            return
        self.reserve(rows + 1, self._positions_ahead(rows + 1))  # a server keeps a slot for the next request
        self.cache.hold(*self.cache.shape)
        shapes = [
            (row_count, width)
            for row_count in reversed(ROWS_AHEAD)
            for width in reversed(WIDTHS_AHEAD)
            if row_count < 2 * rows
        ]
        name = type(self.model).__name__
        with progress_bar("capturing CUDA graphs", f"capturing CUDA graphs of {name} ...", total=len(shapes)) as bar:
            for row_count, width in shapes:
                counts = [width] * min(row_count, rows)
                tokens = torch.zeros(len(counts), width, dtype=torch.int64, device=self.device)
                self._replayed(tokens, [0] * len(counts), counts)
                bar.advance(bar.task_ids[0])

    def _positions_ahead(self, rows: int) -> int:
        """The positions to reserve for each of these rows; the trials' few if memory is short."""
        stored = [layer.keys for layer in self.cache.layers if layer.keys is not None]
        each = rows * sum(2 * keys.shape[1] * keys.shape[3] * keys.element_size() for keys in stored)
        fitting = POSITIONS_AHEAD
        if self.device.type == "cuda":
            fitting = int(MEMORY_SHARE * torch.cuda.mem_get_info(self.device)[0]) // each
        return max(0, min(POSITIONS_AHEAD, self.max_length, fitting) // UNIT * UNIT - SPARE)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """`HFBackend.forward`, replayed from a capture if it is narrow and begins at slot 0."""
        if logits and first_slot == 0:
            out = self._replayed(tokens, starts, [tokens.shape[1]] * len(starts))
            if out is not None:
                return out.clone()
        return self._eagerly(tokens, starts, first_slot, logits=logits)

    def _replayed(self, tokens: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor | None:
        """Logits [B, W, V] of tokens [B, W] by a graph, valid until its next replay; None if there is none.

        counts: how many columns of each row are real.
        """
        width = tokens.shape[1]
        bucket = self._bucket(starts, width, max(starts) + width)
        if bucket is None:
            return None
        self._bodies.buffers(bucket).fill(tokens, starts, counts)
        out = self._run(self._bodies.logits, bucket)
        return None if out is None else out[: len(starts), :width]

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
            buffers = self._bodies.buffers(bucket)
            buffers.fill(laid_out, starts, counts)
            buffers.fill_tree(table)
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
        """One replay per step; the host waits for none of them."""
        rows, limit = torch.arange(len(starts), device=self.device), min(vocab_size, self.vocab_size)
        last = self._on_device(counts)[0] - 1
        drafted = [self._scored(tokens, starts, counts)[rows, last, :limit].argmax(-1)]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        for step in range(steps - 1):
            positions = [end + step for end in ends]
            logits = self._scored(drafted[-1][:, None], positions, [1] * len(starts))
            drafted.append(logits[:, 0, :limit].argmax(-1))
        return torch.stack(drafted, dim=1)

    @torch.inference_mode()
    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """One replay; choice and comparison follow without waiting for it."""
        chosen = self._scored(tokens, starts, counts).argmax(-1)
        real, proposed = self._on_device(counts, lengths).unbind(0)
        return matching_prefix(tokens, chosen, real, proposed, width)

    def _scored(self, tokens: Tensor, starts: list[int], counts: Sequence[int]) -> Tensor:
        """Logits [B, W, V], valid until the next forward. counts: how many columns of each row are real."""
        out = self._replayed(tokens, starts, counts)
        return self._eagerly(self._bodies.embeddable(tokens), starts, 0, logits=True) if out is None else out

    def _on_device(self, *numbers: Sequence[int]) -> Tensor:
        """Some numbers per row as [len(numbers), B], valid until the next call."""
        values = torch.tensor(numbers)
        if values.shape not in self._numbers:
            self._numbers[values.shape] = Buffer(values.shape, torch.int64, self.device)
        self._numbers[values.shape].fill(values)
        return self._numbers[values.shape].values

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

    def _run(self, body: Callable[[Bucket], Tensor], bucket: Bucket) -> Tensor | None:
        return self._graphs.run((body.__name__, bucket), partial(body, bucket))


def use_kernels(
    backend: GraphedBackend, own_logits: OwnLogits, plan: DecoderPlan | None = None, *, may_join: bool = False
) -> str | None:
    """Compute the model by Triton kernels if they give its own results. Returns None, or the reason they do not.

    plan: by default that of the model's family; may_join: the model's weights may move in memory.
    """
    if backend.longest_short is not None:
        return "its rotations depend on how long each text is"
    try:
        plan = plan or plan_of_model(backend.model, backend.eager.masks.windows)
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
    announce(f"compiling kernels for {type(backend.model).__name__} (once) ...")
    rerun = GraphedBackend(backend.model, Rerun(), cache=backend.cache)
    a_few_logits(rerun)  # allocates keys and values
    forwards = [(layer.module, layer.within_model(backend.cache)) for layer in stack.layers]
    with torch.cuda.device_of(backend.eager.key_positions()):  # Triton launches on the current device
        error = largest_error(rerun, [Trial(module, module.forward, forward) for module, forward in forwards])
        with forwards_replaced(forwards):
            one_by_one = a_few_logits(rerun)
    rerun.use_stack(stack)
    return max(error, difference(a_few_logits(rerun), one_by_one))
