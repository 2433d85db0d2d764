"""Slipstream: speculative decoding that changes the speed of a language model and nothing else."""

from slipstream.decoder import SpeculativeDecoder
from slipstream.drafters import Drafter
from slipstream.params import SamplingParams
from slipstream.policy import Policy
from slipstream.results import Chunk, Result
from slipstream.stats import Stats
from slipstream.types import Draft, Round, Row, SlipstreamError, UsageError, Verdict
from slipstream.version import __version__

__all__ = [
    "Chunk",
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
]
