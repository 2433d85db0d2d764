"""`slipstream generate`: answers one prompt as a stream, several as a batch."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from slipstream.apps.cli.application import (
    as_request,
    command,
    draft_name,
    gather_prompts,
    load_decoder,
    params_for,
    write_json,
)
from slipstream.apps.cli.consoles import TextWriter, err, out, progress_bar
from slipstream.apps.cli.flags import (
    AnswerStart,
    Debug,
    Json,
    Models,
    PromptSource,
    Structure,
    System,
    TemplateKwargs,
    flags,
    json_object,
)
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError, first_line
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt, titles
from slipstream.tokenization.tokenizer import check_text

if TYPE_CHECKING:
    from slipstream.core.rounds import Round
    from slipstream.core.types import Row
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.text.requests import FormOptions, Prompt
    from slipstream.text.results import Stats


@command(
    "generate",
    'slipstream generate "Why is the sky blue?"',
    'cat notes.txt | slipstream generate "Summarize this text."',
    'slipstream generate "A bird, as JSON" --json-object --json -',
)
@flags(Models, PromptSource, DecoderConfig, SamplingParams, Structure, also=("n", "logprobs", "prediction", "suffix"))
def generate_command(
    models: Models,
    source: PromptSource,
    config: DecoderConfig,
    params: SamplingParams,
    system: System = "",
    answer_start: AnswerStart = "",
    template_kwargs: TemplateKwargs = "{}",
    debug: Debug = False,
    json_file: Json = None,
) -> None:
    """Answer a prompt; several prompts run as a batch."""
    prompts = gather_prompts(source)
    variables = json_object("--chat-template-kwargs", template_kwargs)
    for name, value in (("--system", system), ("--answer-start", answer_start), ("--chat-template-kwargs", variables)):
        if value and source.raw:
            raise UsageError(f"{name} with --raw, which uses no chat template; allowed: one of the two")
    check_text("--system", system)
    check_text("--answer-start", answer_start)
    form: FormOptions = {"chat_template_kwargs": variables, "continue_final_message": bool(answer_start)}
    decoder = load_decoder(models, config)
    params = decoder.reader.own_options(params)
    requests = [as_request(decoder, prompt, system, answer_start) for prompt in prompts]
    if len(prompts) == params.n == 1:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        params = replace(params_for(prompts[0], params), seed=seed)
        results = [_stream(decoder, requests[0], params, form, chat=not source.raw, debug=debug)]
    else:
        results = _batch(decoder, prompts, requests, params, form, chat=not source.raw, debug=debug)
    write_json(json_file, {"target": models.target, "draft": draft_name(models, decoder), "results": results})
    if any(
        text["finish_reason"] == "error" for result in results for text in (result, *result.get("alternatives", ()))
    ):
        raise typer.Exit(1)


def _stream(
    decoder: SpeculativeDecoder, prompt: Prompt, params: SamplingParams, form: FormOptions, *, chat: bool, debug: bool
) -> dict[str, Any]:
    """Print the output while it is generated; Ctrl-C ends the generation, but not the report."""
    from slipstream.text.results import Stats

    chunks = []
    interrupted = False
    writer = TextWriter()
    try:
        for chunk in decoder.stream(prompt, params, chat=chat, **form):
            chunks.append(chunk)
            writer.write(chunk.text)
    except KeyboardInterrupt:
        interrupted = True
    writer.end()
    rounds = [c.round for c in chunks]
    _show_rounds(decoder, rounds, debug)
    logprobs = _report_logprobs(decoder, rounds)
    stats = Stats.of(rounds, lossless=decoder.lossless)
    reason = "interrupted" if interrupted or not chunks else chunks[-1].round.finish_reason
    seed = f", seed {params.seed}" if params.temperature else ""
    _print_stats(decoder, stats, f"ended by {reason}{seed}")
    return {
        "text": "".join(c.text for c in chunks),
        "token_ids": [token for c in chunks for token in c.token_ids],
        "finish_reason": reason,
        "seed": params.seed,
        "stats": stats.to_dict(),
    } | logprobs


def _batch(
    decoder: SpeculativeDecoder,
    prompts: list[NamedPrompt],
    requests: list[Prompt],
    params: SamplingParams,
    form: FormOptions,
    *,
    chat: bool,
    debug: bool,
) -> list[dict[str, Any]]:
    """Generate all outputs together; after Ctrl-C, or if one fails, the others are still reported."""
    from slipstream.text.requests import read_form
    from slipstream.text.results import Stats

    all_params = [params_for(prompt, params) for prompt in prompts]
    groups = decoder.sample_rows(requests, all_params, chat=chat, form=read_form({**form}))
    rows = [row for group in groups for row in group]
    _run(decoder, rows)
    results: list[dict[str, Any]] = []
    names = titles(prompts, 60)
    for i, row in enumerate(rows):
        number, k = divmod(i, params.n)
        name = f"{number + 1}.{k + 1}" if params.n > 1 else f"{number + 1}"
        name += f", seed {row.seed}" if row.params.temperature else ""
        out.sentence(f"--- {name}: {names[number]}", style="bold")
        report = _report(decoder, row, debug) | {"seed": row.seed}
        if k:
            results[-1]["alternatives"].append(report)
        else:
            results.append(report | ({"alternatives": []} if params.n > 1 else {}))
    stats = Stats.of((round for row in rows for round in row.rounds), lossless=decoder.lossless)
    _print_stats(decoder, stats, f"{len(rows)} texts")
    return results


def _report(decoder: SpeculativeDecoder, row: Row, debug: bool) -> dict[str, Any]:
    """Print an output, complete or not, and the error if it failed."""
    from slipstream.text.detokenizer import text_of
    from slipstream.text.results import Stats

    text = text_of(row, decoder.tokenizer)
    writer = TextWriter()
    writer.write(text)
    writer.end()
    _show_rounds(decoder, row.rounds, debug)
    details = _report_logprobs(decoder, row.rounds)
    if row.error is not None:
        details["error"] = first_line(row.error)
        err.sentence(f"error: {details['error']}")
    stats = Stats.of(row.rounds, lossless=decoder.lossless)
    reason = row.finish_reason or "interrupted"
    return {"text": text, "token_ids": row.output, "finish_reason": reason, "stats": stats.to_dict()} | details


def _run(decoder: SpeculativeDecoder, rows: Sequence[Row]) -> None:
    """Decode, with a progress bar over the prompts; Ctrl-C ends the run."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    with progress_bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as progress:
        task = progress.add_task("texts", total=len(rows))
        try:
            for round in decoder.run(rows):
                progress.update(task, advance=round.finish_reason is not None)
        except KeyboardInterrupt:
            progress.update(task, description="interrupted")


