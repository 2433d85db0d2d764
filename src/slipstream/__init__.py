"""Slipstream: speculative decoding that changes the speed of a language model and nothing else."""

from typing import TYPE_CHECKING

from slipstream.decoder import SpeculativeDecoder
from slipstream.drafters import Drafter
from slipstream.params import SamplingParams
from slipstream.policy import Policy
from slipstream.results import Chunk, Result
from slipstream.stats import Stats
from slipstream.types import Draft, Round, Row, SlipstreamError, UsageError, Verdict
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.drop_in.generate import CustomGenerate, custom_generate

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


def __getattr__(name: str) -> object:
    """The drop-in for `generate` loads transformers, which nothing else here needs before a model is loaded."""
    if name in ("CustomGenerate", "custom_generate"):
        from slipstream.drop_in import generate

        return getattr(generate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
