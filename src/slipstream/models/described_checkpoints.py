"""Loads checkpoints without transformers, which takes seconds to import.

When transformers loads a checkpoint whose layers the kernels compute in one call, its settings and tokenizer, as
transformers made them, are saved as a description. As long as no file changes, later starts read the description, and
the weights from the safetensors files, and give the same bits. All else goes through transformers.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from slipstream.checks import expanded
from slipstream.errors import MODEL_ERRORS, SlipstreamError
from slipstream.models.cache_folder import cache_folder, read_measured, save_measured
from slipstream.models.cpu.block_linear import ScaledEmbedding
from slipstream.models.cpu.float16_linear import are_tied
from slipstream.models.cpu.quantized_linear import arithmetic_of
from slipstream.models.cpu.thread_placement import separate_threads
from slipstream.models.decoder.around_layers import layer_rotations
from slipstream.models.decoder.attention import MaskBuilder
from slipstream.models.decoder.families import plan_of
from slipstream.models.decoder.fused_layer import decoder_module
from slipstream.models.decoder.plan import DecoderPlan, UnknownLayerError
from slipstream.models.decoder.planned_model import PLANNED, PlannedModel, planned_model
from slipstream.models.draft_vocabulary import Restriction
from slipstream.models.generation_settings import end_ids
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import code_digest, identity_of_files
from slipstream.models.layer_replacement import PLAIN, fingerprint, packing, quantizing, replace_layers
from slipstream.models.loaded import READS_TEXT, Loaded, LoadOptions
from slipstream.models.planned_models import backend_of
from slipstream.models.weights.adapters import ADAPTER
from slipstream.models.weights.gguf_configuration import prepared
from slipstream.models.weights.model_files import CONVERSION, is_converted, is_gguf
from slipstream.models.weights.resolve import place_of
from slipstream.models.weights.safetensors_files import CheckpointFiles, dtype_name
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.models.weights.transformers_reader import check_finite
from slipstream.tokenization.hf_tokenizer import HFTokenizer, as_file_tokenizer

OUTPUT = "lm_head.weight"
KINDS = frozenset(("BF16", "F16", "F32"))
TEMPLATES = "additional_chat_templates"  # transformers' folder of them
POSITIONS = (0, 1, 5, 100, 4095, 8192, 32767, 131071)  # at which rotations are compared


@dataclass(frozen=True)
class Description:
    """What transformers made of a checkpoint's files."""

    settings: dict[str, Any]  # all fields of its configuration
    generation: dict[str, Any]  # likewise of its generation_config
    dtype: str  # of its weights
    is_tied: bool  # embedding and output layer share their weight
    has_tokenizer: bool = False


def load_described(source: str, options: LoadOptions, tokenizer: Any) -> Loaded | None:
    """A checkpoint as an earlier start has described it; None where transformers must load it.

    tokenizer: the caller's, if any.
    """
    identity = checkpoint_identity(source, options)
    described = None if identity is None else read_measured("checkpoints", identity, lambda saved: Description(**saved))
    model = None if described is None else planned_model(described.settings)
    if described is None or model is None:
        return None
    folder = place_of(source)
    wrapped, place = None if tokenizer is None else HFTokenizer(tokenizer), _tokenizer_folder(folder)
    if wrapped is None and described.has_tokenizer:
        if not is_converted(place):
            return None
        try:
            wrapped = load_tokenizer(source, str(place))
        except SlipstreamError:
            if place == Path(folder):
                raise
            with suppress(OSError):  # damaged in the cache; the next description saves it again
                (place / CONVERSION).unlink(missing_ok=True)
        if wrapped is None:
            return None
    files = CheckpointFiles(source, folder)
    if not _fits(files, model, described.is_tied):
        return None
    _fill(model, files, getattr(torch, described.dtype), described.is_tied)
    check_finite(source, model)
    model.generation_config = SimpleNamespace(**described.generation)
    separate_threads()
    convert = quantizing(model, options, PLAIN) if options.quantize else packing(model, options.fast)
    if convert is None:
        return None
    restriction = Restriction(model, options.vocabulary, convert)
    replace_layers(model, convert, model.linear_calls())
    model.compute_on(model.device, next(model.parameters()).dtype)
    layer_kind = f"{options.quantize} {getattr(convert, '__name__', None)}"
    backend = backend_of(source, folder, model, options, layer_kind)
    if backend.stack is None:
        return None
    name = fingerprint(backend, PLANNED[model.config.model_type], "packed")
    head = restriction.apply(by_position=True)
    ends, arithmetic = end_ids(model, backend.vocab_size), arithmetic_of(model)
    return Loaded(backend, source, ends, wrapped, model, True, name, head, arithmetic, source)


def description_of(source: str, folder: str, model: Any) -> Description | None:
    """The description of a model that transformers has just loaded; None if the model is more than its plan says."""
    if PLANNED.get(model.config.model_type) != type(model).__name__:
        return None
    try:
        return _described(CheckpointFiles(source, folder), model)
    except (*MODEL_ERRORS, SlipstreamError, UnknownLayerError):  # no safetensors files, or settings without a plan
        return None


