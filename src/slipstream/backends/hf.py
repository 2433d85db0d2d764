"""Any decoder-only Hugging Face model as a backend: our own cache layers, explicit positions and masks.

The model's forward is used as it is. Its cache is replaced by preallocated buffers in which slot and position are
given explicitly, so a rejected token is simply written over. This module and its neighbours are the only ones that
import transformers.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from slipstream.backends import Loaded, LoadOptions, grouped
from slipstream.backends.packed import pack, unsupported
from slipstream.backends.tokenizers import HFTokenizer, load_tokenizer
from slipstream.types import SlipstreamError, UsageError

log = logging.getLogger("slipstream")

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of grouped attention's logits, relative to the largest
VIEW = 256  # attention reads the memory up to the next multiple of this, unless calibration found another


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer: [slots, heads, positions, head size], written where the cache says."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `SlotCache.reserve` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """`SlotCache.update` writes; a layer on its own does not know where."""
        raise SlipstreamError("a slot layer is written through its cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is always given, so this is informative only."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Positions are always given, so no length is implied."""
        return 0

    def get_max_length(self) -> int:
        """Number of positions."""
        return 0 if self.keys is None else self.keys.shape[2]

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Slot-addressed memory of a model. `place` says where the next forward writes and how far it reads."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])
        self._shape = (0, 0)
        self._slots = slice(0, 0)
        self._view = 0
        self._span: slice | None = None
        self._rows = self._columns = torch.empty(0, dtype=torch.int64)

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; existing content stays."""
        length = -(-length // VIEW) * VIEW
        if rows > self._shape[0] or length > self._shape[1]:
            grown = max(self._shape[1] * 3 // 2 // VIEW * VIEW, length) if length > self._shape[1] else self._shape[1]
            self._shape = max(rows, self._shape[0]), grown
            for layer in self.layers:
                if layer.keys is not None:
                    layer.keys, layer.values = self._resized(layer.keys), self._resized(layer.values)

    def place(self, first_slot: int, starts: list[int], columns: Tensor, unit: int) -> int:
        """Aim the next forward: row i writes the positions columns[i] of slot first_slot + i, from starts[i] on.

        columns: [rows, width]. Returns the number of positions attention will see, a multiple of `unit` if there is
        room for it.
        """
        width = columns.shape[1]
        self._slots = slice(first_slot, first_slot + len(starts))
        self._view = min(-(-(max(starts) + width) // unit) * unit, self._shape[1])
        self._span = slice(starts[0], starts[0] + width) if len(set(starts)) == 1 else None
        if self._span is None:
            self._rows = torch.arange(first_slot, first_slot + len(starts), device=columns.device)[:, None]
            self._columns = columns
        return self._view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [rows, heads, width, size] and return the views attention reads."""
        layer = self.layers[layer_idx]
        if layer.keys is None:
            layer.keys, layer.values = self._allocate(key_states), self._allocate(value_states)
        return self._write(layer.keys, key_states), self._write(layer.values, value_states)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another in every layer."""
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys[destination, :, :length] = layer.keys[source, :, :length]
                layer.values[destination, :, :length] = layer.values[source, :, :length]

    def _write(self, memory: Tensor, states: Tensor) -> Tensor:
        if self._span is not None:
            memory[self._slots, :, self._span] = states
        else:
            rows, columns = self._rows.to(memory.device), self._columns.to(memory.device)
            memory[rows, :, columns] = states.transpose(1, 2)
        return memory[self._slots, :, : self._view]

    def _allocate(self, states: Tensor) -> Tensor:
        # zeros, not empty: a masked position still enters a product with weight 0, and 0 times NaN is NaN
        return states.new_zeros(self._shape[0], states.shape[1], self._shape[1], states.shape[3])

    def _resized(self, memory: Tensor) -> Tensor:
        grown = memory.new_zeros(self._shape[0], memory.shape[1], self._shape[1], memory.shape[3])
        grown[: memory.shape[0], :, : memory.shape[2]] = memory
        return grown


class HFBackend:
    """Runs a `PreTrainedModel` on slot-addressed memory."""

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.view = VIEW
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.max_length: int = getattr(config, "max_position_embeddings", None) or 1 << 20
        self._window, self._layer_types = _windows(config)
        self._cache = SlotCache(config.num_hidden_layers)
        self._float_mask = model.dtype if config._attn_implementation == "eager" else None
        is_grouped = config._attn_implementation == grouped.NAME
        self._repeats = grouped.repeats_of(config) if is_grouped else None
        self._key_positions = torch.arange(0, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Grow the memory; the longest view sets the size of the mask."""
        self._cache.reserve(rows, -(-length // self.view) * self.view)
        self._key_positions = torch.arange(self._cache._shape[1], device=self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """One forward of the model over tokens [B, W]; see `Backend.forward`."""
        first = torch.tensor(starts, device=self.device)[:, None]
        positions = first + self._key_positions[: tokens.shape[1]]
        view = self._cache.place(first_slot, starts, positions, self.view)
        out = self.model(
            input_ids=tokens,
            attention_mask=self._masks(positions, view),
            # padding may stick out over the context's end, where learned positions have no row
            position_ids=positions.clamp(max=self.max_length - 1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if logits else 1,
        )
        result: Tensor = out.logits
        return result.to(self.device) if logits else result.new_empty(0)

    def group_queries(self) -> None:
        """Use grouped attention if it gives this model's own logits; a few tokens are tried."""
        config = self.model.config.get_text_config()
        repeats = grouped.repeats_of(config)
        if config._attn_implementation != "sdpa" or repeats is None:
            return
        self.reserve(1, 2 * self.view)
        tokens = torch.arange(1, 7, device=self.device)[None] % self.vocab_size
        expected = self.forward(tokens, [0], first_slot=0, logits=True).float()
        self.model.config._attn_implementation, self._repeats = grouped.NAME, repeats
        try:
            got = self.forward(tokens, [0], first_slot=0, logits=True).float()
            same = bool((got - expected).abs().max() <= TOLERANCE[self.model.dtype] * expected.abs().max())
        except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
            log.info("%s keeps its own attention: %s", type(self.model).__name__, error)
            same = False
        if not same:
            self.model.config._attn_implementation, self._repeats = "sdpa", None

    @torch.inference_mode()
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy keys and values between slots."""
        self._cache.copy(source, destination, length)

    def _masks(self, positions: Tensor, view: int) -> Tensor | dict[str, Tensor]:
        """[B, 1, W, view] masks, True where a query may look: one, or one per layer type for mixed models."""
        keys, queries = self._key_positions[:view], positions[:, None, :, None]
        causal = keys <= queries
        masks = {"full_attention": self._as_mask(causal)}
        if self._window is not None:
            masks["sliding_attention"] = self._as_mask(causal & (keys > queries - self._window))
        return masks if len(self._layer_types) > 1 else masks[next(iter(self._layer_types))]

    def _as_mask(self, allowed: Tensor) -> Tensor:
        if self._repeats is not None:
            return grouped.group_mask(allowed, self._repeats, self.model.dtype)
        if self._float_mask is None:
            return allowed
        blocked = torch.finfo(self._float_mask).min
        return torch.zeros(allowed.shape, dtype=self._float_mask, device=allowed.device).masked_fill(~allowed, blocked)


def _windows(config: Any) -> tuple[int | None, frozenset[str]]:
    """The sliding window, if any layer has one, and the set of attention types among the layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"]
    kinds = frozenset(types)
    return (window if "sliding_attention" in kinds else None), kinds


def check_supported(model: Any) -> None:
    """Refuse, by name and with the reason, models whose state cannot be addressed by position."""
    name, config = type(model).__name__, model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder model; allowed: decoder-only models"
    elif getattr(model, "_is_stateful", False) or not _only_attention(config):
        reason = "it carries recurrent state or compressed attention, which cannot be rolled back to an earlier token"
    elif missing := [p for p in ("position_ids", "past_key_values", "logits_to_keep") if p not in parameters]:
        reason = f"its forward takes no {missing[0]}"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-modelling head"
    elif config._attn_implementation not in ("sdpa", "eager", grouped.NAME):
        reason = f"attn_implementation={config._attn_implementation!r} takes no explicit mask; allowed: 'sdpa', 'eager'"
    if reason:
        raise UsageError(f"model {name} is not supported: {reason}")


def _only_attention(config: Any) -> bool:
    allowed = {DynamicLayer, DynamicSlidingWindowLayer}
    kinds = set(getattr(config, "layer_types", None) or [])
    layers = DynamicCache(config=config).layers
    return kinds <= {"full_attention", "sliding_attention"} and all(type(layer) in allowed for layer in layers)


def wrap_model(model: Any, tokenizer: Any, options: LoadOptions) -> Loaded:
    """A loaded `PreTrainedModel` as a backend; its tokenizer is needed for text prompts only.

    The model is the caller's, so its weights are packed only if fast=True asks for it.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise UsageError(f"model of type {type(model).__name__}; allowed: a Hugging Face PreTrainedModel")
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else None
    backend = HFBackend(model)
    packed = options.fast is True and _pack(backend, options.fast)
    name = model.config._name_or_path or type(model).__name__
    ends = end_ids(model, backend.vocab_size)
    return Loaded(backend, name, ends, wrapped, model, packed, _fingerprint(model, packed))


def _pack(backend: HFBackend, fast: bool | str) -> bool:
    if fast is False:
        return False
    model = backend.model
    reason = unsupported(model)
    if reason is None:
        pack(model)
        backend.group_queries()
    elif fast is True:
        raise UsageError(f"fast=True, but {type(model).__name__} cannot be packed: {reason}; allowed: 'auto' or False")
    else:
        log.info("%s keeps its plain weights: %s", type(model).__name__, reason)
    return reason is None


def end_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids `generate` would use."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    ids = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
    return tuple(i for i in ids if 0 <= i < vocab_size)


def load_pretrained(source: str, options: LoadOptions, tokenizer: Any) -> Loaded:
    """Load a folder, a .gguf file, the embedded model or a hub id."""
    from slipstream.backends.files import load_model

    folder, model = load_model(source, options)
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else load_tokenizer(source, folder)
    backend = HFBackend(model)
    packed, ends = _pack(backend, options.fast), end_ids(model, backend.vocab_size)
    return Loaded(backend, source, ends, wrapped, model, packed, _fingerprint(model, packed))


def _fingerprint(model: Any, packed: bool) -> str:
    shapes = sorted({f"{tuple(p.shape)} {p.dtype}" for p in model.parameters()})
    config = model.config.get_text_config()
    layers = f"{type(model).__name__} {config.num_hidden_layers} layers {config._attn_implementation}"
    sizes = f"{config.hidden_size} {config.num_attention_heads} {getattr(config, 'intermediate_size', '')}"
    return f"{layers} {sizes} {config.vocab_size} {model.dtype} {'packed' if packed else 'plain'} {' '.join(shapes)}"
