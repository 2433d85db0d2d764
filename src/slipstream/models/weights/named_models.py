"""Models by name: short names such as qwen3:4b, and OWNER/REPO:Q4_K_M for a GGUF file in a repository on the hub.

Reads the table of short names and Hugging Face's cache; `hub_files` downloads. Imports no framework.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.models.weights.gguf_file import PART
from slipstream.models.weights.model_files import NO_OPTIONS

DEFAULT = "Q4_K_M"  # the quantization of a repository's file if none is named
# a model's memory: a factor for its files, whose weights kernels reorder, and gigabytes for Python with PyTorch and the
# keys and values of a few thousand tokens
REORDERED, BESIDE = 1.05, 1.5
REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)"
NAME = re.compile(REPOSITORY + r"(?::(?P<wanted>\S+))?")
ADDRESS = re.compile(  # of a model's page or file, as in a browser or for Ollama
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    + REPOSITORY
    + r"(?::(?P<wanted>[^\s/?#]+))?(?:/(?:blob|resolve|raw|tree)/(?P<revision>[^\s/?#]+)(?P<path>/[^\s?#]+)?)?"
    + r"/?(?:[?#]\S*)?"
)
LABEL = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32)(?![a-z0-9])", re.IGNORECASE
)
GGUF = ".gguf"


def gigabytes_needed(gigabytes: float) -> float:
    """About how much memory models need whose files have this total size."""
    return gigabytes * REORDERED + BESIDE


@dataclass(frozen=True)
class NamedModel:
    """A row of the table of short names."""

    name: str
    repository: str
    file: str
    gigabytes: float  # of the file
    draft: str | None = None  # the name of the draft model that it brings

    @property
    def gigabytes_needed(self) -> float:
        """About how much memory it needs, with its draft model."""
        draft = short_names().get(self.draft or "")
        return gigabytes_needed(self.gigabytes + (0 if draft is None else draft.gigabytes))


@dataclass(frozen=True)
class HubName:
    """A GGUF file on the hub, as a user names it."""

    repository: str
    wanted: str  # a quantization, or a file's name
    revision: str = "main"


@dataclass(frozen=True)
class HubModel:
    """A model among the files of a repository."""

    label: str  # its quantization, or else its file name
    files: tuple[str, ...]  # a single file, or the parts of a split one in order


@cache
def short_names() -> Mapping[str, NamedModel]:
    """The table of short names."""
    text = resources.files("slipstream").joinpath("data/models.json").read_text(encoding="utf-8")
    return {row["name"]: NamedModel(**row) for row in json.loads(text)}


def named_model(source: str) -> NamedModel | None:
    """The row of a short name; None if this is not one, or names a local folder or file."""
    return None if os.path.exists(source) else short_names().get(source.lower())


def hub_name(source: str) -> HubName | None:
    """The GGUF file on the hub that this names; None for anything else, such as local files and other hub ids."""
    if os.path.exists(source) or os.path.exists(os.path.expanduser(source)):
        return None
    if (row := named_model(source)) is not None:
        return HubName(row.repository, row.file)
    match = ADDRESS.fullmatch(source) or NAME.fullmatch(source)
    if match is None:
        return None
    parts = match.groupdict()
    path = (parts.get("path") or "").strip("/")
    wanted = path if path.lower().endswith(GGUF) else parts["wanted"]
    repository = parts["repository"].lower()
    if wanted is None and ("gguf" not in repository or repository.endswith(GGUF)):  # the latter is a path
        return None
    return HubName(parts["repository"], wanted or DEFAULT, parts.get("revision") or "main")


def models_among(files: Iterable[str]) -> list[HubModel]:
    """The models among a repository's files, without split ones that lack a part."""
    parts: dict[tuple[str, int], list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(GGUF):
            split = PART.match(file)
            key = (file[: -len(GGUF)], 1) if split is None else (split["stem"], int(split["count"]))
            parts.setdefault(key, []).append(file)
    models, unsplit = [], {stem for stem, count in parts if count == 1}
    for (stem, count), names in parts.items():
        labels, name = LABEL.findall(stem), Path(stem).name
        # not models: parts for images; files with statistics for quantizing, which name no quantization
        is_model = "mmproj" not in name.lower() and (labels or "imatrix" not in name.lower())
        if is_model and len(names) == count and (count == 1 or stem not in unsplit):
            models.append(HubModel((labels or [name])[-1].upper(), tuple(names)))
    return models


def wanted_among(models: Iterable[HubModel], wanted: str) -> list[HubModel]:
    """The models that a quantization or a file name means."""
    if wanted.lower().endswith(GGUF):
        return [
            model for model in models if any(f"/{file}".lower().endswith(f"/{wanted.lower()}") for file in model.files)
        ]
    return [model for model in models if model.label == wanted.upper()]


def downloaded_file(name: HubName, options: Mapping[str, Any] = NO_OPTIONS) -> Path | None:
    """The file, or the first part, in Hugging Face's cache; None if it is not there. options: load options."""
    from huggingface_hub import constants  # imports nothing large

    cache_folder = Path(options.get("cache_dir") or constants.HF_HUB_CACHE)
    repository = cache_folder / f"models--{name.repository.replace('/', '--')}"
    revision = str(options.get("revision") or name.revision)
    reference = repository / "refs" / revision
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        snapshot = repository / "snapshots" / commit
        files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    except (OSError, ValueError):  # the name is too long, the folder closed to the user, or the reference damaged
        return None
    models = wanted_among(models_among(files), name.wanted)
    return snapshot / models[0].files[0] if len(models) == 1 else None


def what_to_write(source: str) -> str:
    """The end of a message about an unknown name without a slash, perhaps one of Ollama's."""
    family = source.lower().partition(":")[0]
    names = [name for name in short_names() if name.partition(":")[0] == family]
    listed = f"{', '.join(names)} (`slipstream models` lists all)" if names else "a name that `slipstream models` lists"
    is_ollamas = re.fullmatch(r"[\w.-]+:[\w.-]+", source)
    ollama = f", or the file that `ollama show {source} --modelfile` names after FROM" if is_ollamas else ""
    return f"allowed: {listed}, OWNER/REPO-GGUF:{DEFAULT} for a file on the Hugging Face Hub{ollama}"
