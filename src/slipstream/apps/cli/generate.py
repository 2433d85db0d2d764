"""`slipstream generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.apps.cli.common import (
    as_request,
    command,
    config_from,
    err,
    gather_prompts,
    load_decoder,
    out,
    write_json,
)
from slipstream.apps.cli.flags import flags
from slipstream.apps.cli.options import Debug, Json, Models, PromptSource, System
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import NamedPrompt, check_text

if TYPE_CHECKING:
    from slipstream.core.stats import Stats
    from slipstream.core.types import Round
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.text.requests import Prompt


@command("generate")
@flags(Models, PromptSource, DecoderConfig, SamplingParams)
def generate_command(
    models: Models,
    source: PromptSource,
    config: DecoderConfig,
    params: SamplingParams,
    system: System = "",
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """Generate text; one prompt streams, several run as a batch."""
    config = config_from(config, models.config_file)
    prompts = gather_prompts(source)
    if system and source.raw:
        raise UsageError("--system beside --raw, which uses no chat template; allowed: one of the two")
    check_text("--system", system)
    decoder = load_decoder(models, config)
    requests = [as_request(decoder, prompt, system) for prompt in prompts]
    if len(prompts) == 1:
        results = [_stream(decoder, requests[0], params, chat=not source.raw, debug=debug)]
    else:
        results = _batch(decoder, prompts, requests, params, chat=not source.raw, debug=debug)
    write_json(json_file, {"target": models.target, "draft": models.draft, "results": results})


def _stream(
    decoder: SpeculativeDecoder, prompt: Prompt, params: SamplingParams, *, chat: bool, debug: bool
) -> dict[str, Any]:
    """Print as it comes; Ctrl-C ends the text, not the report."""
    from slipstream.core.stats import Stats

    chunks, interrupted = [], False
    try:
        for chunk in decoder.stream(prompt, params, chat=chat):
            chunks.append(chunk)
            out.print(chunk.text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    out.print()
    _show_rounds(decoder, [c.round for c in chunks], debug)
    stats = Stats.of([c.round for c in chunks], lossless=decoder.lossless)
    reason = "interrupted" if interrupted or not chunks else chunks[-1].round.finish_reason
    _print_stats(decoder, stats, f"ended by {reason}")
    return {
        "text": "".join(c.text for c in chunks),
        "token_ids": [token for c in chunks for token in c.token_ids],
        "finish_reason": reason,
        "stats": stats.to_dict(),
    }


def _batch(
    decoder: SpeculativeDecoder,
    prompts: list[NamedPrompt],
    requests: list[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    debug: bool,
) -> list[dict[str, Any]]:
    """All prompts together; Ctrl-C ends the run, not the report."""
    from slipstream.core.stats import Stats
    from slipstream.text.detokenizer import visible_text

    assert decoder.tokenizer is not None
    rounds = _run(decoder, requests, params, chat)
    results = []
    for i, (prompt, own) in enumerate(zip(prompts, rounds, strict=True)):
        ids = [token for done in own for token in done.tokens]
        text = visible_text(decoder.tokenizer, params, ids)
        reason = own[-1].finish_reason if own and own[-1].finish_reason else "interrupted"
        results.append({"text": text, "token_ids": ids, "finish_reason": reason, "stats": Stats.of(own).to_dict()})
        out.print(f"[bold]--- {i + 1}: {prompt.category}[/]")
        out.print(text, markup=False, soft_wrap=True)
        _show_rounds(decoder, own, debug)
    _print_stats(decoder, Stats.of([done for own in rounds for done in own]), f"{len(prompts)} texts")
    return results


def _run(decoder: SpeculativeDecoder, requests: list[Prompt], params: SamplingParams, chat: bool) -> list[list[Round]]:
    """The rounds of every prompt, with a progress bar over the texts; Ctrl-C ends the run."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rounds: list[list[Round]] = [[] for _ in requests]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("texts", total=len(requests))
        try:
            for done in decoder.rounds(requests, params, chat=chat):
                rounds[done.row].append(done)
                progress.update(task, advance=done.finish_reason is not None)
        except KeyboardInterrupt:
            progress.update(task, description="interrupted")
    return rounds


def _show_rounds(decoder: SpeculativeDecoder, rounds: list[Round], debug: bool) -> None:
    if debug:
        from slipstream.text.round_view import round_lines

        err.print(round_lines(rounds, decoder.tokenizer), soft_wrap=True)


def _print_stats(decoder: SpeculativeDecoder, stats: Stats, end: str) -> None:
    from slipstream.text.figures_as_text import statistics_line

    err.print(f"{statistics_line(stats, decoder.drafter_name)}, {end}", style="dim", markup=False, soft_wrap=True)
