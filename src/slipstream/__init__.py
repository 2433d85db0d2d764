"""Slipstream: speculative decoding that changes the speed of a language model and nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.drafters import Drafter
    from slipstream.drop_in.generate import CustomGenerate, custom_generate
    from slipstream.params import SamplingParams
    from slipstream.policy import Policy
    from slipstream.results import Chunk, Result
    from slipstream.stats import Stats
    from slipstream.types import Draft, Round, Row, SlipstreamError, UsageError, Verdict

__all__ = [
    "Chunk",
    "CustomGenerate",
    "Draft",
    "Drafter",
    "Policy",
    "Result",
    "Round",
    "Row",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeDecoder",
    "Stats",
    "UsageError",
    "Verdict",
    "__version__",
    "custom_generate",
]


_HOMES = {
    "decoder": ("SpeculativeDecoder",),
    "drafters": ("Drafter",),
    "drop_in.generate": ("CustomGenerate", "custom_generate"),
    "params": ("SamplingParams",),
    "policy": ("Policy",),
    "results": ("Chunk", "Result"),
    "stats": ("Stats",),
    "types": ("Draft", "Round", "Row", "SlipstreamError", "UsageError", "Verdict"),
}


def __getattr__(name: str) -> object:
    """Everything is imported when it is first used: PyTorch and transformers take seconds."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"slipstream.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
