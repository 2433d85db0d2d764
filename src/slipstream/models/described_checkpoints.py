"""Starts of checkpoints without transformers, which takes seconds to import.

A start through transformers describes a checkpoint if the kernels compute the model by its plan, all layers in one
call: what transformers made of its settings, and its tokenizer. As long as its files stay the same, later starts read
the description, and the weights from the safetensors files; anything else goes through transformers again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError
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
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.planned_models import backend_of
from slipstream.models.weights.gguf_configuration import prepared
from slipstream.models.weights.model_files import is_converted, is_gguf
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import CheckpointFiles, dtype_name
from slipstream.models.weights.tokenizer_loading import FILES
from slipstream.models.weights.transformers_reader import check_finite
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer, as_file_tokenizer

log = logging.getLogger("slipstream")

HEAD = "lm_head.weight"
KINDS = ("BF16", "F16", "F32")
POSITIONS = (0, 1, 5, 100, 4095, 8192, 32767, 131071)  # at which rotations are compared


def load_described(source: str, options: LoadOptions, tokenizer: Any) -> Loaded | None:
    """A checkpoint that a start through transformers has described; None if there is no description that fits.

    tokenizer: as for `load`.
    """
    if is_gguf(source) or not _are_usual(options) or not _on_processor(options):
        return None
    folder = resolve(source)
    identity = _identity(source, folder, options)
    description = None if identity is None else read_measured("checkpoints", identity, dict)
    if description is None:
        return None
    model, wrapped = planned_model(description["settings"]), None
    if tokenizer is not None:
        wrapped = HFTokenizer(tokenizer)
    elif description["has_tokenizer"]:
        place = _tokenizer_folder(folder)
        if not is_converted(place):
            return None
        wrapped = HFTokenizer(FileTokenizer.read(place))
    files = CheckpointFiles(source, folder)
    if model is None or not _fits(files, model, description["is_tied"]):
        return None
    _fill(model, files, getattr(torch, description["dtype"]), description["is_tied"])
    check_finite(source, model)
    model.generation_config = SimpleNamespace(**description["generation"])
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
    model_fingerprint = fingerprint(backend, PLANNED[model.config.model_type], "packed")
    head = restriction.apply(by_position=True)
    ends, arithmetic = end_ids(model, backend.vocab_size), arithmetic_of(model)
    loaded = Loaded(backend, source, ends, wrapped, model, True, model_fingerprint, head, arithmetic, source)
    log.info("%s is computed by its plan, without transformers", source)
    return loaded


def description_of(source: str, folder: str, model: Any, options: LoadOptions) -> dict[str, Any] | None:
    """The description of a model that transformers has just loaded; None if its plan says less than the model."""
    config = model.config
    is_plain = PLANNED.get(config.model_type) == type(model).__name__ and model.device.type == "cpu"
    is_quantized = getattr(config, "quantization_config", None) is not None
    if not is_plain or is_quantized or not _are_usual(options) or _identity(source, folder, options) is None:
        return None
    try:
        settings = json.loads(json.dumps(config.to_dict()))
        generation = {name: value for name, value in vars(model.generation_config).items() if name[:1] != "_"}
        generation = json.loads(json.dumps(generation))
        planned = planned_model(settings)
        plan = plan_of(config, MaskBuilder(model).windows)
    except (TypeError, ValueError, AttributeError, LookupError, UnknownLayerError):  # settings that no GGUF file has
        return None
    is_tied, tensors = are_tied(model), model.state_dict()
    is_same = (
        planned is not None
        and planned.plan == plan.with_layers(angles_in_pairs=False, angles_of_pairs=False)
        and _shapes(planned) == _shapes(model)
        and _norms(planned) == _norms(model)
        and {tensor.dtype for tensor in tensors.values()} == {model.dtype}
        and _rotate_alike(model, plan, planned)
        and _fits(CheckpointFiles(source, folder), planned, is_tied)
    )
    if not is_same:
        return None
    return {
        "settings": settings,
        "generation": generation,
        "dtype": dtype_name(model.dtype),
        "is_tied": is_tied,
        "has_tokenizer": any((Path(folder) / name).exists() for name in FILES),
    }


def describe(description: dict[str, Any], source: str, folder: str, options: LoadOptions, loaded: Loaded) -> None:
    """Save a description for later starts, if the kernels compute the model in one call."""
    identity, backend = _identity(source, folder, options), loaded.backend
    if identity is None or not isinstance(backend, HFBackend) or backend.stack is None:
        return
    with suppress(OSError, SlipstreamError):  # if it cannot be saved, the next start imports transformers again
        if description["has_tokenizer"]:
            place, wrapped = _tokenizer_folder(folder), loaded.tokenizer
            tokenizer = as_file_tokenizer(wrapped) if isinstance(wrapped, HFTokenizer) else None
            if tokenizer is None:
                return
            if not is_converted(place):
                with prepared(source, place) as partial:
                    tokenizer.save(partial)
        save_measured("checkpoints", identity, description)


def _are_usual(options: LoadOptions) -> bool:
    return not options.extra and options.rounding == "none" and options.activations == "auto"


def _on_processor(options: LoadOptions) -> bool:
    return options.device.startswith("cpu") or (options.device == "auto" and not torch.cuda.is_available())


def _identity(source: str, folder: str, options: LoadOptions) -> str | None:
    """Everything that a description depends on; None if the files are not in a folder, or belong to an adapter."""
    if any((place / "adapter_config.json").is_file() for place in (expanded(source), Path(folder))):
        return None
    files = identity_of_files(folder)
    versions = f"transformers {version('transformers')} slipstream {code_digest()}"
    how = f"{options.dtype} {options.quantize} {options.fast} {options.vocabulary}"
    return None if files is None else f"{versions} {how} {files}"


def _tokenizer_folder(folder: str) -> Path:
    if is_converted(Path(folder)):
        return Path(folder)
    versions = f"transformers {version('transformers')} tokenizers {version('tokenizers')}"
    identity = f"{versions} {identity_of_files(folder)}"
    return cache_folder() / "tokenizers" / hashlib.sha256(identity.encode()).hexdigest()[:20]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _norms(model: nn.Module) -> list[str]:
    """The vectors among the weights, in the order on which the digest depends."""
    return [name for name, weight in model.named_parameters() if weight.dim() == 1 and name.endswith("weight")]


def _rotate_alike(model: Any, plan: DecoderPlan, planned: PlannedModel) -> bool:
    """True if both models rotate by the same bits."""
    hidden, ropes = torch.zeros(1, 1, 1, dtype=model.dtype), []
    planned.compute_on(torch.device("cpu"), model.dtype)
    for last in (3, len(POSITIONS)):  # some rotations depend on the largest position
        positions = torch.tensor([POSITIONS[:last]])
        for one, of_model in ((model, plan), (planned, planned.plan)):
            rotations, _ = layer_rotations(one, decoder_module(one, of_model), of_model)
            ropes.append([part for rope in rotations.computed(hidden, positions) for part in rope])
    pairs = [*zip(ropes[0], ropes[1], strict=True), *zip(ropes[2], ropes[3], strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


def _fits(files: CheckpointFiles, model: PlannedModel, is_tied: bool) -> bool:
    """True if the files hold this model's tensors, each once, and nothing else."""
    shapes = {name: shape for name, shape in _shapes(model).items() if not (is_tied and name == HEAD)}
    return files.shapes == shapes and set(files.kinds.values()) <= set(KINDS) and not files.has_copies


def _fill(model: PlannedModel, files: CheckpointFiles, dtype: torch.dtype, is_tied: bool) -> None:
    for name in _shapes(model):
        path, _, key = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if is_tied and name == HEAD:
            module.weight = model.get_input_embeddings().weight
            continue
        tensor = files.whole(name).to(dtype)
        if key in module._buffers:
            module._buffers[key] = tensor
        else:
            setattr(module, key, nn.Parameter(tensor, requires_grad=False))
    for module in model.modules():
        if isinstance(module, ScaledEmbedding):  # transformers keeps the factor in the model's type
            module.scale = float(torch.tensor(module.scale, dtype=dtype))
    model.compute_on(torch.device("cpu"), dtype)
