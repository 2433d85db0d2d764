"""What a checkpoint's `quantization_config` says, as far as its tensors do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError

METHODS = ("gptq", "awq", "compressed-tensors", "torchao")
BITS = (2, 4, 8)
PACKED = "pack-quantized"  # the format of compressed-tensors


@dataclass(frozen=True)
class Scheme:
    """method: of `METHODS`; bits: of the codes; group: inputs that share a scale, 0 for all of a row.

    zeros_from: what a stored zero point of 0 means, 1 in the first format of GPTQ. For compressed-tensors and torchao
    bits and group are 0: each tensor says them.
    """

    method: str
    bits: int = 0
    group: int = 0
    zeros_from: int = 0


class _Reader:
    """Reads the settings of one checkpoint; raises `SlipstreamError` for those that are not known."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._source, self._config = source, config

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, bool) or value not in allowed:
            raise self.wrong(name, value, ", ".join(str(choice) for choice in allowed if choice is not None))
        return value

    def group(self) -> int:
        value = self._config.get("group_size", 128)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
            raise self.wrong("group_size", value, "a whole number from 1, or -1 for whole rows")
        return max(value, 0)

    def wrong(self, name: str, value: Any, allowed: str) -> SlipstreamError:
        return SlipstreamError(
            f"model {self._source!r}: quantization_config.{name} of config.json is {value!r}; allowed: {allowed}"
        )


def scheme_of(source: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model's configuration; None if it is not quantised, or by a method that is not known here.

    Raises `SlipstreamError` for settings of a known method that are not.
    """
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") not in METHODS:
        return None
    method, read = str(quantisation["quant_method"]), _Reader(source, quantisation)
    if method == "gptq":
        form = read.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        return Scheme(method, read.one_of("bits", BITS), read.group(), int(form == "gptq"))
    if method == "awq":
        name = "format" if "format" in quantisation else "version"
        read.one_of(name, ("gemm",), "gemm")
        return Scheme(method, read.one_of("bits", (4,), 4), read.group())
    if method == "compressed-tensors":
        _check_packed(read, quantisation)
    return Scheme(method)


def _check_packed(read: _Reader, quantisation: Mapping[str, Any]) -> None:
    groups = quantisation.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise read.wrong("config_groups", groups, "a mapping")
    read.one_of("format", (PACKED, "mixed-precision"))
    for name in ("transform_config", "kv_cache_scheme"):
        if quantisation.get(name):
            raise read.wrong(name, quantisation[name], "none: only weights are quantised, and not rotated on the way")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type", "int") != "int":
            raise read.wrong(f"config_groups.{name}.weights", weights, "weights of type int")
        if group.get("format", PACKED) not in (PACKED, None):
            raise read.wrong(f"config_groups.{name}.format", group["format"], PACKED)
        if weights.get("num_bits") not in BITS:
            raise read.wrong(f"config_groups.{name}.weights.num_bits", weights.get("num_bits"), "2, 4, 8")
        for which in ("input_activations", "output_activations"):
            if group.get(which) is not None:
                raise read.wrong(f"config_groups.{name}.{which}", group[which], "null: only weights are quantised")
