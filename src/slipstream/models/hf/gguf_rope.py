"""How a GGUF file scales rotary positions, which transformers' reader leaves out of the configuration it makes.

Linear and YaRN scaling (Peng et al. 2023, section 3) stand in the metadata. Files of Llama 3.1 and later hold what
every frequency is divided by, as a tensor; the settings that it was made from are found again. Whatever else scales
positions is refused: the model would be another one at every position.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, pi
from typing import Any

import numpy

from slipstream.errors import SlipstreamError
from slipstream.models.hf.gguf_header import GGUFHeader

FACTORS = "rope_freqs.weight"
OTHERS = ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KNOWN = {"type", "factor", "original_context_length", "finetuned"}


def scale_positions(config: Any, header: GGUFHeader) -> None:
    """Write the scaling of a file into the configuration that transformers read from it."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        if _by_metadata(header) or not header.tensors.keys().isdisjoint((FACTORS, *OTHERS)):
            raise _wrong(header, "scales rotary positions", f"no scaling, {header.architecture} has no settings for it")
        return
    settings = settings.get("full_attention", settings)  # where layers differ, those of windows are not scaled
    if settings.get("rope_type", "default") != "default":
        return  # transformers read it
    settings |= _by_metadata(header) | _by_factors(header, float(settings.get("rope_theta") or 10000.0))


def _by_metadata(header: GGUFHeader) -> dict[str, Any]:
    """Linear and YaRN scaling."""
    told = header.scaling
    kind = told.get("type", "linear" if "factor" in told else "none")
    if kind == "none" or (kind == "linear" and told.get("factor") in (0.0, 1.0)):
        return {}
    if kind not in ("linear", "yarn") or not told.keys() <= KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise _wrong(header, f"rope.scaling is {dict(told)}", f"types none, linear and yarn, with {known}")
    found = {"rope_type": kind, "factor": _number(header, told, "factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = int(_number(header, told, "original_context_length"))
    return found


def _by_factors(header: GGUFHeader, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3, from what the file divides each frequency by."""
    if other := next((name for name in OTHERS if name in header.tensors), None):
        raise _wrong(header, f"has tensor {other!r}", f"{FACTORS}, as files of Llama 3 have it")
    entry = header.tensors.get(FACTORS)
    if entry is None:
        return {}
    if entry.kind_name != "F32" or len(entry.shape) != 1:
        raise _wrong(header, f"tensor {FACTORS!r} is {list(entry.shape)} in {entry.kind_name}", "a vector in F32")
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        factors = numpy.frombuffer(stream.read(4 * entry.shape[0]), "<f4")
    if (factors == 1).all():
        return {}
    if not (numpy.isfinite(factors).all() and factors.min() >= 1):
        raise _wrong(header, f"tensor {FACTORS!r} holds numbers from {factors.min()}", "finite numbers from 1")
    factor = float(factors.max())
    if not numpy.allclose(factors, llama3_factors(len(factors), theta, factor), rtol=1e-4):
        raise _wrong(header, f"tensor {FACTORS!r} holds other factors than Llama 3's", f"those made with {LLAMA3}")
    return {"rope_type": "llama3", "factor": factor} | LLAMA3


def llama3_factors(count: int, theta: float, factor: float) -> Any:
    """[count] what each frequency is divided by; transformers' `rope_type` "llama3" with `LLAMA3`.

    Frequencies that turn often enough within the original context are left alone, those that hardly turn are divided by
    `factor`, and those between by something between.
    """
    lengths = 2 * pi * theta ** (numpy.arange(count) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / lengths
    kept = numpy.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / factor + kept)


def _number(header: GGUFHeader, told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 1):
        raise _wrong(header, f"rope.scaling.{name} is {value!r}", "a number from 1")
    return float(value)


def _wrong(header: GGUFHeader, what: str, allowed: str) -> SlipstreamError:
    return SlipstreamError(f"model {str(header.file)!r}: {what}; allowed: {allowed}")
