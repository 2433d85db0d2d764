"""`slipstream demo`: plain against speculative decoding on the embedded default model, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from slipstream.apps.cli.application import command, demo_data, load_decoder, write_json
from slipstream.apps.cli.compare import comparison_dict, fail_on_difference
from slipstream.apps.cli.consoles import RunBar, err, out
from slipstream.apps.cli.flags import MEASURING, REPEATS, Debug, Json, Models, option
from slipstream.config import DecoderConfig
from slipstream.models.weights.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt

if TYPE_CHECKING:
    from slipstream.bench.comparison import Comparison

NOTICEABLE = 0.05  # a speed-up that differs from 1 by less is called "as fast"
NEXT_STEPS = (
    "",
    "Next:",
    '  slipstream generate "Why is the sky blue?"',
    "  slipstream chat",
    "  slipstream serve                  # then open it in a browser",
    '  slipstream compare --model MODEL "your own prompt"',
    "where MODEL is a Hugging Face id, a folder or a .gguf file.",
)


@command("demo", "slipstream demo", "slipstream demo --max-tokens 40 --repeats 1", "slipstream demo --debug")
def demo_command(
    max_tokens: Annotated[int, option(MEASURING, "--max-tokens", "most tokens per output", "N", min=1)] = 96,
    repeats: Annotated[int, option(MEASURING, "--repeats", REPEATS, "N", min=1)] = 3,
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """Plain and speculative decoding side by side, on a small model.

    SmolLM2-135M-Instruct, which is downloaded once (93 MB), answers four prompts. Exit code 1 if an output differs.
    """
    data = demo_data()
    prompts = [NamedPrompt(item["prompt"], item["category"]) for item in data]
    err.sentence(
        "SmolLM2-135M-Instruct on this machine. Plain decoding computes one token per forward. Speculative decoding "
        "drafts several tokens cheaply and checks them in one forward: the output stays the same."
    )
    models = Models(EMBEDDED)
    params = SamplingParams(max_tokens=max_tokens).explicit
    decoder = load_decoder(models, DecoderConfig())
    from slipstream.apps.cli import tables
    from slipstream.bench.comparison import SPECULATIVE, compare, num_runs, summarize
    from slipstream.text.round_view import round_lines

    assert decoder.tokenizer is not None
    comparisons: list[Comparison] = []
    with RunBar(num_runs(len(prompts), repeats)) as bar:
        for comparison in compare(decoder, prompts, params, repeats=repeats, on_run=bar.show):
            item = data[len(comparisons)]
            comparisons.append(comparison)
            with bar.hidden():
                out.print(f"{len(comparisons)}/{len(prompts)} {item['category']}", style="bold")
                out.sentence(Text(item["prompt"], "dim"))
                out.print()
                out.print(tables.side_by_side(comparison, decoder.tokenizer, out.width))
                if debug and (result := comparison.runs[SPECULATIVE].result):
                    out.sentence(round_lines(result.rounds, decoder.tokenizer))
                out.sentence(caption(comparison, item["why"]), style="italic")
                out.print()
    tables.print_legend(out, comparisons)
    summary = summarize(comparisons)
    arm, total = summary["arms"][SPECULATIVE], len(comparisons)
    same = f"{arm['identical']} of {total} texts identical to plain decoding"
    out.sentence(f"{same}, {arm['speed_up']:.2f}x on average.", style="bold")
    for line in NEXT_STEPS:
        out.print(line, soft_wrap=True)
    write_json(json_file, comparison_dict(decoder, models, params, comparisons, summary))
    fail_on_difference(decoder, summary)


def caption(comparison: Comparison, why: str) -> str:
    """Speed-up of one prompt, share of accepted draft tokens, and the kind of output."""
    from slipstream.bench.comparison import SPECULATIVE, speed_up, within_noise

    result, measured = comparison.runs[SPECULATIVE].result, speed_up([comparison], SPECULATIVE)
    assert result is not None
    stats = result.stats
    drafted = "nothing was drafted"
    if stats.acceptance_rate is not None:
        drafted = f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} drafted tokens accepted"
    word = "faster" if measured.value > 1 else "slower"
    if within_noise(measured):
        word = "within noise"
    elif abs(measured.value - 1) < NOTICEABLE:
        word = "as fast"
    return f"{measured.value:.2f}x ({word}): {drafted}; {why}"
