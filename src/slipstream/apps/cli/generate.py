"""`slipstream generate`."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
    err,
    gather_prompts,
    load_decoder,
    out,
    write_json,
)
from slipstream.apps.cli.flags import flags
from slipstream.config import DecoderConfig
from slipstream.core.stats import Stats
from slipstream.core.types import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams
from slipstream.text.detokenizer import visible_text
from slipstream.text.figures_as_text import percent
from slipstream.text.prompts import NamedPrompt
from slipstream.text.round_view import round_lines


@app.command()
@flags(DecoderConfig, SamplingParams)
def generate(
    config: DecoderConfig,
    params: SamplingParams,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    prompt: PromptTexts = [],  # noqa: B006  (typer copies it)
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    raw: Raw = False,
    debug: Debug = False,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Generate text; one prompt streams, several run as a batch."""
    prompts = gather_prompts(prompt, prompt_file, category, limit)
    decoder = load_decoder(target, draft, config, config_file)
    if len(prompts) == 1:
        results = [_stream(decoder, prompts[0], params, chat=not raw, debug=debug)]
    else:
        results = _batch(decoder, prompts, params, chat=not raw, debug=debug)
    write_json(json_file, {"target": target, "draft": draft, "results": results})


def _batch(
    decoder: SpeculativeDecoder, prompts: list[NamedPrompt], params: SamplingParams, *, chat: bool, debug: bool
) -> list[dict[str, Any]]:
    """All prompts together; Ctrl-C ends the run, not the report."""
    assert decoder.tokenizer is not None
    rounds: list[list[Round]] = [[] for _ in prompts]
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as progress:
        task = progress.add_task("texts", total=len(prompts))
        try:
            for done in decoder.rounds([p.prompt for p in prompts], params, chat=chat):
                rounds[done.row].append(done)
                progress.update(task, advance=done.finish_reason is not None)
        except KeyboardInterrupt:
            progress.update(task, description="interrupted")
    results = []
    for i, (prompt, own) in enumerate(zip(prompts, rounds, strict=True)):
        ids = [token for done in own for token in done.tokens]
        text = visible_text(decoder.tokenizer, params, ids)
        reason = own[-1].finish_reason if own and own[-1].finish_reason else "interrupted"
        results.append({"text": text, "token_ids": ids, "finish_reason": reason, "stats": Stats.of(own).to_dict()})
        out.print(f"[bold]--- {i + 1}: {prompt.category}[/]")
        out.print(text, markup=False)
        if debug:
            err.print(round_lines(own, decoder.tokenizer), soft_wrap=True)
    _print_stats(decoder, Stats.of([done for own in rounds for done in own]), f"{len(prompts)} texts")
    return results


def _print_stats(decoder: SpeculativeDecoder, stats: Stats, end: str) -> None:
    rate, efficiency = percent(stats.acceptance_rate), f"{stats.block_efficiency:.2f}"
    speed = f"{stats.num_output_tokens} tokens, {stats.tokens_per_second:.1f} tok/s"
    err.print(f"[dim]{speed}, {decoder.drafter_name}: acceptance rate {rate}, block efficiency {efficiency}, {end}[/]")


def _stream(
    decoder: SpeculativeDecoder, prompt: NamedPrompt, params: SamplingParams, *, chat: bool, debug: bool
) -> dict[str, Any]:
    """Print as it comes; Ctrl-C ends the text, not the report."""
    chunks, interrupted = [], False
    try:
        for chunk in decoder.stream(prompt.prompt, params, chat=chat):
            chunks.append(chunk)
            out.print(chunk.text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    out.print()
    if debug:
        err.print(round_lines([c.round for c in chunks], decoder.tokenizer), soft_wrap=True)
    stats = Stats.of([c.round for c in chunks], lossless=decoder.lossless)
    reason = "interrupted" if interrupted or not chunks else chunks[-1].round.finish_reason
    _print_stats(decoder, stats, f"ended by {reason}")
    return {
        "text": "".join(c.text for c in chunks),
        "token_ids": [token for c in chunks for token in c.token_ids],
        "finish_reason": reason,
        "stats": stats.to_dict(),
    }
