"""The `slipstream` command. Commands parse flags, call the library and print; they contain no logic of their own."""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer.exceptions import TyperException

from slipstream import show
from slipstream.backends.files import EMBEDDED, embedded_model, list_models
from slipstream.cli_options import flags
from slipstream.compare import BATCH, SPECULATIVE, Comparison, compare, compare_batch, summarise
from slipstream.config import DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.negative_controls import load_wrong_rule
from slipstream.params import SamplingParams
from slipstream.prompts import NamedPrompt, read_prompts
from slipstream.stats import Stats
from slipstream.text import visible_text
from slipstream.types import Round, SlipstreamError, UsageError
from slipstream.verify import Verifier
from slipstream.version import __version__

app = typer.Typer(
    name="slipstream",
    help="Speculative decoding that changes the speed of a language model and nothing else.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# output that goes to a file or a pipe is not folded at 80 columns
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)

Target = Annotated[str, typer.Option("--target", help="hub id, folder, .gguf file, smollm2 (default model) or toy")]
DraftModel = Annotated[str | None, typer.Option("--draft", help="draft model, named like the target")]
PromptTexts = Annotated[list[str], typer.Option("-p", "--prompt", help="prompt; may be given several times")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="a text, or .jsonl with a prompt per line")]
Category = Annotated[list[str], typer.Option("--category", help="only these categories of a .jsonl file")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="at most this many prompts of each category")]
Json = Annotated[Path | None, typer.Option("--json", help="write the full result to this file")]
Raw = Annotated[bool, typer.Option("--raw", help="no chat template around the prompts")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="decoder settings as JSON, instead of their flags")]


def _decoder(target: str, draft: str | None, config: DecoderConfig, config_file: Path | None) -> SpeculativeDecoder:
    if config_file is not None:
        if config != DecoderConfig():
            raise UsageError("--config replaces the decoder's flags; allowed: one or the other")
        config = DecoderConfig.from_json(config_file)
    decoder = SpeculativeDecoder(target, draft, **vars(config))
    if not decoder.lossless:
        show.lossy_warning(err, config.acceptance)
    return decoder


def _prompts(texts: list[str], file: Path | None, category: list[str], limit: int | None) -> list[NamedPrompt]:
    if bool(texts) == (file is not None):
        raise UsageError("prompts come from --prompt or from --prompt-file; allowed: exactly one of them")
    if file is not None:
        return read_prompts(file, categories=category, limit=limit)
    if category or limit:
        raise UsageError("--category and --limit choose from a --prompt-file; allowed: together with one")
    return [NamedPrompt(text) for text in texts]


