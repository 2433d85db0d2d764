"""Reads the safetensors files of a model, one tensor at a time. Nothing in them is trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.checks import is_whole
from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cpu.structs import BY_NAME
from slipstream.models.weights.gguf_file import TensorEntry
from slipstream.models.weights.model_files import NO_OPTIONS, refuse_pointers
from slipstream.models.weights.transformers_reader import reader_errors
from slipstream.models.weights.unused_tensors import refuse_unused

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = ("BF16", "F16", "F32", "F64", "I64", "BOOL")  # types of matrices that are not quantized
# tensor names of the language part in a multimodal checkpoint, and the language model's own names
LANGUAGE_PART = (
    (re.compile(r"^(?:model\.language_model|language_model\.model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
)
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # configuration fields
MAX_HEADER = 100_000_000  # bytes, the safetensors package's limit


def file_of(source: str, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Path | None:
    """A file of a local folder or a hub id; None if it has none. options: see `LoadOptions.files`."""
    if (folder := Path(source)).is_dir():
        file = folder / (options.get("subfolder") or "") / name
        return file if file.is_file() else None
    from transformers.utils import cached_file  # takes seconds

    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **located(options))
    return None if path is None else Path(path)


def located(files: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `LoadOptions.files` that say where files are; the others are about code."""
    return {name: value for name, value in files.items() if not name.endswith(("_code", "code_revision"))}


