"""A target's own multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a draft head.

A layer's row s holds token x_s and a hidden state of position s - 1, and predicts x_{s+1}. The first layer reads the
target's last hidden state, after the final norm; each further layer reads the output of the layer before it, and drafts
one more token. For further tokens the last layer reads its own output. The layers are read from the target's own
checkpoint. Transformers reads the decoder layer in each as a model of one layer, so that its own conversions apply.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.backend_capabilities import HiddenStates
from slipstream.models.cpu.packed_linear import pack, unsupported
from slipstream.models.cpu.quantized_linear import BITS, convert_experts
from slipstream.models.decoder.attention import STATEFUL, MaskBuilder
from slipstream.models.decoder.cache import KEYS_AND_VALUES, SlotLayer
from slipstream.models.decoder.fused_linear import called_by_none, linear_calls
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.heads.features import FeatureReader, model_for
from slipstream.models.heads.head_files import HeadFiles
from slipstream.models.heads.head_tensors import converter, refuse_draft_dtype
from slipstream.models.loaded import MTP, Loaded, LoadOptions
from slipstream.models.weights.model_files import is_gguf
from slipstream.models.weights.mtp_tensors import LayerTensors, mtp_layers, of_another_form
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles, file_of
from slipstream.models.weights.transformers_reader import quietly, reader_errors

RETURNED = 0  # the number under which a layer's cache keeps the layer's output
HIDDEN_FIRST = "input_proj.weight"  # a projection whose input is the hidden state, then the token
SPARSE = ".experts."  # in the names of tensors of a mixture of experts


class MtpLayer:
    """One MTP layer, as transformers' own decoder of a single layer, on slots of its own KV cache."""

    def __init__(
        self, decoder: Any, token_norm: nn.Module, hidden_norm: nn.Module, project: nn.Module, *, hidden_first: bool
    ) -> None:
        """decoder: this layer and the norm after it. project: from a token and a hidden state, both normalized.

        hidden_first: the input of `project` is the hidden state, then the token.
        """
        self.decoder, self.token_norm, self.hidden_norm, self.project = decoder, token_norm, hidden_norm, project
        self.hidden_first = hidden_first
        from slipstream.models.hf.interfaces import ModelCache  # imports transformers

        self.cache = ModelCache(1)
        self.cache.hidden[RETURNED] = SlotLayer()
        self.cache.attended_unit = 1
        accepted = inspect.signature(decoder.forward).parameters
        self._cache_name = next(name for name in KEYS_AND_VALUES if name in accepted)
        self._masks = MaskBuilder(decoder)
        self._kinds = tuple(getattr(decoder.config, "layer_types", None) or ())

    def forward(self, embedded: Tensor, entering: Tensor, positions: Tensor, keys: Tensor, first: int) -> Tensor:
        """Outputs [B, W, H] for tokens and hidden states [B, W, H] at positions [B, W], as passed to `cache.place`.

        keys: positions [S] that attention reads; those before `first` never got a hidden state, and are masked.
        """
        joined = [self.token_norm(embedded), self.hidden_norm(entering)]
        inputs = self.project(torch.cat(joined[::-1] if self.hidden_first else joined, -1))
        is_row = (keys >= first) | (keys == positions[..., None])  # a row that sees no key would be NaN
        masks: Any = self._masks.build(positions, keys, is_row[:, None])
        if self._kinds:  # decoders with several types of layers look up masks by type
            masks = {**dict.fromkeys(STATEFUL), **dict.fromkeys(self._kinds, masks)}
        cache: dict[str, Any] = {self._cache_name: self.cache}
        out = self.decoder(
            inputs_embeds=inputs, attention_mask=masks, position_ids=positions, use_cache=True, **cache
        ).last_hidden_state
        self.cache.keep_hidden(RETURNED, out)
        returned: Tensor = out
        return returned

    def returned(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """This layer's outputs [B, W, H] at positions [B, W] of slots [B, 1]; None before its first forward."""
        kept = self.cache.hidden[RETURNED].keys
        return None if kept is None else kept[slots, 0, positions.clamp(0, kept.shape[2] - 1)]


class MtpBackend(FeatureReader):
    """Drafts with all layers. In layer k, counted from 0, rows before k + 1 have no hidden state and are not read.

    The depth of a row is 0 where the target's feature is known, and grows by one with each drafted token after it. At
    depth d, layer d predicts, or the last layer; earlier layers are not needed.
    """

    attended_unit = 1

    def __init__(self, layers: Sequence[MtpLayer], target: Loaded, norm: nn.Module) -> None:
        """norm: the target's final norm."""
        backend: Any = target.backend
        super().__init__([backend.num_layers])
        self.layers, self._norm = layers, norm
        self._embed, self._lm_head = backend.model.get_input_embeddings(), backend.model.get_output_embeddings()
        self.vocab_size, self.max_length, self.device = backend.vocab_size, backend.max_length, backend.device

    def reserve(self, rows: int, length: int) -> None:
        for layer in self.layers:
            layer.cache.reserve(rows, length)
        self.grow(rows)

    def copy(self, source: int, destination: int, length: int) -> None:
        super().copy(source, destination, length)
        for layer in self.layers:
            layer.cache.copy(source, destination, length)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        width, slots = tokens.shape[1], range(first_slot, first_slot + len(starts))
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        read = torch.tensor([self.num_read(slot) for slot in slots], device=self.device)
        depth = (positions - read[:, None]).clamp(min=0)
        embedded, last = self._embed(tokens), len(self.layers) - 1
        first = min(last, *(max(0, start - self.num_read(slot)) for slot, start in zip(slots, starts, strict=True)))
        returned = list[Tensor]()
        for number in range(first, last + 1):
            layer = self.layers[number]
            keys = torch.arange(layer.cache.place(first_slot, starts, positions), device=self.device)
            entering = self._entering(number, slots, positions, depth, embedded)
            clamped = positions.clamp(max=self.max_length - 1)  # padding may reach beyond the context's end
            returned.append(layer.forward(embedded, entering, clamped, keys, number + 1))
        for slot, start in zip(slots, starts, strict=True):
            self.note_right(slot, start, width)
        if not logits:
            return embedded.new_empty(0)
        chosen = (depth.clamp(first, last) - first)[None, ..., None].expand(1, *embedded.shape)
        out: Tensor = self._lm_head(torch.stack(returned).gather(0, chosen)[0])
        return out

    def _entering(self, number: int, slots: range, positions: Tensor, depth: Tensor, like: Tensor) -> Tensor:
        """The hidden states [B, W, H] that enter a layer at these positions."""
        where = torch.tensor(slots, device=self.device)[:, None]
        returned = self.layers[number].returned(where, positions - 1)
        if number == 0:
            entering = self._features(slots, positions, like)
        else:
            before = self.layers[number - 1].returned(where, positions - 1)
            entering = torch.zeros_like(like) if before is None else before
        return entering if returned is None else torch.where((depth > number)[..., None], returned, entering)

    def _features(self, slots: range, positions: Tensor, like: Tensor) -> Tensor:
        """The target's last hidden states [B, W, H] at the positions before these; zeros where it has not read."""
        entering = torch.zeros_like(like)
        for i, slot in enumerate(slots):
            start = int(positions[i, 0])
            num_known = self.num_known(slot, start, positions.shape[1])
            features = self.features(slot, start, num_known)
            if features is not None:
                entering[i, num_known - len(features) : num_known] = self._norm(features.to(like.dtype))
        return entering


def brings_mtp(target: Loaded, options: LoadOptions) -> bool:
    """True if a target that was loaded by name has supported MTP layers. options: the target's."""
    if not isinstance(target.backend, HiddenStates) or not target.source or is_gguf(target.source):
        return False
    try:
        files = _checkpoint(target.source, resolve(target.source, options.files), options)
    except SlipstreamError:
        return False  # only safetensors files are searched
    return files is not None and bool(mtp_layers(files.shapes, target.backend.num_layers))


def load_mtp(target: Loaded, options: LoadOptions, head: HeadFiles | None = None) -> Loaded:
    """The MTP layers of a target as its draft model. options: the target's.

    head: the files of fine-tuned layers that `speculators` wrote; None for the target's own.
    """
    model, backend = model_for(f"draft={MTP!r}", target), target.backend
    assert isinstance(backend, HiddenStates)
    if head is not None:
        files = _checkpoint(head.source, head.folder, options)
    else:
        source = target.source or getattr(getattr(target.model, "config", None), "_name_or_path", "")
        is_checkpoint = source and not is_gguf(source)
        files = _checkpoint(source, resolve(source, options.files), options) if is_checkpoint else None
    layer_tensors = [] if files is None else mtp_layers(files.shapes, backend.num_layers)
    if files is None or not layer_tensors:
        named = target.name if head is None else head.source
        if files is not None and (tensor := of_another_form(files.shapes, backend.num_layers)) is not None:
            raise UsageError(
                f"draft={MTP!r}: {named!r} has unsupported MTP layers, tensor {tensor!r}; allowed: "
                "layers as DeepSeek-V3, GLM-4, Qwen3-Next or MiMo have them, or another draft model"
            )
        raise UsageError(
            f"draft={MTP!r}, but the files of {named!r} have no MTP layers; allowed: a draft model or none"
        )
    if quantized := [name for layer in layer_tensors for name in layer.quantized]:
        raise UsageError(
            f"draft={MTP!r}: the MTP layers of {files.source!r} are quantized, tensor {quantized[0]!r}; allowed: "
            "MTP layers in floating point, or another draft model"
        )
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None:
        raise UsageError(
            f"draft={MTP!r}: {type(decoder).__name__} has no final norm called 'norm'; allowed: another draft model"
        )
    kind = _of_transformers(model) if isinstance(model, PlannedModel) else (type(decoder), decoder.config)
    reader = _Reader(files, *kind, model.dtype, backend.device, options, token_first=head is not None)
    layers = [reader.layer(number, names) for number, names in enumerate(layer_tensors)]
    count = sum(p.numel() for layer in layers for p in layer.decoder.parameters())
    fingerprint = f"mtp {len(layers)} {count} {model.dtype} {options.precision} of {target.fingerprint}"
    name, folder = (MTP, "") if head is None else (head.source, head.folder)
    fingerprint += f" from {folder}" if folder else ""
    mtp_backend = MtpBackend(layers, target, norm)
    return Loaded(mtp_backend, name, target.end_ids, target.tokenizer, fingerprint=fingerprint, source=folder)


def _of_transformers(model: PlannedModel) -> tuple[type, Any]:
    """transformers' class of a planned model's decoder, and its configuration."""
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.for_model(**model.config.to_dict())
    return MODEL_MAPPING[type(config)], config


def _checkpoint(source: str, folder: str, options: LoadOptions) -> CheckpointFiles | None:
    """The tensors in a folder; None if it has no config.json."""
    config = file_of(folder, "config.json", options.files)
    return None if config is None else CheckpointFiles(source, str(config.parent))


@dataclass(frozen=True)
class _Reader:
    """Reads layers for a target's decoder, in its type and on its device. options: the precision of the layers.

    kind: transformers' class of the decoder; config: its configuration.
    token_first: projections take the token, then the hidden state, whatever the name of their tensor.
    """

    files: CheckpointFiles
    kind: Any
    config: Any
    dtype: torch.dtype
    device: torch.device
    options: LoadOptions
    token_first: bool = False

    def layer(self, number: int, names: LayerTensors) -> MtpLayer:
        size = self.config.hidden_size
        project = nn.Linear(2 * size, size, bias=False, device="meta")
        project.weight = nn.Parameter(self._tensor(names.parts["project"], size, 2 * size), requires_grad=False)
        tensors = {f"layers.0.{name}": self._tensor(stored) for name, stored in names.block.items()}
        tensors["norm.weight"] = self._tensor(names.parts["norm"], size)
        decoder = self._decoder(number, tensors)
        token_norm, hidden_norm = (
            _with_weight(decoder.norm, self._tensor(names.parts[part], size)) for part in ("token_norm", "hidden_norm")
        )
        hidden_first = names.parts["project"].endswith(HIDDEN_FIRST) and not self.token_first
        reason, options = unsupported(decoder), self.options
        refuse_draft_dtype(MTP, options, self.device, self.dtype, reason)
        if reason is None and (options.fast is not False or options.quantize in BITS):
            products = (weight for weight in decoder.parameters() if weight.dim() > 1)
            convert = converter(sum(weight.numel() for weight in products), decoder.dtype, options)
            convert_experts(decoder, convert)
            pack(decoder, convert, called_by_none(decoder, linear_calls(decoder)))
            return MtpLayer(decoder, token_norm, hidden_norm, convert(project), hidden_first=hidden_first)
        return MtpLayer(decoder, token_norm, hidden_norm, project, hidden_first=hidden_first)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.files.tensor(name, shape or None, FLOATS)
        return tensor.to(self.device, self.dtype if shape else tensor.dtype)

    def _decoder(self, number: int, tensors: dict[str, Tensor]) -> Any:
        """A decoder of the target's class, with these tensors as its only layer and without an embedding."""
        kind, config = self.kind, _one_layer(self.config, number, any(SPARSE in n for n in tensors))
        attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
        try:
            with quietly():
                decoder, report = kind.from_pretrained(
                    None,
                    config=config,
                    state_dict=tensors,
                    dtype=self.dtype,
                    attn_implementation=attention,
                    output_loading_info=True,
                )
        except reader_errors() as error:
            raise SlipstreamError(
                f"draft={MTP!r}: layer {number} of {self.files.source!r} could not be read: {one_line(error)}"
            ) from error
        misfits = {*report["missing_keys"], *report["unexpected_keys"], *(key[0] for key in report["mismatched_keys"])}
        if wrong := sorted(name for name in misfits if name != "embed_tokens.weight"):
            raise SlipstreamError(
                f"draft={MTP!r}: layer {number} of {self.files.source!r} is not a decoder layer of {kind.__name__}: "
                f"{len(wrong)} tensors do not fit, first {wrong[0]!r}; allowed: another draft model"
            )
        return decoder.to(self.device).eval()


def _with_weight(norm: nn.Module, weight: Tensor) -> nn.Module:
    """A norm like this one with another weight."""
    other = copy(norm)
    other._parameters = {**norm._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    return other


def _one_layer(config: Any, number: int, is_sparse: bool) -> Any:
    """A decoder's configuration for only its MTP layer of this number, without a vocabulary.

    is_sparse: whether the layer is a mixture of experts.
    """
    layer_config = deepcopy(config)
    kinds = getattr(config, "mtp_layer_types", None)
    sparse: dict[str, Any] = {
        "mlp_layer_types": ["sparse" if is_sparse else "dense"],
        "first_k_dense_replace": 0 if is_sparse else 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if is_sparse else [0],
    }
    changes = {
        "layer_types": [kinds[number] if kinds else "full_attention"],
        "per_layer_config": getattr(config, "mtp_per_layer_config", None),
        "pad_token_id": None,
        "num_nextn_predict_layers": 0,  # some decoders would otherwise build MTP layers, too
        **sparse,
    }
    for name, value in changes.items():
        if getattr(layer_config, name, None) is not None:
            setattr(layer_config, name, value)
    layer_config.num_hidden_layers, layer_config.vocab_size = 1, 1
    vars(layer_config).pop("quantization_config", None)  # of the target's own layers; MTP layers are not quantized
    return layer_config
