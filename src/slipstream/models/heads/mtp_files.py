"""Reads the multi-token-prediction layers in a target's own checkpoint.

Transformers reads the decoder layer in each as that of a model of one layer, so that its own conversions apply.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.backend_capabilities import HiddenStates
from slipstream.models.cpu.packed_linear import compressed_or_packed, pack, pack_experts, unsupported
from slipstream.models.cpu.quantised_linear import SMALLEST, is_faster, rounded
from slipstream.models.decoder.fused_linear import called_by_none, linear_calls
from slipstream.models.heads.head_files import HeadFiles
from slipstream.models.heads.mtp import MtpBackend, MtpLayer, TargetParts
from slipstream.models.loaded import MTP, Loaded, LoadOptions
from slipstream.models.weights.model_files import is_gguf
from slipstream.models.weights.mtp_tensors import LayerTensors, mtp_layers, of_another_form
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles, file_of
from slipstream.models.weights.transformers_reader import READER_ERRORS, quietly

HIDDEN_FIRST = "input_proj.weight"  # has the hidden state before the token
SPARSE = ".experts."  # in the names of tensors of a mixture of experts


def brings_mtp(target: Loaded, options: LoadOptions) -> bool:
    """Whether a target that was loaded by name has MTP layers which can be run. options: the target's."""
    if not isinstance(target.backend, HiddenStates) or not target.source or is_gguf(target.source):
        return False
    try:
        files = _files(target, options)
    except SlipstreamError:
        return False  # of other files than safetensors, in which MTP layers are not looked for
    return files is not None and bool(mtp_layers(files.shapes, target.backend.num_layers))


def load_mtp(target: Loaded, options: LoadOptions, head: HeadFiles | None = None) -> Loaded:
    """The MTP layers of a target as its draft model. options: the target's.

    head: where `speculators` wrote them after more training, if they are not the target's own.
    """
    backend, model = target.backend, getattr(target.backend, "model", None)
    if model is None or not isinstance(backend, HiddenStates):
        raise UsageError(
            f"draft={MTP!r} with target {target.name!r}, whose hidden states cannot be read; "
            "allowed: with models that run on Slipstream's own KV cache"
        )
    files = _files(target, options) if head is None else _files_in(head.source, head.folder, options)
    found = [] if files is None else mtp_layers(files.shapes, backend.num_layers)
    if files is None or not found:
        named = target.name if head is None else head.source
        if files is not None and (tensor := of_another_form(files.shapes, backend.num_layers)) is not None:
            raise UsageError(
                f"draft={MTP!r}: {named!r} has MTP layers of a form that is not read, tensor {tensor!r}; allowed: "
                "layers as DeepSeek-V3, GLM-4, Qwen3-Next or MiMo have them, or another draft model"
            )
        raise UsageError(
            f"draft={MTP!r}, but the files of {named!r} have no MTP layers; allowed: a draft model or none"
        )
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None:
        raise UsageError(
            f"draft={MTP!r}: {type(decoder).__name__} has no final norm called 'norm'; allowed: another draft model"
        )
    shared = TargetParts(
        model.get_input_embeddings(),
        norm,
        model.get_output_embeddings(),
        backend.num_layers,
        target.backend.vocab_size,
        target.backend.max_length,
        target.backend.device,
    )
    reader = _Reader(
        files, decoder, model.dtype, shared.device, may_pack=options.fast is not False, token_first=head is not None
    )
    layers = [reader.layer(number, names) for number, names in enumerate(found)]
    count = sum(p.numel() for layer in layers for p in layer.decoder.parameters())
    fingerprint = f"mtp {len(layers)} {count} {model.dtype} of {target.fingerprint}"
    if head is None:
        return Loaded(MtpBackend(layers, shared), MTP, target.end_ids, target.tokenizer, fingerprint=fingerprint)
    return Loaded(
        MtpBackend(layers, shared),
        head.source,
        target.end_ids,
        target.tokenizer,
        fingerprint=f"{fingerprint} from {head.folder}",
        source=head.folder,
    )