def _described(files: CheckpointFiles, model: Any) -> Description | None:
    settings = json.loads(json.dumps(model.config.to_dict()))
    generation = {name: value for name, value in vars(model.generation_config).items() if name[:1] != "_"}
    generation = json.loads(json.dumps(generation))
    planned, plan = planned_model(settings), plan_of(model.config, MaskBuilder(model).windows)
    is_tied = are_tied(model)
    is_same = (
        planned is not None
        and "quantization_config" not in settings
        and planned.plan == plan.with_layers(angles_in_pairs=False, angles_of_pairs=False)
        and {tensor.dtype for tensor in model.state_dict().values()} == {model.dtype}
        and _shapes(planned) == _shapes(model)
        and _digested(planned, model.dtype) == _digested(model, model.dtype)
        and _rotate_alike(model, plan, planned)
        and _fits(files, planned, is_tied)
    )
    return Description(settings, generation, dtype_name(model.dtype), is_tied) if is_same else None


def describe(description: Description, identity: str, folder: str, options: LoadOptions, loaded: Loaded) -> None:
    """Save a description for later starts, if the kernels compute the model in one call.

    identity: the checkpoint's before it was loaded; if it has changed since, the description may be of older files.
    """
    backend = loaded.backend
    in_one_call = isinstance(backend, HFBackend) and backend.stack is not None and loaded.vision == READS_TEXT
    if not in_one_call or checkpoint_identity(loaded.source, options) != identity:
        return
    with suppress(OSError, SlipstreamError):  # if it cannot be saved, the next start imports transformers again
        if isinstance(loaded.tokenizer, HFTokenizer):
            tokenizer, place = as_file_tokenizer(loaded.tokenizer), _tokenizer_folder(folder)
            if tokenizer is None:
                return
            if not is_converted(place):
                with prepared(loaded.source, place) as partial:
                    tokenizer.save(partial)
        saved = vars(description) | {"has_tokenizer": loaded.tokenizer is not None}
        save_measured("checkpoints", identity, saved)


def _are_usual(options: LoadOptions) -> bool:
    on_processor = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    return on_processor and not options.extra and options.rounding == "none" and options.activations == "auto"


def checkpoint_identity(source: str, options: LoadOptions) -> str | None:
    """All that a description depends on.

    None for GGUF files, adapters, hub ids, options of transformers, and files outside the folder itself, such as
    several chat templates.
    """
    if is_gguf(source) or not _are_usual(options):
        return None
    folder = place_of(source)
    more = (expanded(source) / ADAPTER, Path(folder) / ADAPTER, Path(folder) / TEMPLATES)
    files = None if any(map(Path.exists, more)) else identity_of_files(folder)
    versions = f"torch {torch.__version__} transformers {version('transformers')} slipstream {code_digest()}"
    return files and f"{versions} {options.dtype} {options.quantize} {options.fast} {files}"


def _tokenizer_folder(folder: str) -> Path:
    """The folder of a checkpoint's saved tokenizer, which may be missing."""
    if is_converted(Path(folder)):
        return Path(folder)
    versions = f"transformers {version('transformers')} tokenizers {version('tokenizers')}"
    identity = f"{versions} {identity_of_files(folder)}"
    return cache_folder() / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest()[:20]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _digested(model: nn.Module, dtype: torch.dtype) -> list[list[str]]:
    """The weights in the order in which the model's digest has them: those of norms and, in panels, matrices."""
    dims = (1, 2) if dtype == torch.float16 else (1,)
    weights = [item for item in model.named_parameters() if item[0].endswith("weight") and item[0] != OUTPUT]
    return [[name for name, weight in weights if weight.dim() == dim] for dim in dims]


def _rotate_alike(model: Any, plan: DecoderPlan, planned: PlannedModel) -> bool:
    """True if both models rotate by the same bits in each layer."""
    planned.compute_on(torch.device("cpu"), model.dtype)
    for last in (3, len(POSITIONS)):  # some rotations depend on the largest position
        positions, hidden = torch.tensor([POSITIONS[:last]]), torch.zeros(1, 1, 1, dtype=model.dtype)
        ropes = []
        for each, of_each in ((model, plan), (planned, planned.plan)):
            rotations, of_layers = layer_rotations(each, decoder_module(each, of_each), of_each)
            by_kind = [torch.stack(rope) for rope in rotations.computed(hidden, positions)]
            ropes.append([by_kind[kind] for kind in of_layers if by_kind])
        if not all(torch.equal(*pair) for pair in zip(*ropes, strict=True)):
            return False
    return True


def _fits(files: CheckpointFiles, model: PlannedModel, is_tied: bool) -> bool:
    """True if the files hold the model's tensors, each once, and nothing else."""
    shapes = _shapes(model)
    if is_tied:
        del shapes[OUTPUT]
    return files.shapes == shapes and KINDS.issuperset(files.kinds.values()) and not files.has_copies


def _fill(model: PlannedModel, files: CheckpointFiles, dtype: torch.dtype, is_tied: bool) -> None:
    """Give an empty model its weights, in this type."""
    for path, module in list(model.named_modules()):
        tensors = {
            **dict(module.named_parameters(path, recurse=False)),
            **dict(module.named_buffers(path, recurse=False)),
        }
        for name, empty in tensors.items():
            if is_tied and name == OUTPUT:
                module.weight = model.get_input_embeddings().weight
                continue
            tensor = files.whole(name).to(dtype)
            is_buffer = not isinstance(empty, nn.Parameter)
            setattr(module, name.rpartition(".")[2], tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        if isinstance(module, ScaledEmbedding):  # transformers rounds the factor to the model's type
            module.scale = float(torch.tensor(module.scale, dtype=dtype))
    model.compute_on(torch.device("cpu"), dtype)
