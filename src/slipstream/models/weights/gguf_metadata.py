"""Reads and checks the metadata of a GGUF file's architecture, and derives the scaling of rotary positions.

Linear and YaRN scaling (Peng et al. 2023, section 3) are in the metadata. Files of Llama 3.1 and later have a tensor
with a divisor of each frequency, from which its settings are recovered. LongRoPE (Ding et al. 2024) has a tensor for
short texts and one for long ones. Any other scaling is refused: without it the model would be wrong at every position.
"""

from __future__ import annotations

from math import log, pi, sqrt
from typing import Any

import numpy

from slipstream.checks import is_number, is_whole
from slipstream.errors import SlipstreamError
from slipstream.models.weights.gguf_file import GGUFHeader

REQUIRED = object()  # the default of a value without which llama.cpp refuses a file
FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KIND_NAMES = {int: "a whole number from 0", float: "a finite number", bool: "true or false"}
LARGEST = (1 << 31) - 1  # whole number
PARTS = ("vision", "audio", "mm")  # towers for images and sounds, which text does not use
# in any architecture: values that change no logits, or that converters also write where they do not apply
HARMLESS = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned")


class Metadata:
    """Reads the metadata of a file's architecture, by names without the architecture's prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self._prefix = f"{header.architecture}."
        self._known = set(HARMLESS)

    def value(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """An int from 0, a finite float or a bool; for an array that is the same in all layers, its item."""
        items = self._items(name, kind, None if default is REQUIRED else [default])
        if len(set(items)) != 1:
            raise self.wrong(name, f"{items[:8]}{' ...' if len(items) > 8 else ''}", "the same for all layers")
        return items[0]

    def of_layers(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """An item for each layer: those of an array, or a single value repeated."""
        items = self._items(name, kind, default)
        return items * self.header.values[f"{self._prefix}block_count"] if len(items) == 1 else items

    def _items(self, name: str, kind: type, default: list[Any] | None) -> list[Any]:
        """The items of an array, one per layer, or a single value. default: None if the file must have it."""
        self._known.add(name)
        key = self._prefix + name
        if key not in self.header.values:
            if default is None:
                raise self.header.wrong(f"its metadata have no {key}", "a file that has it")
            return default
        value = self.header.values[key]
        items = self.header.array(key) if value is None else [value]
        for item in items or [None]:
            if not _is(item, kind):
                raise self.wrong(name, repr(item)[:60], KIND_NAMES[kind])
        num_layers = self.header.values.get(f"{self._prefix}block_count")
        if value is None and len(items) != num_layers:
            raise self.wrong(name, f"an array of {len(items)}", f"an item for each of {num_layers} layers")
        return [shortest(item) if kind is float else item for item in items]

    def array(self, name: str) -> list[Any]:
        """An array whose items do not belong to layers; empty if the file has none."""
        self._known.add(name)
        return self.header.array(self._prefix + name)

    def raw(self, name: str) -> Any:
        """An unchecked value; None for an array or a missing value."""
        return self.header.values.get(self._prefix + name)

    def ignore(self, name: str) -> None:
        """Mark a value as known; it changes nothing here."""
        self._known.add(name)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse values other than these, if the file has the value."""
        value = self.value(name, type(allowed[0]), allowed[0])
        if value not in allowed:
            raise self.wrong(name, value, ", ".join(map(str, allowed)))

    def wrong(self, name: str, value: Any, allowed: str) -> SlipstreamError:
        return self.header.wrong(f"{self._prefix}{name} is {value}", allowed)

    def check_all_known(self) -> None:
        """Refuse a file whose architecture has metadata that nothing has read: they may change the computation."""
        read = {self._prefix + name for name in self._known}
        parts = tuple(f"{self._prefix}{part}." for part in PARTS)
        others = [key for key in self.header.values.keys() - read if key.startswith(self._prefix)]
        others = sorted(key for key in others if not key.startswith(parts))
        if others:
            raise self.header.wrong(
                f"its metadata have {others[0]}, which is not supported yet and may change what is computed",
                f"the metadata that llama.cpp's converter writes for {self.header.architecture}",
            )

    def scaling(self) -> dict[str, Any]:
        """The settings `rope.scaling.*`, marked as read."""
        self._known |= {
            key.removeprefix(self._prefix)
            for key in self.header.values
            if key.startswith((f"{self._prefix}rope.scaling.", f"{self._prefix}rope.scale_linear"))
        }
        return self.header.scaling

    def factors(self, name: str) -> Any:
        """A tensor of factors [frequencies]; None where the file has none."""
        entry = self.header.tensors.get(name)
        if entry is None:
            return None
        if entry.kind_name != "F32" or len(entry.shape) != 1:
            raise self.header.wrong(f"tensor {name!r} is {list(entry.shape)} in {entry.kind_name}", "a vector in F32")
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            factors = numpy.frombuffer(stream.read(4 * entry.shape[0]), "<f4")
        if not numpy.isfinite(factors).all():
            raise self.header.wrong(f"tensor {name!r} holds numbers that are not finite", "finite numbers")
        return factors


