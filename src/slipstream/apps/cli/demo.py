"""`slipstream demo`: plain against speculative decoding on the embedded default model, side by side."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.apps.cli.application import command, demo_data, load_decoder, write_json
from slipstream.apps.cli.compare import comparison_dict, fail_on_difference
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import MEASURING, Debug, Json, Models, Repeats, option
from slipstream.config import DecoderConfig
from slipstream.models.weights.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt

if TYPE_CHECKING:
    from slipstream.bench.comparison import Comparison

NOTICEABLE = 0.05  # a speed-up nearer to 1 than this is called the same speed


@command("demo", "slipstream demo", "slipstream demo --max-tokens 40 --repeats 1", "slipstream demo --debug")
def demo_command(
    max_tokens: Annotated[int, option(MEASURING, "--max-tokens", text="tokens per text", metavar="N", min=1)] = 96,
    repeats: Repeats = 3,
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """Plain and speculative decoding side by side, on a small model."""
    data = demo_data()
    prompts = [NamedPrompt(item["prompt"], item["category"]) for item in data]
    err.print("SmolLM2-135M-Instruct on this machine; drafts come from the prompt and the text so far")
    models, params = Models(EMBEDDED), SamplingParams(max_tokens=max_tokens)
    decoder = load_decoder(models, DecoderConfig())
    from slipstream.apps.cli import tables
    from slipstream.bench.comparison import SPECULATIVE, compare, summarise
    from slipstream.text.round_view import round_lines

    assert decoder.tokenizer is not None
    comparisons = []
    for comparison in compare(decoder, prompts, params, repeats=repeats):
        comparisons.append(comparison)
        out.print(tables.side_by_side(comparison, decoder.tokenizer))
        if debug and (result := comparison.runs[SPECULATIVE].result):
            out.sentence(round_lines(result.rounds, decoder.tokenizer))
    out.print(tables.legend(comparisons))
    summary = summarise(comparisons)
    out.print(tables.comparison_table(comparisons))
    for item, comparison in zip(data, comparisons, strict=True):
        out.sentence(caption(comparison, item["why"]), style="dim")
    print(json.dumps(_line(comparisons, summary)))
    write_json(json_file, comparison_dict(decoder, models, params, comparisons, summary))
    fail_on_difference(decoder, summary)


def caption(comparison: Comparison, why: str) -> str:
    """What the numbers of one text say, and what kind of text it is."""
    from slipstream.bench.comparison import SPECULATIVE

    result, speed_up = comparison.runs[SPECULATIVE].result, comparison.speed_up(SPECULATIVE)
    assert result is not None
    stats = result.stats
    drafted = "nothing was drafted"
    if stats.acceptance_rate is not None:
        drafted = f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} drafted tokens accepted"
    faster = (
        "faster than" if speed_up > 1 + NOTICEABLE else "slower than" if speed_up < 1 - NOTICEABLE else "as fast as"
    )
    return f"{comparison.prompt.category}: {faster} plain ({speed_up:.2f}x), {drafted}; {why}"


def _line(comparisons: list[Comparison], summary: dict[str, Any]) -> dict[str, Any]:
    """The result in one line of JSON."""
    from slipstream.bench.comparison import SPECULATIVE

    return {
        "identical": summary["arms"][SPECULATIVE]["identical"],
        "texts": len(comparisons),
        "faster": sum(c.speed_up(SPECULATIVE) > 1 for c in comparisons),
        "speed_ups": {c.prompt.category: round(c.speed_up(SPECULATIVE), 2) for c in comparisons},
        "acceptance_rate": round(summary["stats"]["acceptance_rate"] or 0.0, 3),
        "block_efficiency": round(summary["stats"]["block_efficiency"], 2),
    }
