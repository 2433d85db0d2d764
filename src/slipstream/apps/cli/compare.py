"""`slipstream compare` and `slipstream demo`: speed beside the proof that the text is the same."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer

from slipstream import __version__
from slipstream.apps.cli import tables as show
from slipstream.apps.cli.common import (
    Category,
    ConfigFile,
    Debug,
    DraftModel,
    Json,
    Limit,
    PromptFile,
    PromptTexts,
    Raw,
    Target,
    app,
    demo_data,
    err,
    gather_prompts,
    load_decoder,
    out,
    write_json,
)
from slipstream.apps.cli.flags import flags
from slipstream.bench.comparison import BATCH, SPECULATIVE, Comparison, compare, compare_batch, summarise
from slipstream.config import DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.figures_as_text import time_split, verdict
from slipstream.text.prompts import NamedPrompt
from slipstream.text.round_view import round_lines


@app.command("compare")
@flags(DecoderConfig, SamplingParams, max_tokens=64)
def compare_command(
    config: DecoderConfig,
    params: SamplingParams,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    prompt: PromptTexts = [],  # noqa: B006
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    raw: Raw = False,
    debug: Debug = False,
    hf: Annotated[bool, typer.Option("--hf", help="also run Hugging Face `generate`")] = False,
    batch: Annotated[bool, typer.Option("--batch", help="also run all prompts as a batch against one by one")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm; times are medians")] = 1,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Plain against speculative decoding in one run: same text? how much faster? Exit code 1 if a text is wrong."""
    prompts = gather_prompts(prompt, prompt_file, category, limit)
    decoder = load_decoder(target, draft, config, config_file)
    done = []
    for comparison in compare(decoder, prompts, params, chat=not raw, with_hf=hf, repeats=repeats):
        done.append(comparison)
        _print_progress(decoder, comparison, len(done), len(prompts), debug=debug)
    summary = summarise(done)
    if batch:
        summary[BATCH] = compare_batch(decoder, done, params, chat=not raw)
    out.print(show.comparison_table(done), show.summary_table(summary), time_split(summary["stats"]))
    write_json(json_file, _report(decoder, target, draft, params, done, summary))
    _fail_on_difference(decoder, summary)


def _print_progress(decoder: SpeculativeDecoder, done: Comparison, number: int, total: int, *, debug: bool) -> None:
    result = done.runs[SPECULATIVE].result
    assert result is not None
    err.print(f"[bold]{number}/{total} {done.prompt.category}[/] {done.speed_up(SPECULATIVE):.2f}x")
    if debug:
        err.print(round_lines(result.rounds, decoder.tokenizer), soft_wrap=True)
    elif decoder.tokenizer is not None:
        err.print(show.coloured(result, decoder.tokenizer, limit=400))
    if number == total and not debug:
        err.print(show.LEGEND)


def _report(
    decoder: SpeculativeDecoder,
    target: str,
    draft: str | None,
    params: SamplingParams,
    done: list[Comparison],
    summary: dict[str, Any],
) -> dict[str, Any]:
    return {
        "target": target,
        "draft": draft,
        "config": vars(decoder.config),
        "params": {k: v for k, v in vars(params).items() if k != "logits_processors"},
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


def _fail_on_difference(decoder: SpeculativeDecoder, summary: dict[str, Any]) -> None:
    """Texts of a lossless rule must agree; sampled ones are compared where the rule couples them only."""
    wrong = summary["arms"][SPECULATIVE]["different"]
    if wrong and decoder.lossless:
        raise SlipstreamError(f"{wrong} of {summary['prompts']} texts differ from plain decoding and are no ties")


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="tokens per text")] = 96,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm; times are medians")] = 3,
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """The main job on the embedded default model: plain against speculative, side by side."""
    data = demo_data()
    prompts = [NamedPrompt(item["prompt"], item["category"]) for item in data]
    err.print("SmolLM2-135M-Instruct on this machine; drafts come from the prompt and the text so far")
    decoder = SpeculativeDecoder(EMBEDDED)
    params = SamplingParams(max_tokens=max_tokens)
    assert decoder.tokenizer is not None
    done = []
    for comparison in compare(decoder, prompts, params, repeats=repeats):
        done.append(comparison)
        out.print(show.side_by_side(comparison, decoder.tokenizer))
        if debug and (result := comparison.runs[SPECULATIVE].result):
            out.print(round_lines(result.rounds, decoder.tokenizer), soft_wrap=True)
    out.print(show.LEGEND)
    summary = summarise(done)
    faster = sum(c.speed_up(SPECULATIVE) > 1 for c in done)
    out.print(show.comparison_table(done))
    for item in data:
        out.print(f"[dim]{item['category']}: {item['why']}[/]")
    line = {
        "identical": summary["arms"][SPECULATIVE]["identical"],
        "texts": len(done),
        "faster": faster,
        "speed_ups": {c.prompt.category: round(c.speed_up(SPECULATIVE), 2) for c in done},
        "acceptance_rate": round(summary["stats"]["acceptance_rate"] or 0.0, 3),
        "block_efficiency": round(summary["stats"]["block_efficiency"], 2),
    }
    print(json.dumps(line))
    write_json(json_file, _report(decoder, EMBEDDED, None, params, done, summary))
    _fail_on_difference(decoder, summary)
