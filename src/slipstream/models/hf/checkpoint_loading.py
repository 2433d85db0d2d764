"""Hugging Face folders whose weights are quantised, or are to be quantised while they are loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.structs import INPUTS
from slipstream.models.hf.block_model import check_kernels, empty_model, fill
from slipstream.models.hf.checkpoint_files import CheckpointFiles, file_of, located
from slipstream.models.hf.model_files import not_loaded, resolve
from slipstream.models.hf.packed_matrices import PackedMatrices
from slipstream.models.hf.quantisation_schemes import Scheme, scheme_of
from slipstream.models.hf.quantised_checkpoint import CheckpointTensors, unpacked_weights
from slipstream.models.hf.rounded_weights import RoundedTensors
from slipstream.models.hf.weights import (
    DTYPES,
    READER_ERRORS,
    check_weights,
    device_named,
    extra_bias,
    from_config,
    quietly,
)
from slipstream.models.loaded import LoadOptions

PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")  # of models for images and sounds, too
CONFIG, GENERATION = "config.json", "generation_config.json"


def checkpoint_of(source: str, options: LoadOptions) -> QuantisedCheckpoint | RoundedCheckpoint | None:
    """The checkpoint of a folder or hub id; None where transformers is to load it.

    Raises `UsageError` where it is to be quantised and is already.
    """
    if options.rounding == "none" and _for_transformers(options):
        return None
    folder = resolve(source, options.extra)
    config = _configuration(folder, options)
    scheme = scheme_of(source, config)
    parts = [part for part in PARTS if isinstance(config.get(part), dict)]
    if options.rounding == "none":
        if parts:  # transformers renames the weights of such models as it reads them
            return None
        return None if scheme is None else QuantisedCheckpoint(source, folder, options.files, scheme)
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UsageError(
            f"quantize={options.rounding!r}, but model {source!r} is quantised already, by {method}; allowed: 'none'"
        )
    if parts:
        raise UsageError(
            f"quantize={options.rounding!r}, but model {source!r} has more parts than a language model ({parts[0]}); "
            "allowed: 'none'"
        )
    if _for_transformers(options):
        what = f"load_options {', '.join(options.for_reader)}" if options.for_reader else "a GPU"
        raise UsageError(f"quantize={options.rounding!r} with {what}; allowed: on the CPU, without load_options")
    return RoundedCheckpoint(source, folder, options.files, options.rounding)


def _for_transformers(options: LoadOptions) -> bool:
    """Whether transformers' own reader, with the library that made a checkpoint, is asked for or has a GPU to use."""
    gpu = options.device == "auto" and torch.cuda.is_available()
    return bool(options.for_reader) or gpu or options.device.startswith("cuda")