def _write_json(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--json {str(path)!r} cannot be written: {error.strerror}") from error


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
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Generate text; one prompt streams, several run as a batch."""
    prompts = _prompts(prompt, prompt_file, category, limit)
    decoder = _decoder(target, draft, config, config_file)
    if len(prompts) == 1:
        results = [_stream(decoder, prompts[0], params, chat=not raw)]
    else:
        results = _batch(decoder, prompts, params, chat=not raw)
    _write_json(json_file, {"target": target, "draft": draft, "results": results})


def _batch(
    decoder: SpeculativeDecoder, prompts: list[NamedPrompt], params: SamplingParams, *, chat: bool
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
    _print_stats(decoder, Stats.of([done for own in rounds for done in own]), f"{len(prompts)} texts")
    return results


def _print_stats(decoder: SpeculativeDecoder, stats: Stats, end: str) -> None:
    rate, efficiency = show.percent(stats.acceptance_rate), f"{stats.block_efficiency:.2f}"
    speed = f"{stats.num_output_tokens} tokens, {stats.tokens_per_second:.1f} tok/s"
    err.print(f"[dim]{speed}, {decoder.drafter_name}: acceptance rate {rate}, block efficiency {efficiency}, {end}[/]")


def _stream(decoder: SpeculativeDecoder, prompt: NamedPrompt, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """Print as it comes; Ctrl-C ends the text, not the report."""
    chunks, interrupted = [], False
    try:
        for chunk in decoder.stream(prompt.prompt, params, chat=chat):
            chunks.append(chunk)
            out.print(chunk.text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    out.print()
    stats = Stats.of([c.round for c in chunks], lossless=decoder.lossless)
    reason = "interrupted" if interrupted or not chunks else chunks[-1].round.finish_reason
    _print_stats(decoder, stats, f"ended by {reason}")
    return {
        "text": "".join(c.text for c in chunks),
        "token_ids": [token for c in chunks for token in c.token_ids],
        "finish_reason": reason,
        "stats": stats.to_dict(),
    }


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
    hf: Annotated[bool, typer.Option("--hf", help="also run Hugging Face `generate` (greedy only)")] = False,
    batch: Annotated[bool, typer.Option("--batch", help="also run all prompts as a batch against one by one")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm; times are medians")] = 1,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """Plain against speculative decoding in one run: same text? how much faster? Exit code 1 if a text is wrong."""
    prompts = _prompts(prompt, prompt_file, category, limit)
    decoder = _decoder(target, draft, config, config_file)
    done = []
    for comparison in compare(decoder, prompts, params, chat=not raw, with_hf=hf, repeats=repeats):
        done.append(comparison)
        _print_progress(decoder, comparison, len(done), len(prompts))
    summary = summarise(done)
    if batch:
        summary[BATCH] = compare_batch(decoder, done, params, chat=not raw)
    out.print(show.comparison_table(done), show.summary_table(summary), show.time_split(summary["stats"]))
    _write_json(json_file, _report(decoder, target, draft, params, done, summary))
    _fail_on_difference(decoder, params, summary)


def _print_progress(decoder: SpeculativeDecoder, done: Comparison, number: int, total: int) -> None:
    result = done.runs[SPECULATIVE].result
    assert result is not None
    err.print(f"[bold]{number}/{total} {done.prompt.category}[/] {done.speed_up(SPECULATIVE):.2f}x")
    if decoder.tokenizer is not None:
        err.print(show.coloured(result, decoder.tokenizer, limit=400))
    if number == total:
        err.print(show.LEGEND)


def _report(
    decoder: SpeculativeDecoder,
    target: str,
    draft: str | None,
    params: SamplingParams,
    done: list[Comparison],
    summary: dict[str, Any],
) -> dict[str, Any]:
    import torch

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
                    arm: {"token_ids": run.token_ids, "seconds": run.seconds, "verdict": show.verdict(run.difference)}
                    for arm, run in c.runs.items()
                },
            }
            for c in done
        ],
    }


def _fail_on_difference(decoder: SpeculativeDecoder, params: SamplingParams, summary: dict[str, Any]) -> None:
    """Greedy texts of a lossless rule must agree; sampled ones agree only where the rule couples them."""
    wrong = summary["arms"][SPECULATIVE]["different"]
    if wrong and decoder.lossless and params.temperature == 0:
        raise SlipstreamError(f"{wrong} of {summary['prompts']} texts differ from plain decoding and are no ties")


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="tokens per text")] = 96,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="runs of each arm; times are medians")] = 3,
    json_file: Json = None,
) -> None:
    """The main job on the embedded default model: plain against speculative, side by side."""
    data = _demo_data()
    prompts = [NamedPrompt(item["prompt"], item["category"]) for item in data]
    err.print("SmolLM2-135M-Instruct on this machine; drafts come from the prompt and the text so far")
    decoder = SpeculativeDecoder(EMBEDDED, drafter="ngram")
    params = SamplingParams(max_tokens=max_tokens)
    assert decoder.tokenizer is not None
    done = []
    for comparison in compare(decoder, prompts, params, repeats=repeats):
        done.append(comparison)
        out.print(show.side_by_side(comparison, decoder.tokenizer))
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
    _write_json(json_file, _report(decoder, EMBEDDED, None, params, done, summary))
    _fail_on_difference(decoder, params, summary)


@app.command()
@flags(DecoderConfig)
def verify(
    config: DecoderConfig,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    prompt_file: PromptFile = None,
    category: Category = [],  # noqa: B006
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="length of the compared texts")] = 48,
    budget: Annotated[float, typer.Option("--budget", min=1, help="seconds to aim for")] = 120.0,
    wrong_rule: Annotated[str | None, typer.Option("--wrong-rule", hidden=True)] = None,
    config_file: ConfigFile = None,
    json_file: Json = None,
) -> None:
    """The certificate: is the text exactly the target's own? Exit code 1 if any check fails."""
    if prompt_file is None:
        prompts = [NamedPrompt(item["prompt"], item["category"]) for item in _demo_data()]
    else:
        prompts = read_prompts(prompt_file, categories=category, limit=limit)
    decoder = _decoder(target, draft, config, config_file)
    if wrong_rule is not None:
        decoder = decoder.using(acceptance=load_wrong_rule(wrong_rule))
    checks = []
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as progress:
        verifier = Verifier(decoder, prompts, max_tokens, budget)
        task = progress.add_task("verifying", total=verifier.num_checks)
        for check in verifier.run():
            checks.append(check)
            progress.update(task, advance=1, description=check.name)
    out.print(show.certificate(checks))
    failed = [check for check in checks if not check.passed]
    settings = f"{target}, drafter {decoder.drafter_name}, acceptance {decoder.config.acceptance}"
    mode = "reproducible: texts must be bit-identical" if decoder.reproducible else "not reproducible: ties are allowed"
    result = "FAILED" if failed else "VERIFIED"
    out.print(f"[bold {'red' if failed else 'green'}]{result}[/] {settings} ({mode})", soft_wrap=True)
    report = {"target": target, "draft": draft, "config": vars(decoder.config), "verified": not failed}
    _write_json(json_file, report | {"checks": [vars(check) for check in checks]})
    if failed:
        raise SlipstreamError(f"not exact: {failed[0].name}: {failed[0].detail}")


def _demo_data() -> list[dict[str, str]]:
    data: list[dict[str, str]] = json.loads(resources.files("slipstream").joinpath("data/demo.json").read_text())
    return data


@app.command()
def models(
    fetch: Annotated[bool, typer.Option("--fetch", help="fetch and convert the embedded default model")] = False,
    json_file: Json = None,
) -> None:
    """List the models in the local cache; --fetch gets the embedded default."""
    if fetch:
        embedded_model()
    found = list_models()
    for item in found:
        out.print(f"{item['name']:24} {item['architecture']:28} {item['gigabytes']:.2f} GB  {item['folder']}")
    if not found:
        out.print("no models in the cache; 'slipstream models --fetch' gets the default one")
    _write_json(json_file, {"models": found})


@app.callback(invoke_without_command=True)
def _common(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def _quiet_libraries() -> None:
    """Only our own notes reach the user; the libraries' advice to developers does not."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    logging.getLogger("slipstream").setLevel(logging.INFO)
    from slipstream.backends.files import quiet

    quiet()


def main() -> None:
    """Run the command; every failure is one line on standard error and an exit code (2 wrong use, 1 failure)."""
    _quiet_libraries()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TyperException as error:
        _exit(str(error.format_message()), error.exit_code)
    except UsageError as error:
        _exit(str(error), 2)
    except SlipstreamError as error:
        _exit(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _exit("interrupted", 130)


def _exit(message: str, code: int) -> None:
    err.print(f"[red]error:[/] {' '.join(message.split())}", soft_wrap=True)
    sys.exit(code)
