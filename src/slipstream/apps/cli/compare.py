"""`slipstream compare`: speed, and proof that the output is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream.apps.cli.application import command, draft_name, gather_prompts, load_decoder, write_json
from slipstream.apps.cli.consoles import RunBar, err, out
from slipstream.apps.cli.flags import MEASURING, Debug, Json, Models, PromptSource, Structure, flag, flags
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.bench.comparison import Comparison
    from slipstream.decoder import SpeculativeDecoder


@dataclass(frozen=True)
class Arms:
    """Further arms next to plain and speculative decoding, and the number of repeats."""

    hf: bool = flag(False, MEASURING, "also run Hugging Face `generate`")
    batch: bool = flag(False, MEASURING, "also decode all prompts as one batch, and compare with one by one")
    repeats: int = flag(3, MEASURING, "runs of each arm on each prompt; intervals need two", "N", min=1)


@command(
    "compare",
    'slipstream compare "Why is the sky blue?"',
    'slipstream compare --drafter ngram --repeats 5 "List ten birds."',
    "slipstream compare --hf --prompt-file prompts.jsonl",
)
@flags(
    Models,
    PromptSource,
    Arms,
    DecoderConfig,
    SamplingParams,
    Structure,
    also=("prediction",),
    measures=True,
    max_tokens=64,
)
def compare_command(
    models: Models,
    source: PromptSource,
    arms: Arms,
    config: DecoderConfig,
    params: SamplingParams,
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """Compare plain and speculative decoding: speed, and whether the output is the same.

    Exit code 1 if an output is wrong.
    """
    prompts = gather_prompts(source)
    if arms.hf:
        _check_hf(models, params)
    decoder = load_decoder(models, config)
    from slipstream.apps.cli import tables
    from slipstream.bench.comparison import BATCH, compare, compare_batch, num_runs, summarize
    from slipstream.text.prompt_sets import titles
    from slipstream.text.round_view import time_split

    comparisons: list[Comparison] = []
    total = num_runs(len(prompts), arms.repeats, with_hf=arms.hf)
    with RunBar(total) as bar:
        for comparison in compare(
            decoder, prompts, params, chat=not source.raw, with_hf=arms.hf, repeats=arms.repeats, on_run=bar.show
        ):
            comparisons.append(comparison)
            with bar.hidden():
                number = len(comparisons)
                title = f"{number}/{len(prompts)} {titles(prompts, 60)[number - 1]}"
                _print_progress(decoder, comparison, title, debug=debug)
    if not debug:
        tables.print_legend(err, comparisons)
    summary = summarize(comparisons)
    if arms.batch:
        summary[BATCH] = compare_batch(decoder, comparisons, params, chat=not source.raw)
    if len(comparisons) > 1:
        out.print(tables.comparison_table(comparisons))
    for line in (*tables.summary_lines(summary), time_split(summary["stats"])):
        out.sentence(line)
    write_json(json_file, comparison_dict(decoder, models, params, comparisons, summary))
    fail_on_difference(decoder, summary)


def _check_hf(models: Models, params: SamplingParams) -> None:
    """Refuse options that Hugging Face `generate` would treat differently, before models are loaded."""
    from slipstream.bench.baselines import check_params, no_hf_model
    from slipstream.bench.comparison import ARMS, HF
    from slipstream.models.loaded import is_toy

    check_params(repr(HF), replace(params, prediction=None))
    if is_toy(models.target):
        raise no_hf_model(ARMS[HF], models.target)


def _print_progress(decoder: SpeculativeDecoder, comparison: Comparison, title: str, *, debug: bool) -> None:
    from slipstream.apps.cli import tables
    from slipstream.bench.comparison import SPECULATIVE
    from slipstream.text.round_view import round_lines

    result = comparison.runs[SPECULATIVE].result
    assert result is not None
    err.sentence(title, style="bold")
    if debug:
        err.sentence(round_lines(result.rounds, decoder.tokenizer))
    elif decoder.tokenizer is not None:
        err.sentence(tables.colored(result, decoder.tokenizer, limit=400))


def comparison_dict(
    decoder: SpeculativeDecoder,
    models: Models,
    params: SamplingParams,
    comparisons: Sequence[Comparison],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Settings, versions, the summary, and token ids, seconds and verdict of every arm on every prompt."""
    from importlib.metadata import version

    from slipstream.certificate.parity import verdict

    return {
        "target": models.target,
        "draft": draft_name(models, decoder),
        "config": vars(decoder.config),
        "params": params.to_dict(),
        "versions": {"slipstream": __version__, "torch": version("torch")},
        "summary": summary,
        "prompts": [
            {
                "category": c.prompt.category,
                "estimate": None if c.estimate is None else asdict(c.estimate) | {"error": c.estimate.error},
                "arms": {
                    arm: {"token_ids": run.token_ids, "seconds": run.seconds, "verdict": verdict(run.difference)}
                    for arm, run in c.runs.items()
                },
            }
            for c in comparisons
        ],
    }


def fail_on_difference(decoder: SpeculativeDecoder, summary: dict[str, Any]) -> None:
    """SlipstreamError if an output of a lossless rule is wrong; sampled outputs count only if the rule couples them."""
    from slipstream.bench.comparison import SPECULATIVE

    wrong = summary["arms"][SPECULATIVE]["different"]
    if wrong and decoder.lossless:
        raise SlipstreamError(f"{wrong} of {summary['prompts']} texts differ from plain decoding and are not ties")