class CheckpointFiles:
    """The tensors of a model's safetensors files, each from the file that the index names.

    Tensors of a language part are renamed to those of a language model. shapes: by name; used: names that were read or
    marked as read.
    """

    def __init__(self, source: str, folder: str, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        """source: as the user named the model; folder: its folder or hub id; options: see `file_of`."""
        self.source, self.metadata = source, dict[str, str]()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds = dict[str, str]()  # types of numbers, as safetensors calls them
        self.used = set[str]()
        self._files: dict[str, Any] = {}
        self._places = dict[str, tuple[str, Path, int]]()  # stored name, file, and the tensor's first byte
        self._copies: list[tuple[str, Any]] = []  # unread copies of tensors that are in several files
        paths, place_of = _paths(source, folder, options)
        for file in paths:
            header, data = self._header(file)
            self.metadata |= header.pop("__metadata__", {})
            try:
                opened = safe_open(file, framework="pt")
            except reader_errors() as error:
                reason = one_line(error)
                raise SlipstreamError(f"model {source!r}: {file.name} could not be read: {reason}") from error
            for stored, entry in header.items():
                name = _in_language_model(stored)
                if name in self._files and self._places[name][0] != stored:
                    raise self.wrong(stored, f"is there as {self._places[name][0]!r}, too", "one tensor of each name")
                if name in self._files and place_of.get(stored) != file.name:
                    self._copies.append((name, opened))
                    continue
                if name in self._files:
                    self._copies.append((name, self._files[name]))
                self.shapes[name], self.kinds[name] = tuple(entry["shape"]), str(entry["dtype"])
                self._files[name] = opened
                self._places[name] = stored, file, data + int(entry["data_offsets"][0])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Rename tensors to the model's names. renamed: from a name in the files."""
        tables: Sequence[dict[str, Any]] = (self.shapes, self.kinds, self._files, self._places)
        for name, new in [(name, renamed(name)) for name in self.shapes]:
            if new not in self.shapes:
                for table in tables:
                    table[new] = table.pop(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None, dtypes: Sequence[torch.dtype]) -> Tensor:
        """A whole tensor. Raises `SlipstreamError` if it is missing, of another shape, or of none of these types."""
        return self.rows(name, shape, dtypes)

    def rows(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtypes: Sequence[torch.dtype],
        first: int = 0,
        last: int = 1 << 60,
    ) -> Tensor:
        """Some rows of a tensor; see `tensor`."""
        if name not in self:
            raise self.wrong(name, "is missing", "the tensors of the architecture that config.json names")
        if shape is not None and self.shapes[name] != shape:
            raise self.wrong(name, f"is {list(self.shapes[name])}", f"{list(shape)}, by config.json")
        self.used.add(name)
        if not self.shapes[name]:
            tensor = self.whole(name)
        else:
            tensor = self._files[name].get_slice(self._places[name][0])[first : min(last, self.shapes[name][0])]
        if tensor.dtype not in dtypes:
            raise self.wrong(name, f"is of type {dtype_name(tensor.dtype)}", ", ".join(map(dtype_name, dtypes)))
        numbers = tensor.float() if tensor.itemsize == 1 else tensor  # PyTorch tests no 8-bit numbers
        if tensor.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            raise self.wrong(name, "holds numbers that are not finite", "finite numbers")
        return tensor

    def entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """The location of a matrix [shape], for callers that often read some of its rows."""
        self.rows(name, shape, FLOATS, 0, 1)  # checks it
        _, file, start = self._places[name]
        return TensorEntry(name, BY_NAME[self.kinds[name]].number, shape, start, file)

    def whole(self, name: str, file: Any = None) -> Tensor:
        """A tensor that is there, unchecked. file: another of the model's files."""
        tensor: Tensor = (file or self._files[name]).get_tensor(self._places[name][0])
        return tensor

    def check_unused(self, ignored: Iterable[str] = ()) -> None:
        """Refuse unused tensors, except biases of zeros, which some quantizers add; see `refuse_unused`."""
        unused = self.shapes.keys() - self.used
        refuse_unused(self.source, (name for name in unused if not self._is_zero_bias(name)), ignored)

    @property
    def has_copies(self) -> bool:
        """True if a tensor is in several files."""
        return bool(self._copies)

    def check_copies(self) -> None:
        """Refuse tensors that differ between two files: transformers reads the wrong one."""
        for name, file in self._copies:
            if not torch.equal(self.whole(name, file), self.whole(name)):
                raise self.wrong(
                    name, "is in two files, with different numbers", f"only in the file that {INDEX} names"
                )

    def are_equal(self, names: Sequence[str]) -> bool:
        """True if all these tensors hold the same numbers."""
        first, *others = map(self.whole, names)
        return all(torch.equal(first, other) for other in others)

    def _is_zero_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not bool(self.whole(name).any())

    def wrong(self, name: str, problem: str, allowed: str) -> SlipstreamError:
        return SlipstreamError(f"model {self.source!r}: tensor {name!r} {problem}; allowed: {allowed}")

    def _header(self, file: Path) -> tuple[dict[str, Any], int]:
        """A file's header, and the position of its first tensor, after checking that the file holds them all."""
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if length <= min(size, MAX_HEADER) else b""
        try:
            header: dict[str, Any] = json.loads(raw)
            if not isinstance(header.get("__metadata__", {}), dict):
                raise TypeError
            for name, entry in header.items():
                if name != "__metadata__" and (end := 8 + length + int(entry["data_offsets"][1])) > size:
                    raise self.wrong(
                        name, f"ends at byte {end:,} of {file.name}, which is truncated", f"up to {size:,}"
                    )
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            refuse_pointers(file)
            raise SlipstreamError(
                f"model {self.source!r}: {file.name} could not be read: its header is not JSON that describes tensors"
            ) from error
        return header, 8 + length


def check_layers(source: str, folder: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a config.json with more layers than the files have tensors: building them would fill the memory.

    Skips models that have no matrices in safetensors files.
    """
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    given = ((part.get(name), name) for part in parts for name in LAYER_COUNTS)
    count, name = max(((count, name) for count, name in given if is_whole(count)), default=(0, ""))
    if count > 1 and any(file_of(folder, file, options) for file in (SINGLE, INDEX)):
        num_tensors = len(CheckpointFiles(source, folder, options).shapes)
        if count > num_tensors:
            raise SlipstreamError(
                f"model {source!r}: {name} of config.json is {count}; allowed: at most {num_tensors}, the number of "
                "its tensors"
            )


def check_not_quantized(source: str, folder: str, options: Mapping[str, Any]) -> None:
    """Refuse integer or 8-bit matrices, which transformers would take for the weights themselves.

    Skips models that have no matrices in safetensors files, and masks, which have four dimensions.
    """
    if not any(file_of(folder, name, options) for name in (SINGLE, INDEX)):
        return
    files = CheckpointFiles(source, folder, options)
    for name, shape in files.shapes.items():
        if len(shape) in (2, 3) and files.kinds[name] not in PLAIN:
            raise files.wrong(
                name,
                f"is of type {files.kinds[name]}, but config.json has no quantization_config that explains it",
                f"{', '.join(PLAIN)}, or a quantization_config with its quant_method",
            )


def _in_language_model(name: str) -> str:
    for pattern, replacement in LANGUAGE_PART:
        name = pattern.sub(replacement, name)
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type of numbers in configurations."""
    return str(dtype).removeprefix("torch.")


def _paths(source: str, folder: str, options: Mapping[str, Any]) -> tuple[list[Path], dict[str, str]]:
    """A model's files, and each tensor's file name according to the index, if there is one."""
    try:
        if (single := file_of(folder, SINGLE, options)) is not None:
            return [single], {}
        if (index := file_of(folder, INDEX, options)) is None:
            raise SlipstreamError(f"model {source!r} has no {SINGLE}; allowed: weights in safetensors files")
        place_of = dict[str, str](json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        paths = {name: file_of(folder, name, options) for name in sorted(set(place_of.values()))}
    except reader_errors() as error:
        raise SlipstreamError(f"model {source!r}: {INDEX} could not be read: {one_line(error)}") from error
    if missing := [name for name, path in paths.items() if path is None]:
        raise SlipstreamError(f"model {source!r} has no file {missing[0]}, which its {INDEX} names")
    return [path for path in paths.values() if path is not None], place_of
