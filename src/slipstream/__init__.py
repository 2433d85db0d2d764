"""Slipstream: speculative decoding that changes the speed of a language model and nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.models.paused_collection import paused_collection
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.bench.benchmark import benchmark
    from slipstream.bench.comparison import compare
    from slipstream.constraints.constraint import Constraint
    from slipstream.core.acceptance import Distributions, Rule
    from slipstream.core.interfaces import Drafter, Observer, Policy, Sampler
    from slipstream.core.rounds import Round
    from slipstream.core.types import Draft, Row, Traits, Verdict
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.errors import SlipstreamError, UsageError
    from slipstream.integrations.transformers.custom_generate import CustomGenerate, custom_generate
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.results import Chunk, Result, Stats
    from slipstream.wiring.vocabulary_report import check_pair

__all__ = [
    "Chunk",
    "Constraint",
    "CustomGenerate",
    "Distributions",
    "Draft",
    "Drafter",
    "Observer",
    "Policy",
    "Result",
    "Round",
    "Row",
    "Rule",
    "Sampler",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeDecoder",
    "Stats",
    "Traits",
    "UsageError",
    "Verdict",
    "__version__",
    "benchmark",
    "check_pair",
    "compare",
    "custom_generate",
]
_HOMES = {
    "bench.benchmark": ("benchmark",),
    "bench.comparison": ("compare",),
    "constraints.constraint": ("Constraint",),
    "core.acceptance": ("Distributions", "Rule"),
    "core.interfaces": ("Drafter", "Observer", "Policy", "Sampler"),
    "core.types": ("Draft", "Round", "Row", "Traits", "Verdict"),
    "decoder": ("SpeculativeDecoder",),
    "errors": ("SlipstreamError", "UsageError"),
    "integrations.transformers.custom_generate": ("CustomGenerate", "custom_generate"),
    "sampling.params": ("SamplingParams",),
    "text.results": ("Chunk", "Result", "Stats"),
    "wiring.vocabulary_report": ("check_pair",),
}


def __getattr__(name: str) -> object:
    """Everything is imported when it is first used: PyTorch and transformers take seconds."""
    for home, names in _HOMES.items():
        if name in names:
            with paused_collection():
                return getattr(import_module(f"slipstream.{home}"), name)
    from slipstream.errors import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, *__all__)}")


def __dir__() -> list[str]:
    return __all__
