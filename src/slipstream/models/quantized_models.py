"""Models whose weights are quantized: by a GGUF file, by a checkpoint, or at load.

They compute directly with the quantized blocks: nothing is unpacked, and no second file is written. Where the kernels
cannot do that, or the options ask for something else, the weights are unpacked to floating point.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.cpu.block_experts import (
    ExpertStacks,
    Stack,
    expert_blocks,
    stacks_of_single_experts,
)
from slipstream.models.cpu.block_linear import BlockPart, Table
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import block_kernels
from slipstream.models.cpu.latent_heads import LatentStacks, latent_of, stacks_of_weight
from slipstream.models.cpu.quantized_linear import BITS, FORMATS, pieces, quantized_part, rows_of_blocks
from slipstream.models.cpu.structs import INPUTS
from slipstream.models.decoder.plan import ExpertsPlan, LatentPlan
from slipstream.models.decoder.planned_model import planned_model
from slipstream.models.hf.block_model import check_kernels, empty_model, fill
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.adapters import adapter_at
from slipstream.models.weights.gguf_architectures import settings_of
from slipstream.models.weights.gguf_configuration import (
    described,
    described_configuration,
    described_settings,
    unreadable_gguf,
)
from slipstream.models.weights.gguf_conversion import check_memory
from slipstream.models.weights.gguf_file import GGUFHeader, read_header
from slipstream.models.weights.gguf_packing import PackedAhead, begun
from slipstream.models.weights.gguf_tensors import GGUFTensors, RowsOfFile, check_kind, check_single
from slipstream.models.weights.model_files import is_gguf, not_loaded
from slipstream.models.weights.quantized_checkpoint import (
    MODELOPT_FILE,
    CheckpointTensors,
    PackedMatrices,
    Scheme,
    scheme_of,
    unpacked_weights,
)
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles, check_layers, file_of, located
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.models.weights.transformers_reader import (
    DTYPES,
    check_weights,
    device_named,
    from_config,
    is_applied_by_transformers,
    names_in_model,
    quietly,
    reader_errors,
)
from slipstream.models.weights.unused_tensors import HARMLESS
from slipstream.tokenization.hf_tokenizer import HFTokenizer

log = logging.getLogger("slipstream")

# sections in the configurations of models that also take images or sounds
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")
# types of such models whose language part alone generates the same text; a test compares both
WITH_LANGUAGE_PART = ("gemma3", "gemma4", "gemma4_unified", "llava", "mistral3", "qwen3_5", "qwen3_5_moe")
CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class QuantizedModel:
    """A model read from quantized weights."""

    folder: str  # of its tokenizer
    model: Any
    in_blocks: bool  # computes with the quantized blocks; else it was unpacked
    tokenizer: HFTokenizer | None = None  # if it was read, too


def generation_settings(source: str, folder: str, files: Mapping[str, Any]) -> Any:
    """The generation settings of a folder or hub id, such as the tokens that end a text; None if it has no file."""
    from transformers import GenerationConfig

    try:
        if file_of(folder, GENERATION, files) is not None:
            return GenerationConfig.from_pretrained(folder, **located(files))
    except reader_errors() as error:
        raise SlipstreamError(f"model {source!r}: {GENERATION} could not be read: {one_line(error)}") from error
    return None


def load_in_blocks(source: str, options: LoadOptions, *, reads_tokenizer: bool = False) -> QuantizedModel | None:
    """Load a model with quantized weights; None if it is not quantized, or if `load_model` must unpack it.

    reads_tokenizer: read a GGUF file's tokenizer, too, while its weights are packed.
    It is unpacked if the options say so or, with a warning, if the kernels do not support its blocks. Raises
    `UsageError` if it must be unpacked although the options set `activations`, which only blocks use.
    """
    is_required = options.activations != "auto"
    quantized = GGUFFile(source, options, reads_tokenizer) if is_gguf(source) else checkpoint_of(source, options)
    on_gpu = device_named(options.device).type == "cuda"
    reason = "it is neither a GGUF file nor quantized" if quantized is None else _why_not_in_blocks(options)
    if reason is None and on_gpu and is_required:
        reason = "it runs on a GPU"
    if quantized is not None and reason is None:
        try:
            if on_gpu:
                return quantized.on_gpu()
            return quantized.in_blocks(options.activations if is_required else "int8")
        except NotInBlocksError as error:
            reason = str(error)
            if not is_required:
                if error.rounds:
                    log.warning("%s is unpacked to bfloat16, which rounds its weights: %s", quantized.name, reason)
                options = replace(options, dtype="bfloat16" if options.dtype == "auto" else options.dtype)
    if is_required:
        raise UsageError(
            f"activations={options.activations!r}, but model {source!r} is not computed in its own blocks: {reason}; "
            "allowed: 'auto'"
        )
    return None if quantized is None else quantized.unpacked(options)


def _why_not_in_blocks(options: LoadOptions) -> str | None:
    """The reason these options rule out computing in quantized blocks; None if they allow it."""
    if options.dtype != "auto":
        return f"dtype={options.dtype!r} unpacks it"
    if options.fast is False:
        return "fast=False unpacks it"
    if options.quantize in ("int4", "int8"):
        return f"draft_dtype={options.quantize!r} rounds it again"
    if options.for_reader:
        return f"load_options {', '.join(options.for_reader)} are for transformers' reader"
    device = options.device
    return None if device == "auto" or device.startswith(("cpu", "cuda")) else f"device={device!r}"


class GGUFFile:
    """A GGUF file, or the files of a split one."""

    def __init__(self, source: str, options: LoadOptions, reads_tokenizer: bool) -> None:
        if options.rounding != "none":
            raise UsageError(
                f"quantize={options.rounding!r}, but model {source!r} is quantized already, in GGUF; allowed: 'none'"
            )
        self.file, self._source, self._options = expanded(source), source, options
        self._reads_tokenizer = reads_tokenizer

    @property
    def name(self) -> str:
        return self.file.name

    def in_blocks(self, activations: str) -> QuantizedModel:
        """Raises `NotInBlocksError` where the model must be unpacked."""
        early = begun(self.file)
        header = read_header(self.file) if early is None else early.header
        header.check_model()
        settings_of(header)  # refuses unsupported files before reading anything large
        try:
            check_kernels()
            kinds = {check_kind(entry).name for entry in header.tensors.values() if len(entry.shape) > 1}
            if kinds == {"BF16"}:  # unpacked weights are compressed to 12 bits
                raise NotInBlocksError("its matrices are bfloat16 numbers, not blocks", rounds=False)
            check_single(header)
            with early or PackedAhead(header, block_kernels()) as ahead:
                ahead.use_threads()
                try:
                    folder, tokenizer = described(header), None
                    if self._reads_tokenizer:
                        tokenizer = load_tokenizer(self._source, str(folder), self._options)
                    model = self._filled(header, folder, activations, ahead)
                finally:  # also the cause of any other error
                    header.check_unchanged()
                return QuantizedModel(str(folder), model, True, tokenizer)
        except NotInBlocksError as error:
            check_memory(header, torch.bfloat16, str(error))
            raise

    def on_gpu(self) -> QuantizedModel:
        """The model on a GPU, computed from the file's blocks. Raises `NotInBlocksError` where it must be unpacked."""
        from slipstream.models.cuda.stored_weights import fill_on_gpu
        from slipstream.models.cuda.triton_layer import why_not_computed

        header = read_header(self.file)
        header.check_model()
        settings_of(header)
        folder = described(header)
        model = planned_model(described_settings(header, folder))
        if model is None:
            raise NotInBlocksError(f"on a GPU, blocks of {header.architecture!r} are not computed with")
        if (reason := why_not_computed(model.plan)) is not None:
            raise NotInBlocksError(f"on a GPU: {reason}")
        tensors = GGUFTensors(header)
        fill_on_gpu(model, tensors, device_named(self._options.device), torch.bfloat16)
        tensors.check_unused()
        header.check_unchanged()
        tokenizer = load_tokenizer(self._source, str(folder), self._options) if self._reads_tokenizer else None
        return QuantizedModel(str(folder), model.eval(), True, tokenizer)

    def unpacked(self, options: LoadOptions) -> QuantizedModel | None:
        """Returns None: `load_model` converts a file that is not in blocks."""
        return None

    def _filled(self, header: GGUFHeader, folder: Path, activations: str, ahead: PackedAhead) -> Any:
        """The model that `folder` describes; see `block_model.fill`."""
        settings = described_settings(header, folder)
        try:
            planned = planned_model(settings)
        except reader_errors() as error:  # metadata that no model can have
            raise unreadable_gguf(header.file, error) from error
        if planned is not None:
            model, calls = planned, planned.linear_calls()
        else:
            config = described_configuration(header, folder)
            model, calls = empty_model(lambda: config, lambda error: unreadable_gguf(header.file, error)), None
        tensors = GGUFTensors(header, ahead)
        filled = fill(model, tensors, activations, calls)
        tensors.check_unused()
        return filled


