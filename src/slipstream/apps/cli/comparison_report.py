"""What `compare` and `demo` write as JSON, and when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.apps.cli.flags import Models
from slipstream.bench.comparison import SPECULATIVE, Comparison
from slipstream.certificate.parity import verdict
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.version import __version__


def to_dict(
    decoder: SpeculativeDecoder,
    models: Models,
    params: SamplingParams,
    done: Sequence[Comparison],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Settings, versions, the summary, and token ids, seconds and verdict of every arm on every prompt."""
    return {
        "target": models.target,
        "draft": models.draft,
        "config": vars(decoder.config),
        "params": params.to_dict(),
        "versions": {"slipstream": __version__, "torch": torch.__version__},
        "summary": summary,
        "prompts": [
            {
                "category": c.prompt.category,
                "arms": {
                    arm: {"token_ids": run.token_ids, "seconds": run.seconds, "verdict": verdict(run.difference)}
                    for arm, run in c.runs.items()
                },
            }
            for c in done
        ],
    }


def fail_on_difference(decoder: SpeculativeDecoder, summary: dict[str, Any]) -> None:
    """Texts of a lossless rule must agree; sampled ones are compared only where the rule couples them."""
    wrong = summary["arms"][SPECULATIVE]["different"]
    if wrong and decoder.lossless:
        raise SlipstreamError(f"{wrong} of {summary['prompts']} texts differ from plain decoding and are no ties")