def _is(item: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(item, bool)
    return is_whole(item, 0, LARGEST) if kind is int else is_number(item)


def shortest(number: float) -> float:
    """The shortest decimal for a float32 from a file: 1e-05 for 9.99999974e-06."""
    return float(str(numpy.float32(number)))


def rotary_base(metadata: Metadata, name: str, default: float) -> float:
    """The base of the rotary positions. It must be above 1, since YaRN divides by its logarithm."""
    base: float = metadata.value(name, float, default)
    if base <= 1:
        raise metadata.wrong(name, base, "a number above 1")
    return base


def rope_parameters(metadata: Metadata, scalings: tuple[str, ...]) -> dict[str, Any]:
    """The rotary settings for a configuration. scalings: those that the architecture's model supports."""
    theta = rotary_base(metadata, "rope.freq_base", 10000.0)
    settings = {"rope_type": "default", "rope_theta": theta}
    scaled = _by_metadata(metadata) | _by_factors(metadata, theta) | _by_two_factors(metadata)
    if scaled and scaled["rope_type"] not in scalings:
        raise metadata.header.wrong(
            f"it scales rotary positions by {scaled['rope_type']}", ", ".join(scalings) or "no scaling"
        )
    return settings | scaled


def _by_metadata(metadata: Metadata) -> dict[str, Any]:
    """The settings of linear and YaRN scaling; empty for none."""
    scaling = metadata.scaling()
    kind = scaling.get("type", "linear" if "factor" in scaling else "none")
    if kind in ("none", "longrope") and LONG_FACTORS in metadata.header.tensors:
        return {}  # see `_by_two_factors`
    is_none = kind == "none" or (kind == "linear" and scaling.get("factor") in (0.0, 1.0))
    if is_none and scaling.get("attn_factor", 1.0) == 1.0:
        return {}
    names = {"type", "factor", "original_context_length", "finetuned"}
    numbers = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    if kind == "yarn":
        names |= {*numbers, "yarn_log_multiplier"}
        usual = 0.1 * log(_scale(metadata, "factor")) + 1
        if "attn_factor" in scaling and abs(_scale(metadata, "attn_factor") - usual) < 1e-4:
            names.add("attn_factor")  # older files of OLMo 3 state what YaRN computes by default
    if kind not in ("linear", "yarn") or not scaling.keys() <= names:
        raise metadata.header.wrong(
            f"rope.scaling is {dict(scaling)}", f"types none, linear and yarn, with {', '.join(sorted(names))}"
        )
    settings = {"rope_type": kind, "factor": _scale(metadata, "factor")}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = int(_scale(metadata, "original_context_length"))
        settings |= {field: _scale(metadata, name) for name, field in numbers.items() if name in scaling}
    return settings


def _scale(metadata: Metadata, name: str) -> float:
    value = metadata.scaling().get(name)
    if not is_number(value, 1):
        raise metadata.wrong(f"rope.scaling.{name}", repr(value), "a number from 1")
    return shortest(value)


def _by_factors(metadata: Metadata, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling, recovered from the file's divisors of frequencies; empty for none."""
    factors = metadata.factors(FACTORS)
    if factors is None or (factors == 1).all():
        return {}
    if (unrotated := int((factors >= 1e30).sum())) and (factors[: len(factors) - unrotated] == 1).all():
        return {"rope_type": "proportional", "partial_rotary_factor": 1 - unrotated / len(factors)}
    if factors.min() < 1:
        raise metadata.header.wrong(f"tensor {FACTORS!r} holds numbers from {factors.min()}", "numbers from 1")
    factor = float(factors.max())
    if not numpy.allclose(factors, llama3_factors(len(factors), theta, factor), rtol=1e-4):
        raise metadata.header.wrong(
            f"tensor {FACTORS!r} holds other factors than Llama 3's", f"those made with {LLAMA3}"
        )
    return {"rope_type": "llama3", "factor": factor} | LLAMA3


def llama3_factors(count: int, theta: float, factor: float) -> Any:
    """[count], the divisor of each frequency: transformers' `rope_type` "llama3" with `LLAMA3`.

    High frequencies, which turn often within the original context, are divided by 1, low ones by `factor`, and those in
    between by intermediate values.
    """
    lengths = 2 * pi * theta ** (numpy.arange(count) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / lengths
    kept = numpy.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / factor + kept)


def _by_two_factors(metadata: Metadata) -> dict[str, Any]:
    """The settings of LongRoPE; empty for none."""
    long, short = metadata.factors(LONG_FACTORS), metadata.factors(SHORT_FACTORS)
    if long is None and short is None:
        return {}
    if long is None or short is None or len(long) != len(short):
        raise metadata.header.wrong(f"it has one of {LONG_FACTORS!r} and {SHORT_FACTORS!r}", "both, of one length")
    length = metadata.value("context_length", int)
    original = metadata.value("rope.scaling.original_context_length", int, length)
    if original < 2:
        raise metadata.wrong("rope.scaling.original_context_length", original, "a number from 2")
    settings = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": [shortest(number) for number in long],
        "short_factor": [shortest(number) for number in short],
    }
    by_length = sqrt(1 + log(length / original) / log(original)) if length > original else 1.0
    attention = metadata.value("rope.scaling.attn_factor", float, by_length)
    # transformers computes a factor that follows from the lengths, without rounding
    return settings if abs(attention - by_length) < 1e-4 else settings | {"attention_factor": attention}