def _configuration(folder: str, options: LoadOptions) -> dict[str, Any]:
    """What config.json says; nothing where it cannot be read, which whoever builds the model will say."""
    try:
        file = file_of(folder, CONFIG, options.files)
        found = {} if file is None else json.loads(file.read_text())
    except READER_ERRORS:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _Checkpoint:
    """source: as the user named it; folder: what it resolved to; files: see `LoadOptions.files`."""

    source: str
    folder: str
    files: dict[str, Any]

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.source

    def _config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder, **self.files)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config

    def _empty(self) -> Any:
        model = empty_model(self._config, lambda error: not_loaded(self.source, self.folder, error), self.files)
        return self._with_generation(model)

    def _with_generation(self, model: Any) -> Any:
        """The model with what the checkpoint says of generation, such as the tokens that end a text."""
        from transformers import GenerationConfig

        try:
            if file_of(self.folder, GENERATION, self.files) is not None:
                model.generation_config = GenerationConfig.from_pretrained(self.folder, **located(self.files))
        except READER_ERRORS as error:
            raise not_loaded(self.source, self.folder, error) from error
        return model

    def _leave_out_biases(self, weights: dict[str, Tensor], parameters: set[str]) -> None:
        """Biases of zeros, which some quantisers add to layers that have none; others are refused."""
        for name in [name for name in weights if name.endswith(".bias") and name not in parameters]:
            if f"{name.removesuffix('.bias')}.weight" in parameters and bool(weights.pop(name).any()):
                raise extra_bias(self.source, name)

    def _plain(self, weights: dict[str, Tensor], options: LoadOptions) -> tuple[str, Any]:
        """An ordinary model with these weights."""
        try:
            with quietly():
                config = self._config()
                with torch.device("meta"):
                    empty = from_config(config, self.files)
                self._leave_out_biases(weights, {name for name, _ in empty.named_parameters()})
                model, report = type(empty).from_pretrained(
                    None,
                    config=config,
                    state_dict=weights,
                    dtype=_dtype(options),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except READER_ERRORS as error:
            raise not_loaded(self.source, self.folder, error) from error
        check_weights(self.source, report)
        return self.folder, self._with_generation(model).to(device_named(options.device))


@dataclass(frozen=True)
class QuantisedCheckpoint(_Checkpoint):
    """See `block_loading.Quantised`; a checkpoint as it is."""

    scheme: Scheme

    def _matrices(self) -> PackedMatrices:
        return PackedMatrices(CheckpointFiles(self.source, self.folder, self.files), self.scheme)

    def in_blocks(self, activations: str) -> tuple[str, Any]:
        """See `Quantised.in_blocks`."""
        check_kernels()
        matrices = self._matrices()
        model = fill(self._empty(), CheckpointTensors(matrices), activations)
        matrices.files.check_unused()
        return self.folder, model

    def unpacked(self, options: LoadOptions) -> tuple[str, Any]:
        """See `Quantised.unpacked`."""
        return self._plain(unpacked_weights(self._matrices(), _dtype(options)), options)


@dataclass(frozen=True)
class RoundedCheckpoint(_Checkpoint):
    """See `block_loading.Quantised`; an ordinary checkpoint whose weights are quantised at load."""

    quantise: str

    def _tensors(self, model: Any) -> tuple[RoundedTensors, CheckpointFiles]:
        files = CheckpointFiles(self.source, self.folder, self.files)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        wide = {f"{name}.weight" for name, module in model.named_modules() if any(module is end for end in ends)}
        return RoundedTensors(files, self.quantise, wide), files

    def in_blocks(self, activations: str) -> tuple[str, Any]:
        """See `Quantised.in_blocks`."""
        check_kernels()
        empty = self._empty()
        tensors, files = self._tensors(empty)
        model = fill(empty, tensors, activations)
        files.check_unused()
        return self.folder, model

    def unpacked(self, options: LoadOptions) -> tuple[str, Any]:
        """See `Quantised.unpacked`: what the quantised weights mean."""
        model = self._empty()
        tensors, files = self._tensors(model)
        found = dict[str, Tensor]()
        for name, module in model.named_modules():
            parameter = f"{name}.weight"
            if isinstance(module, nn.Linear | nn.Embedding) and parameter in files:
                outputs, inputs = module.weight.shape
                if inputs % INPUTS:
                    raise UsageError(
                        f"quantize={self.quantise!r}, but tensor {parameter!r} of model {self.source!r} has {inputs} "
                        f"inputs, not a multiple of {INPUTS}; allowed: 'none'"
                    )
                found[parameter] = tensors.unpacked(parameter, (outputs, inputs)).to(_dtype(options))
        for name in files.shapes:
            if name not in found:
                found[name] = tensors.values(name, files.shapes[name]).to(_dtype(options))
        return self._plain(found, options)


def _dtype(options: LoadOptions) -> torch.dtype:
    wanted = DTYPES["bfloat16" if options.dtype == "auto" else options.dtype]
    if not isinstance(wanted, torch.dtype):
        raise SlipstreamError(f"dtype={options.dtype!r}; allowed: {', '.join(DTYPES)}")
    return wanted