def checkpoint_of(source: str, options: LoadOptions) -> QuantizedCheckpoint | RoundedCheckpoint | None:
    """The quantized checkpoint of a folder or hub id; None where transformers is to load it.

    Raises `UsageError` where the options ask to quantize a model that cannot be quantized.
    """
    if options.rounding == "none" and options.for_reader:
        return None
    folder = resolve(source, options.extra)
    config = _configuration(folder, options)
    check_layers(source, folder, config, options.files)
    parts = [part for part in PARTS if isinstance(config.get(part), dict)]
    if options.rounding == "none":
        # transformers renames such models' weights while reading them
        if parts or (_for_transformers(options) and is_applied_by_transformers(config.get("quantization_config"))):
            return None
        scheme = scheme_of(source, config)
        return None if scheme is None else QuantizedCheckpoint(source, folder, options.files, scheme)
    if not config and adapter_at(source, folder, options.files) is not None:
        raise UsageError(
            f"quantize={options.rounding!r}, but model {source!r} is an adapter, which is merged first; allowed: "
            "'none', or the merged model's folder"
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UsageError(
            f"quantize={options.rounding!r}, but model {source!r} is quantized already, by {method}; allowed: 'none'"
        )
    if parts and config.get("model_type") not in WITH_LANGUAGE_PART:
        raise UsageError(
            f"quantize={options.rounding!r}, but model {source!r} of type {config.get('model_type')!r} is more than "
            f"a language model ({parts[0]}); allowed: 'none', or models of type {', '.join(WITH_LANGUAGE_PART)}"
        )
    if _for_transformers(options):
        what = f"load_options {', '.join(options.for_reader)}" if options.for_reader else "a GPU"
        raise UsageError(f"quantize={options.rounding!r} with {what}; allowed: on the CPU, without load_options")
    return RoundedCheckpoint(source, folder, options.files, options.rounding)


def _for_transformers(options: LoadOptions) -> bool:
    """True if transformers must load a checkpoint: on a GPU, or because of load options that only its reader knows."""
    gpu = options.device == "auto" and torch.cuda.is_available()
    return bool(options.for_reader) or gpu or options.device.startswith("cuda")


def _configuration(folder: str, options: LoadOptions) -> dict[str, Any]:
    """config.json as a dictionary; empty where it cannot be read, which is reported when the model is built.

    ModelOpt may write the settings of its quantization into a file of their own.
    """
    try:
        config, modelopt = (
            {} if file is None else json.loads(file.read_text(encoding="utf-8"))
            for file in (file_of(folder, name, options.files) for name in (CONFIG, MODELOPT_FILE))
        )
        if modelopt and isinstance(config, dict) and config.get("quantization_config") is None:
            quantization = {"quant_method": "modelopt", MODELOPT_FILE: True} | modelopt["quantization"]
            return config | {"quantization_config": quantization}
    except reader_errors():
        return {}
    return config if isinstance(config, dict) else {}


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint in the safetensors format."""

    source: str  # as the user named it
    folder: str  # to which `source` resolved
    files: dict[str, Any]  # see `LoadOptions.files`

    @property
    def name(self) -> str:
        return self.source

    def on_gpu(self) -> QuantizedModel:
        """Raises `NotInBlocksError`: there, only the blocks of GGUF files are computed with."""
        raise NotInBlocksError("it runs on a GPU", rounds=False)

    def _config(self) -> Any:
        """The configuration of the language model, whatever other parts the checkpoint has."""
        from transformers import AutoConfig

        complete = config = AutoConfig.from_pretrained(self.folder, **self.files)
        if complete.model_type in WITH_LANGUAGE_PART:
            config = complete.get_text_config()
            config.tie_word_embeddings |= complete.tie_word_embeddings
            if complete.model_type == "gemma3":
                config.final_logit_softcapping = None  # only the text-only class applies it
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if (token := getattr(complete, name, None)) is not None:
                    setattr(config, name, token)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config

    def _empty(self, files: CheckpointFiles) -> Any:
        """The model without weights; its output layer is tied only if the files agree with config.json."""
        model = empty_model(self._config, lambda error: not_loaded(self.source, self.folder, error), self.files)
        names = [f"{name}.weight" for name, module in model.named_modules() if _is_outermost(module, model)]
        if model.config.tie_word_embeddings and all(name in files for name in names):
            files.used.update(names)
            model.config.tie_word_embeddings = files.are_equal(names)
        return self._with_generation(model)

    def _with_generation(self, model: Any) -> Any:
        """Give the model the checkpoint's generation settings, such as the tokens that end a text."""
        if (settings := generation_settings(self.source, self.folder, self.files)) is not None:
            model.generation_config = settings
        return model

    def _plain(self, weights: dict[str, Tensor], options: LoadOptions) -> QuantizedModel:
        """The model in floating point with these weights."""
        try:
            with quietly():
                config = self._config()
                with torch.device("meta"):
                    empty = from_config(config, self.files)
                _leave_out_biases(weights, {name for name, _ in empty.named_parameters()})
                model, report = type(empty).from_pretrained(
                    None,
                    config=config,
                    state_dict=weights,
                    dtype=_dtype(options),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except reader_errors() as error:
            raise not_loaded(self.source, self.folder, error) from error
        check_weights(self.source, report)
        model = self._with_generation(model).to(device_named(options.device))
        return QuantizedModel(self.folder, model, False)


@dataclass(frozen=True)
class QuantizedCheckpoint(_Checkpoint):
    """A checkpoint that was quantized by its maker."""

    scheme: Scheme

    def _matrices(self) -> PackedMatrices:
        return PackedMatrices(CheckpointFiles(self.source, self.folder, self.files), self.scheme)

    def in_blocks(self, activations: str) -> QuantizedModel:
        check_kernels()
        matrices = self._matrices()
        model = fill(self._empty(matrices.files), CheckpointTensors(matrices), activations)
        matrices.files.used |= matrices.of_activations()
        matrices.files.check_unused(model._keys_to_ignore_on_load_unexpected)
        self._warn_of_activations()
        return QuantizedModel(self.folder, model, True)

    def unpacked(self, options: LoadOptions) -> QuantizedModel:
        model = self._plain(unpacked_weights(self._matrices(), _dtype(options)), options)
        self._warn_of_activations()
        return model

    def _warn_of_activations(self) -> None:
        if self.scheme.rounds_activations:
            log.warning("%s: activations are not rounded as its quantization describes, only its weights", self.name)


class RoundedTensors:
    """The tensors of an ordinary checkpoint for `block_model.fill`, its matrices quantized as they are read.

    Embeddings and output layers keep 8 bits, as in GGUF files. Any further embedding stays in its file as it is, since
    only single rows of it are read. `quantized_linear.py` says how weights are rounded.
    """

    def __init__(self, files: CheckpointFiles, quantize: str, wide: set[str]) -> None:
        """quantize: "int4" or "int8"; wide: parameters that always get 8 bits."""
        self._files, self._quantize, self._bits, self._wide = files, quantize, BITS[quantize], wide
        self._memory = HugePages()

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        bits = self._bits_of(parameter)
        if shape[1] % INPUTS:
            raise NotInBlocksError(f"tensor {parameter!r} has {shape[1]} inputs; allowed: multiples of {INPUTS}")

        def rows(first: int, last: int) -> Any:
            return rows_of_blocks(self._files.rows(parameter, shape, FLOATS, first, last), bits)

        return BlockPart(FORMATS[bits], shape, rows, library, self._memory)

    def parts(self, parameter: str, shape: tuple[int, int], library: Any) -> list[BlockPart]:
        return [self.part(parameter, shape, library)]

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> Table:
        if parameter in self._wide:
            return self.part(parameter, shape, library)
        return RowsOfFile(self._files.entry(parameter, shape), library)

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        gate_up, down = (f"{block}.experts.{name}" for name in ("gate_up_proj", "down_proj"))
        if gate_up in self._files and f"{gate_up}_bias" not in self._files:
            both = self._stacked(gate_up, (plan.count, 2 * plan.inner, plan.hidden), library)
            parts = self._stacked(down, (plan.count, plan.hidden, plan.inner), library)
            gate, up = (Stack.of_parts(both, first) for first in (0, plan.inner))
            return ExpertStacks(gate, up, Stack.of_parts(parts))
        return stacks_of_single_experts(partial(self.part, library=library), block, plan, self._files.shapes)

    def latent(self, parameter: str, plan: LatentPlan, library: Any) -> LatentStacks:
        weight = self._files.tensor(parameter, plan.shape, FLOATS)
        return stacks_of_weight(weight, plan, lambda part: quantized_part(part, library, self._quantize, self._memory))

    def _stacked(self, name: str, shape: tuple[int, int, int], library: Any) -> list[BlockPart]:
        """The matrices of a tensor [shape], one after the other."""

        def rows(expert: int, first: int, last: int) -> Any:
            return rows_of_blocks(self._files.rows(name, shape, FLOATS, expert, expert + 1)[0, first:last], self._bits)

        block, memory = FORMATS[self._bits], self._memory
        return [BlockPart(block, shape[1:], partial(rows, expert), library, memory) for expert in range(shape[0])]

    def unpacked(self, parameter: str, shape: tuple[int, int]) -> Tensor:
        """[outputs, inputs] float32: the numbers that a quantized matrix stands for."""
        return self._rounded(self._files.rows(parameter, shape, FLOATS), self._bits_of(parameter))

    def unpacked_latent(self, parameter: str, plan: LatentPlan) -> Tensor:
        """`unpacked` for a layer that projects latents to keys and values: its matrices are quantized as `latent`'s."""
        parts = plan.parts(self._files.tensor(parameter, plan.shape, FLOATS))
        return plan.joined(*(self._rounded(part, self._bits) for part in parts))

    def _rounded(self, weight: Tensor, bits: int) -> Tensor:
        return torch.cat([piece.values() for piece in pieces(weight, bits)])

    def _bits_of(self, parameter: str) -> int:
        return 8 if parameter in self._wide else self._bits


@dataclass(frozen=True)
class RoundedCheckpoint(_Checkpoint):
    """A checkpoint in floating point whose weights are quantized while they are loaded."""

    quantize: str

    def _tensors(self) -> tuple[Any, RoundedTensors, CheckpointFiles]:
        """The model without weights, and its tensors."""
        files = CheckpointFiles(self.source, self.folder, self.files)
        model = self._empty(files)
        files.rename(names_in_model(model))
        wide = {f"{name}.weight" for name, module in model.named_modules() if _is_outermost(module, model)}
        return model, RoundedTensors(files, self.quantize, wide), files

    def in_blocks(self, activations: str) -> QuantizedModel:
        check_kernels()
        empty, tensors, files = self._tensors()
        is_mixture = bool(expert_blocks(empty))
        try:
            model = fill(empty, tensors, activations)
        except NotInBlocksError as error:
            if is_mixture:
                raise self._no_mixture(str(error)) from error
            raise
        files.check_unused(model._keys_to_ignore_on_load_unexpected)
        return QuantizedModel(self.folder, model, True)

    def _no_mixture(self, reason: str) -> UsageError:
        return UsageError(
            f"quantize={self.quantize!r}, but model {self.source!r} is a mixture of experts: {reason}; allowed: 'none'"
        )

    def unpacked(self, options: LoadOptions) -> QuantizedModel:
        try:
            model, tensors, files = self._tensors()
        except NotInBlocksError as error:  # the configuration is damaged
            raise UsageError(
                f"quantize={self.quantize!r}, but model {self.source!r} cannot be built: {error}; allowed: 'none'"
            ) from error
        if expert_blocks(model):
            raise self._no_mixture("it is quantized only where the kernels compute with blocks")
        weights = dict[str, Tensor]()
        for name, module in model.named_modules():
            parameter = f"{name}.weight"
            if (plan := latent_of(model.config, name)) is not None:
                weights[parameter] = tensors.unpacked_latent(parameter, plan).to(_dtype(options))
            elif (isinstance(module, nn.Linear) or _is_outermost(module, model)) and parameter in files:
                outputs, inputs = module.weight.shape
                if inputs % INPUTS:
                    raise UsageError(
                        f"quantize={self.quantize!r}, but tensor {parameter!r} of model {self.source!r} has {inputs} "
                        f"inputs, not a multiple of {INPUTS}; allowed: 'none'"
                    )
                weights[parameter] = tensors.unpacked(parameter, (outputs, inputs)).to(_dtype(options))
        for name in files.shapes:
            if name not in weights and not any(pattern.search(name) for pattern in HARMLESS):
                weights[name] = tensors.values(name, files.shapes[name]).to(_dtype(options))
        return self._plain(weights, options)


def _leave_out_biases(weights: dict[str, Tensor], parameters: set[str]) -> None:
    """Drop all-zero biases that some quantizers add to layers without a bias."""
    for name in [name for name in weights if name.endswith(".bias") and name not in parameters]:
        if not bool(weights[name].any()):
            del weights[name]


def _is_outermost(module: nn.Module, model: Any) -> bool:
    return module is model.get_input_embeddings() or module is model.get_output_embeddings()


def _dtype(options: LoadOptions) -> torch.dtype:
    dtype = DTYPES["bfloat16" if options.dtype == "auto" else options.dtype]
    assert isinstance(dtype, torch.dtype)  # only "auto" is not a type
    return dtype
