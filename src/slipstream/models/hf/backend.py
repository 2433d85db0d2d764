"""Any decoder-only Hugging Face model as a backend: a slot-addressed KV cache, explicit positions and masks.

It runs the model's own forward. `slipstream.models.hf.fast_forwards` makes it faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.core.interfaces import Experts
from slipstream.core.kv_slots import PROMPT_UNIT
from slipstream.core.trees import TreeSegment
from slipstream.core.types import PromptImages
from slipstream.errors import UsageError
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.cpu.block_experts import ModelExperts, store_of
from slipstream.models.cpu.compiled_layers import LayerStack
from slipstream.models.decoder.attention import BLOCK, Heads, MaskBuilder, Masks, attended_length_agrees
from slipstream.models.decoder.cache import SlotCache, SlotLayer, TreeRows, given_cache, lay_out, tree_rows
from slipstream.models.decoder.recurrent_mixers import recurrent_states
from slipstream.models.hf import decoder_layers
from slipstream.models.hf.prepared_inputs import cache_name, input_device, vocab_size_of
from slipstream.models.hf.rotations_by_length import drops_cache, rotate_by_length, texts_are_long
from slipstream.models.hf.thresholds import longest_text


class HFBackend:
    """Runs a `PreTrainedModel` on a slot-addressed KV cache.

    Optional capabilities: `PromptLogits`, `AttendedLengths`, `RaggedForwards`, `TreeForwards`, `LayerKinds`,
    `Checkpoints`, `LongTexts`, `SeesImages`, `ShapeIndependent`, `HiddenStates`, `MixtureOfExperts`.

    ragged: whether the model's layers support ragged forwards. shape_independent: whether kernels compute each token as
    if it were alone. `fuse_layers` sets both. stack: computes all layers in one call, if set. position_offsets: [B, 1],
    added in trials to the cache's positions that the model sees.
    """

    def __init__(self, model: Any, cache: SlotCache | None = None) -> None:
        """cache: another backend's, to share it; by default a new one."""
        if cache is None:
            from slipstream.models.hf.supported_models import check_supported  # imports transformers

            check_supported(model)
        self.model = model.eval()
        self.device: torch.device = input_device(model)
        config = model.config.get_text_config()
        self.vocab_size = vocab_size_of(model)
        self.max_length: int = longest_text(config) or 1 << 20
        self.num_layers: int = config.num_hidden_layers
        self.cache = _new_cache(model, config.num_hidden_layers) if cache is None else cache
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model) or ""  # `check_supported` ensures that there is one
        self._takes_positions = "position_ids" in accepted
        self.masks = MaskBuilder(model)
        self._shares_keys = decoder_layers.shares_keys(model)
        self._store = store_of(self.model)
        self.ragged = self.shape_independent = False
        self.stack: LayerStack | None = None
        self.experts: Experts | None = ModelExperts.of(model)
        self.position_offsets: Tensor | None = None
        self.longest_short = rotate_by_length(model)
        self.reads_anew = self.longest_short is not None and drops_cache(model, self.longest_short)
        self._long_slots = set[int]()
        self._images = dict[int, PromptImages]()  # by slot
        self._key_positions = torch.arange(0, device=self.device)

    @property
    def attended_unit(self) -> int:
        """Shared with all backends on the same cache."""
        return self.cache.attended_unit

    @attended_unit.setter
    def attended_unit(self, unit: int) -> None:
        self.cache.attended_unit = unit

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """Shared like the unit, and always empty on devices other than the CPU."""
        return self.cache.attended_lengths

    @attended_lengths.setter
    def attended_lengths(self, lengths: tuple[int, ...]) -> None:
        self.cache.attended_lengths = lengths if self.device.type == "cpu" else ()

    def reserve(self, rows: int, length: int) -> None:
        """Grow the cache; see `Backend.reserve`."""
        self.cache.reserve(rows, length)

    def release(self) -> None:
        self.cache.release()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """One forward of the model over tokens [B, W]; see `Backend.forward`."""
        out = self._forward_rows(tokens, starts, first_slot, 0 if logits else None)
        return out.to(self.device) if logits else out.new_empty(0)

    @torch.inference_mode()
    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        return self._forward_rows(tokens, [start], slot, columns).to(self.device)

    @torch.inference_mode()
    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        return self._run_side_by_side(tokens, segments, widths, 0 if columns is None else columns)

    @property
    def branching(self) -> bool:
        """Recurrent layers follow a single chain, not the branches of a tree."""
        return self.cache.states is None

    @property
    def flat(self) -> bool:
        return self.ragged

    @torch.inference_mode()
    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """A ragged forward of all chains, or one that pads them to a rectangle."""
        tree = tree_rows(segments, len(tokens), self.device)
        if self.ragged:
            return self._run_side_by_side(tokens, segments, widths, 0, tree)
        width = max(segment.count for segment in segments)
        starts = torch.tensor([segment.start for segment in segments], device=self.device)
        positions = starts[:, None] + torch.arange(width, device=self.device)
        attended = self.cache.place_tree(tree, int(max(segment.start for segment in segments)) + width)
        table = tokens.new_zeros(len(segments), width)
        table[tree.cells] = tokens
        masks = partial(self.masks.build, positions, self.key_positions()[:attended])
        slots = self._slots([segment.slot for segment in segments])
        return self._run(table, positions, masks, 0, slots).to(self.device)[tree.cells]

    @torch.inference_mode()
    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        self.cache.move(slot, places, start)

    @torch.inference_mode()
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self.cache.copy(source, destination, length)

    @torch.inference_mode()
    def attended_length_agrees(self, widths: Sequence[int], length: int, full_length: int) -> bool:
        if self.shape_independent:  # its kernels read only positions that a token sees
            return True
        repeats = self.masks.repeats
        shapes = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in self.cache.layers if layer.keys is not None}
        if repeats is None or not shapes:
            return False
        blocks = range(PROMPT_UNIT, BLOCK + 1, PROMPT_UNIT)  # prompts come in multiples of the unit
        return all(
            attended_length_agrees(Heads(repeats, key_heads, size, self.model.dtype), width, length, full_length)
            for key_heads, size in shapes
            for width in (*widths, *blocks)
        )

    def layer_kinds(self) -> Sequence[Hashable]:
        return decoder_layers.kinds(self.model, self.masks.windows)

    def weights_digest(self) -> str:
        return decoder_layers.digest(self.model)

    def layer_subset(self, layers: Sequence[int]) -> HFBackend:
        if self.cache.states is not None:
            raise UsageError(
                f"drafter='layer_skip': a model of type {self.model.config.model_type!r} has recurrent layers, whose "
                "states a subset of the layers cannot share; allowed: another drafter"
            )
        return HFBackend(decoder_layers.make_layer_subset(self.model, self.num_layers, layers), self.cache)

    def separate_subset(self, layers: Sequence[int]) -> HFBackend:
        subset = decoder_layers.make_layer_subset(self.model, self.num_layers, layers)
        cache = type(self.cache)(self.num_layers)
        cache.states = recurrent_states(subset)
        cache.store_as(self.cache.dtype)
        return HFBackend(subset, cache)

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        _, decoder = decoder_layers.decoder_layers(self.model, self.num_layers)
        for i in layers:
            if i not in self.cache.hidden:
                self.cache.hidden[i] = SlotLayer()
                if i < self.num_layers:
                    decoder[i].register_forward_pre_hook(partial(_keep, self.cache, i), with_kwargs=True)
                else:
                    decoder[-1].register_forward_hook(partial(_keep, self.cache, i), with_kwargs=True)

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor | None:
        return self.cache.hidden_states(layers, slot, start, stop)

    def checkpoint(self, slot: int, limit: int) -> int:
        """Attention can go back to any position."""
        return limit if self.cache.states is None else self.cache.states.checkpoint(slot, limit)

    def mark_final(self, slot: int, position: int) -> None:
        if self.cache.states is not None:
            self.cache.states.mark_final(slot, position)

    def read_as(self, slot: int, *, is_long: bool) -> None:
        (self._long_slots.add if is_long else self._long_slots.discard)(slot)

    def show(self, slot: int, images: PromptImages | None) -> None:
        if images is None:
            self._images.pop(slot, None)
        else:
            self._images[slot] = images

    def key_positions(self) -> Tensor:
        """The positions [P] of all keys in the cache, computed again when it has grown."""
        if len(self._key_positions) != self.cache.shape[1]:
            self._key_positions = torch.arange(self.cache.shape[1], device=self.device)
        return self._key_positions

    def _forward_rows(self, tokens: Tensor, starts: list[int], first_slot: int, keep: int | Tensor | None) -> Tensor:
        width = tokens.shape[1]
        positions = torch.tensor([[*range(start, start + width)] for start in starts], device=self.device)
        shown = self._images.get(first_slot) if len(starts) == 1 else None
        block = None if shown is None else next((block for block in shown.blocks if block[0] == starts[0]), None)
        attended = self.cache.place(first_slot, starts, positions, sees_ahead=block is not None)
        states = self.cache.states
        slots = self._slots(range(first_slot, first_slot + len(starts)))
        if states is None:
            return self._run(
                tokens,
                positions,
                lambda: self.masks.build(positions, self.key_positions()[:attended], block=block),
                keep,
                slots,
            )
        states.begin(first_slot, starts, width)
        masks = partial(self.masks.build_hybrid, positions, self.key_positions()[:attended])
        logits = self._run(tokens, positions, masks, keep, slots)
        states.end()
        return logits

    def _run_side_by_side(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment | TreeSegment],
        widths: Sequence[int] | None,
        keep: int | Tensor,
        tree: TreeRows | None = None,
    ) -> Tensor:
        """Logits of tokens [T], the segments end to end. tree: the tree whose chains the segments are, if any."""
        layout = lay_out(segments, len(tokens), widths)
        attended = self.cache.place_ragged(layout) if tree is None else self.cache.place_tree(tree, layout.end, layout)
        masks = partial(self.masks.build, layout.queries, self.key_positions()[:attended])
        each = [segment.slot for segment in segments for _ in range(segment.count)]
        slots = self._slots(each + each[-1:] * (len(tokens) - len(each)))  # padding belongs to the last segment
        return self._run(tokens[None], layout.positions[None], masks, keep, None if slots is None else slots.T)[0]

    def _slots(self, slots: Sequence[int]) -> Tensor | None:
        """These slots as [len(slots), 1]; None if no row needs special treatment."""
        if self.longest_short is None and self._images.keys().isdisjoint(slots):
            return None
        return torch.tensor(list(slots), device=self.device)[:, None]

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Callable[[], Masks],
        keep: int | Tensor | None,
        slots: Tensor | None,
    ) -> Tensor:
        """slots: as from `_slots`, of each row [B, 1] or each token [1, W]."""
        if self.position_offsets is not None:
            positions = positions + self.position_offsets
        hidden = is_long = None
        if slots is not None and self.longest_short is not None:
            is_long = torch.isin(slots, torch.tensor([*self._long_slots], dtype=torch.int64, device=self.device))
        if slots is not None and self._images:
            hidden, positions = self._with_images(tokens, positions, slots)
        # padding may reach beyond the context's end, where learned positions have no row
        positions = positions.clamp(max=self.max_length - 1)
        with texts_are_long(is_long):
            logits = self._compute(tokens, positions, masks, keep, hidden)
        if self._store is not None:
            self._store.check()
        return logits

    def _with_images(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's input [B, W, H] with images, and rotary positions [B, W] or [3, B, W]."""
        hidden = self.model.get_input_embeddings()(tokens)
        rotary = positions
        for slot in set(slots.flatten().tolist()) & self._images.keys():
            images, is_here = self._images[slot], (slots == slot).expand_as(tokens)
            index = torch.searchsorted(images.places, positions).clamp(max=len(images.places) - 1)
            is_image = is_here & (images.places[index] == positions)
            hidden[is_image] = images.features[index[is_image]].to(hidden.dtype)
            if images.rotations is not None:
                length = images.rotations.shape[1]
                after = positions - length + images.rotations.max() + 1
                within = images.rotations[:, positions.clamp(max=length - 1)]
                rotary = torch.where(is_here, torch.where(positions < length, within, after), rotary)
        return hidden, rotary

    def _compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Callable[[], Masks],
        keep: int | Tensor | None,
        hidden: Tensor | None,
    ) -> Tensor:
        """keep: the columns whose logits are returned: indices, 0 for all, None if no logits are needed.

        hidden: the first layer's input, if it is not the tokens' embeddings.
        """
        # the stack's table of rotations ends with the cache, so it does not support offsets
        stack = self.stack if self.position_offsets is None and not self.cache.sees_ahead else None
        if stack is not None:
            stack_logits = stack.logits(tokens, positions, self.cache, keep, hidden)
            if stack_logits is not None:
                return stack_logits
        if keep is None:
            keep = 1
            if self._shares_keys and (self.cache.hidden or self.device.type == "cpu"):
                # keep=1 makes its last layers skip other tokens, but kept hidden states and kernels need all of them
                keep = torch.tensor([tokens.shape[1] - 1], device=self.device)
        inputs: dict[str, Any] = {self.cache_name: self.cache}
        if self._takes_positions:
            inputs["position_ids"] = positions
        inputs |= {"input_ids": tokens} if hidden is None else {"inputs_embeds": hidden}
        out = self.model(attention_mask=masks(), use_cache=True, logits_to_keep=keep, **inputs)
        logits: Tensor = out.logits
        return logits


def _new_cache(model: Any, num_layers: int) -> SlotCache:
    from slipstream.models.hf.interfaces import ModelCache  # imports transformers

    cache = ModelCache(num_layers)
    cache.states = recurrent_states(model)
    return cache


def _keep(
    cache: SlotCache,
    index: int,
    layer: torch.nn.Module,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    out: Tensor | tuple[Any, ...] | None = None,
) -> None:
    """A hook of a decoder layer: keep its input, or with `out` its output, in forwards over this cache."""
    if given_cache(options) is cache:
        kept = (inputs[0] if inputs else options["hidden_states"]) if out is None else out
        cache.keep_hidden(index, kept[0] if isinstance(kept, tuple) else kept)
