"""Gemma 4's assistants: small models without keys of their own, which attend to the target's cached keys.

A row of an assistant takes a token's embedding and the target's last hidden state, after the final norm, at the
position before; from the second token of a draft on, the assistant's own output replaces that hidden state. Every layer
reads the keys and values of the target's last layer of the same type that has its own. All tokens of a draft are
computed at the position of the newest token, and none is cached, so there is no prompt to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.cpu.packed_linear import pack, unsupported
from slipstream.models.cpu.quantized_linear import BITS, num_weights
from slipstream.models.heads.features import FeatureReader
from slipstream.models.heads.head_files import HeadFiles, check_size
from slipstream.models.heads.head_tensors import converter, refuse_draft_dtype
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.transformers_reader import quietly, reader_errors

SLIDING = "sliding_attention"


class AssistantBackend(FeatureReader):
    """Drafts from the target's keys and values.

    Per slot it keeps only its own outputs at the newest positions.
    """

    attended_unit = 1

    def __init__(self, model: Any, target: Loaded, sources: Mapping[str, int]) -> None:
        """model: transformers' assistant. sources: by type of layer, the target's layer whose keys it reads."""
        backend: Any = target.backend
        super().__init__([backend.num_layers])
        self.model, self._cache, self._sources = model, backend.cache, sources
        self._embed, self._norm = backend.model.get_input_embeddings(), backend.model.get_decoder().norm
        self.vocab_size, self.max_length, self.device = target.backend.vocab_size, backend.max_length, backend.device
        self._config = model.config.get_text_config()
        size = model.config.backbone_hidden_size
        self._returned = torch.zeros(0, MAX_DRAFT_TOKENS, size, dtype=model.dtype, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        if (missing := rows - len(self._returned)) > 0:
            self._returned = torch.cat([self._returned, self._returned.new_zeros(missing, *self._returned.shape[1:])])
        self.grow(rows)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        rows, width = tokens.shape
        slots = range(first_slot, first_slot + rows)
        for slot, start in zip(slots, starts, strict=True):
            self.note_right(slot, start, width)
        if not logits:
            return self._returned.new_empty(0)
        read = [self.num_read(slot) for slot in slots]
        first = [min(max(0, count - start), width - 1) for count, start in zip(read, starts, strict=True)]
        last = self._last_columns(slots, starts, width)
        steps = 1 + max(0, *(end - begin for begin, end in zip(first, last, strict=True)))
        seen = self._seen(slots, read)
        out: Tensor | None = None
        for step in range(steps):
            columns = [min(begin + step, max(begin, end)) for begin, end in zip(first, last, strict=True)]
            positions = [start + column for start, column in zip(starts, columns, strict=True)]
            chosen = torch.tensor(columns, device=self.device)[:, None]
            scores = self._step(tokens.gather(1, chosen), slots, positions, read, seen)
            if width == 1:
                return scores
            if out is None:
                out = scores.new_zeros(rows, width, self.vocab_size)
            out.scatter_(1, chosen[..., None].expand_as(scores), scores)
        assert out is not None
        return out

    def _last_columns(self, slots: range, starts: list[int], width: int) -> list[int]:
        """The column of each row's last token: rows that have fewer tokens than others are padded."""
        ahead = list[int]()  # committed tokens from each row's start on
        for slot, start in zip(slots, starts, strict=True):
            row = self.target_slots[slot].row if slot < len(self.target_slots) else None
            if row is None:
                return [width - 1] * len(slots)
            ahead.append(len(row.tokens) - start)
        return [width - 1 - max(ahead) + count for count in ahead]

    def _seen(self, slots: range, read: list[int]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """By type of layer: the target's cached keys and values [B, heads, L, D], and a mask [B, 1, 1, L] for each row.

        A row without cached tokens attends to one arbitrary key, since attention to no key is NaN.
        """
        length = max(1, *read)
        counts, places = torch.tensor(read, device=self.device)[:, None], torch.arange(length, device=self.device)
        is_read = places < counts.clamp(min=1)
        within = is_read & (places >= counts - 1 - self._config.sliding_window)
        seen = {}
        for kind, layer in self._sources.items():
            cached = self._cache.layers[layer]
            if cached.keys is None or max(read) == 0:
                sizes = self._config.per_layer_config[self._config.layer_types.index(kind)]
                keys = self._returned.new_zeros(len(slots), sizes.num_key_value_heads, length, sizes.head_dim)
                values = keys
            else:
                of_slots = slice(slots.start, slots.stop), slice(None), slice(length)
                keys, values = (part[of_slots].to(self._returned.dtype) for part in (cached.keys, cached.values))
            seen[kind] = keys, values, (within if kind == SLIDING else is_read)[:, None, None]
        return seen

    def _step(
        self,
        tokens: Tensor,
        slots: range,
        positions: list[int],
        read: list[int],
        seen: dict[str, tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """Logits [B, 1, V] after tokens [B, 1] at these positions."""
        where = torch.tensor([*slots], device=self.device)
        places = torch.tensor(positions, device=self.device)
        entering = self._returned[where, (places - 1) % MAX_DRAFT_TOKENS]
        for i, (slot, position, count) in enumerate(zip(slots, positions, read, strict=True)):
            if position <= count and (feature := self.features(slot, position, 1)) is not None and len(feature):
                entering[i] = self._norm(feature[0].to(self._norm.weight.dtype)).to(entering.dtype)
        inputs = torch.cat([self._embed(tokens).to(entering.dtype), entering[:, None]], -1)
        newest = torch.tensor(read, device=self.device)[:, None].clamp(max=self.max_length - 1)
        hidden = self.model.model(
            inputs_embeds=self.model.pre_projection(inputs),
            attention_mask={kind: mask for kind, (_, _, mask) in seen.items()},
            position_ids=newest,
            shared_kv_states={kind: (keys, values) for kind, (keys, values, _) in seen.items()},
            use_cache=False,
        ).last_hidden_state
        self._returned[where, places % MAX_DRAFT_TOKENS] = self.model.post_projection(hidden)[:, 0]
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, 1, V]. An assistant that scores clusters of tokens first rules out the tokens of all other clusters."""
        embedder = self.model.masked_embedding
        if embedder is None:
            scores: Tensor = self.model.lm_head(hidden)
            return scores[..., : self.vocab_size]
        clusters = embedder.token_ordering.long().view(embedder.num_centroids, -1)
        nearest = embedder.centroids(hidden).topk(embedder.centroid_intermediate_top_k).indices
        tokens = clusters[nearest].flatten(-2)
        scores = (self.model.lm_head.weight[tokens] @ hidden[..., None])[..., 0]
        return scores.new_full((*tokens.shape[:-1], self.vocab_size), float("-inf")).scatter_(-1, tokens, scores)


def load_assistant(files: HeadFiles, target: Loaded, options: LoadOptions) -> AssistantBackend:
    """An assistant for a target. options: the draft's."""
    backend: Any = target.backend
    config = backend.model.config
    if getattr(config.get_text_config(), "kv_sharing_modes", None) is None:
        raise UsageError(
            f"draft {files.source!r} is an assistant of Gemma 4, which reads its target's keys and values; target "
            f"{target.name!r} has type {config.model_type!r} of transformers {version('transformers')}; allowed: a "
            "Gemma 4 model of transformers 5.24 or later"
        )
    dtype, device = backend.model.dtype, backend.device
    if files.model is not None:
        if options.quantize in BITS or options.draft_type is not None:
            raise UsageError(
                f"draft_dtype={options.draft_type or options.quantize!r}, but the draft {files.source!r} is loaded "
                "already; allowed: 'auto'"
            )
        model, sources = files.model.eval(), _sources(files.model.config, files, target)
        if (model.dtype, model.device) != (dtype, device):
            raise UsageError(
                f"draft {files.source!r} is of {model.dtype} on {model.device}; allowed: {dtype} on {device}, as its "
                f"target {target.name!r}"
            )
        return AssistantBackend(model, target, sources)
    reader = _Reader(files, options)
    sources = _sources(reader.config, files, target)
    model = reader.model(dtype).to(device)
    reason = unsupported(model)
    refuse_draft_dtype(files.source, options, device, dtype, reason)
    if reason is None and (options.fast is not False or options.quantize in BITS):
        convert = converter(num_weights(model), model.dtype, options)
        pack(model, convert, [] if model.masked_embedding is None else [model.lm_head])  # its rows are looked up
    return AssistantBackend(model, target, sources)


def _sources(config: Any, files: HeadFiles, target: Loaded) -> dict[str, int]:
    """By type of the assistant's layers, the target's layer whose keys and values they read.

    Raises `UsageError` if an assistant with this configuration belongs to another target.
    """
    backend: Any = target.backend
    text_config, target_config = config.get_text_config(), backend.model.config.get_text_config()
    check_size(files, target, "backbone_hidden_size", config.backbone_hidden_size, target_config.hidden_size)
    check_size(files, target, "vocab_size", text_config.vocab_size, backend.vocab_size)
    modes = zip(target_config.layer_types, target_config.kv_sharing_modes, strict=True)
    stored = {kind: layer for layer, (kind, mode) in enumerate(modes) if mode == "store"}
    sources = dict[str, int]()
    for number, kind in enumerate(text_config.layer_types):
        if kind not in stored:
            raise UsageError(f"draft {files.source!r} has layers of kind {kind!r}; allowed: {sorted(stored)}")
        sources[kind] = stored[kind]
        sizes, target_sizes = text_config.per_layer_config[number], target_config.per_layer_config[stored[kind]]
        for name in ("head_dim", "num_key_value_heads"):
            check_size(files, target, f"{name} of {kind}", getattr(sizes, name), getattr(target_sizes, name))
    return sources


class _Reader:
    """Reads an assistant's files with transformers."""

    def __init__(self, files: HeadFiles, options: LoadOptions) -> None:
        import transformers

        self._files, self._options = files, options
        self._kind = getattr(transformers, files.settings["architectures"][0])
        self.config: Any = self._read(self._kind.config_class)

    def model(self, dtype: torch.dtype) -> Any:
        """The assistant without its embedding: the target embeds tokens."""
        model, report = self._read(
            self._kind, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True, config=self.config
        )
        misfits = {*report["missing_keys"], *report["unexpected_keys"], *(key[0] for key in report["mismatched_keys"])}
        if misfits:
            raise SlipstreamError(
                f"draft {self._files.source!r}: {len(misfits)} tensors do not fit its config.json, "
                f"first {min(misfits)!r}"
            )
        model.model.embed_tokens = None
        return model.eval()

    def _read(self, kind: Any, **settings: Any) -> Any:
        try:
            with quietly():
                return kind.from_pretrained(self._files.folder, **settings, **self._options.files)
        except reader_errors() as error:
            raise SlipstreamError(f"draft {self._files.source!r} could not be read: {one_line(error)}") from error