def _files(target: Loaded, options: LoadOptions) -> CheckpointFiles | None:
    """The checkpoint that a target was loaded from; None if there is none."""
    source = target.source or getattr(getattr(target.model, "config", None), "_name_or_path", "")
    if not source or is_gguf(source):
        return None
    return _files_in(source, resolve(source, options.files), options)


def _files_in(source: str, folder: str, options: LoadOptions) -> CheckpointFiles | None:
    config = file_of(folder, "config.json", options.files)
    return None if config is None else CheckpointFiles(source, str(config.parent))


@dataclass(frozen=True)
class _Reader:
    """Reads layers for a target's decoder, in its type and on its device. may_pack: their weights.

    token_first: layers get the token before the hidden state, however their product is called.
    """

    files: CheckpointFiles
    decoder: Any
    dtype: torch.dtype
    device: torch.device
    may_pack: bool
    token_first: bool = False

    def layer(self, number: int, names: LayerTensors) -> MtpLayer:
        size = self.decoder.config.hidden_size
        project = nn.Linear(2 * size, size, bias=False, device="meta")
        project.weight = nn.Parameter(self._tensor(names.parts["project"], size, 2 * size), requires_grad=False)
        tensors = {f"layers.0.{name}": self._tensor(stored) for name, stored in names.block.items()}
        tensors["norm.weight"] = self._tensor(names.parts["norm"], size)
        decoder = self._decoder(number, tensors)
        token_norm, hidden_norm = (
            _with_weight(decoder.norm, self._tensor(names.parts[part], size)) for part in ("token_norm", "hidden_norm")
        )
        hidden_first = names.parts["project"].endswith(HIDDEN_FIRST) and not self.token_first
        if self.may_pack and unsupported(decoder) is None:
            convert = partial(rounded, bits="int4") if _is_large(decoder) else compressed_or_packed
            pack_experts(decoder, convert)
            pack(decoder, convert, called_by_none(decoder, linear_calls(decoder)))
            return MtpLayer(decoder, token_norm, hidden_norm, convert(project), hidden_first=hidden_first)
        return MtpLayer(decoder, token_norm, hidden_norm, project, hidden_first=hidden_first)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.files.tensor(name, shape or None, FLOATS)
        return tensor.to(self.device, self.dtype if shape else tensor.dtype)

    def _decoder(self, number: int, tensors: dict[str, Tensor]) -> Any:
        """The target's decoder with one layer, that of these tensors, and without an embedding."""
        kind, config = type(self.decoder), _one_layer(self.decoder.config, number, any(SPARSE in n for n in tensors))
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
        except READER_ERRORS as error:
            raise SlipstreamError(
                f"draft={MTP!r}: layer {number} of {self.files.source!r} could not be read: {one_line(error)}"
            ) from error
        unlike = {*report["missing_keys"], *report["unexpected_keys"], *(key[0] for key in report["mismatched_keys"])}
        if wrong := sorted(name for name in unlike if name != "embed_tokens.weight"):
            raise SlipstreamError(
                f"draft={MTP!r}: layer {number} of {self.files.source!r} is no decoder layer of {kind.__name__}: "
                f"{len(wrong)} tensors do not fit, first {wrong[0]!r}; allowed: another draft model"
            )
        return decoder.to(self.device).eval()


def _is_large(decoder: Any) -> bool:
    """Whether 4 bits make it faster: between two drafts the target's weights displace a layer's from the caches."""
    count = sum(weight.numel() for weight in decoder.parameters() if weight.dim() > 1)
    return count >= SMALLEST and is_faster(decoder.dtype)


def _with_weight(norm: nn.Module, weight: Tensor) -> nn.Module:
    """A norm like this one with another weight."""
    other = copy(norm)
    other._parameters = {**norm._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    return other


def _one_layer(config: Any, number: int, is_sparse: bool) -> Any:
    """A decoder's configuration for its MTP layer of this number alone, without a vocabulary.

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
        "num_nextn_predict_layers": 0,  # decoders of a repository's own code hold theirs, too
        **sparse,
    }
    for name, value in changes.items():
        if getattr(layer_config, name, None) is not None:
            setattr(layer_config, name, value)
    layer_config.num_hidden_layers, layer_config.vocab_size = 1, 1
    vars(layer_config).pop("quantization_config", None)  # of the target's own layers: these are read unquantised
    return layer_config