def _report_logprobs(decoder: SpeculativeDecoder, rounds: Sequence[Round]) -> dict[str, Any]:
    """Print each token's log-probability and the likeliest tokens, if requested, and return them for JSON."""
    from slipstream.text.results import logprobs_dict, with_token_texts

    if all(round.logprobs is None for round in rounds):
        return {}
    reported = with_token_texts([entry for round in rounds for entry in round.logprobs or ()], decoder.tokenizer)
    for entry in reported:
        (token, *top) = map(repr, (entry.token, *entry.top_tokens))
        likeliest = ", ".join(f"{text} {value:.3f}" for text, (_, value) in zip(top, entry.top, strict=True))
        line = f"{entry.logprob:8.3f}  {token}" + (f"  of  {likeliest}" if top else "")
        err.sentence(line)
    return {"logprobs": [logprobs_dict(entry) for entry in reported]}


def _show_rounds(decoder: SpeculativeDecoder, rounds: Sequence[Round], debug: bool) -> None:
    if debug:
        from slipstream.text.round_view import round_lines

        err.sentence(round_lines(rounds, decoder.tokenizer))


def _print_stats(decoder: SpeculativeDecoder, stats: Stats, end: str) -> None:
    from slipstream.text.results import statistics_line

    arithmetic = f", {decoder.target.arithmetic}" if decoder.target.arithmetic else ""
    line = f"{statistics_line(stats, decoder.drafter_name)}{arithmetic}, {end}"
    err.sentence(line, style="dim")
