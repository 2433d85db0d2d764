"""The application, its command `help`, and the models and prompts of all commands."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import drafters
from slipstream.apps.cli.command_classes import WIDTH, Command, Group, unknown_command
from slipstream.apps.cli.consoles import err, print_error
from slipstream.apps.cli.flags import STANDARD, Models, PromptChoice, PromptSource
from slipstream.checks import save_text
from slipstream.config import DecoderConfig
from slipstream.core.limits import check_rule
from slipstream.errors import UsageError
from slipstream.models.paused_collection import paused_collection
from slipstream.models.weights.model_files import NO_DRAFT, quiet
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, named_prompt, parse_prompts, read_prompts

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.requests import Prompt

log = logging.getLogger("slipstream")
PIPE_SECONDS = 5.0  # how long a command waits for the first byte of input that it does not need
SETTINGS = {"max_content_width": WIDTH, "help_option_names": ["-h", "--help", "--help-all"]}
EXAMPLES = (
    "slipstream demo",
    'slipstream generate "Why is the sky blue?"',
    "slipstream chat --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
)
app = typer.Typer(
    name="slipstream",
    cls=Group,
    help="Speculative decoding: any Hugging Face language model generates faster, with the same output. "
    "`slipstream COMMAND --help` explains a command.",
    epilog="\n".join(EXAMPLES),
    context_settings=SETTINGS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def command(name: str, *examples: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`. examples: command lines that end its help."""
    return app.command(name, cls=Command, context_settings=SETTINGS, epilog="\n".join(examples) or None, **more)


@command("help", hidden=True)
def help_command(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="as in `slipstream help chat`")
    ] = None,
) -> None:
    """Explain a command, or list all of them."""
    shown = context.find_root()
    for word in words or ():
        group = shown.command
        if not isinstance(group, Group):
            raise UsageError(f"unexpected argument {word!r}; allowed: slipstream help [COMMAND]")
        subcommand = group.get_command(shown, word)
        if subcommand is None:
            raise unknown_command(group, shown, word)
        shown = subcommand.make_context(word, [], parent=shown, resilient_parsing=True)
    typer.echo(shown.get_help())


def check_config(config: DecoderConfig) -> None:
    """Refuse settings of a decoder that no models take, before any are loaded."""
    if (contradiction := config.contradiction()) is not None:
        raise UsageError(contradiction)
    drafters.check_name(config.drafter)
    if config.acceptance != "auto":
        check_rule(config.acceptance)


def load_decoder(models: Models, config: DecoderConfig, *, is_announced: bool = False) -> SpeculativeDecoder:
    """Load a decoder, announced on a terminal unless the command has done so; warn if its rule is lossy."""
    check_config(config)
    if err.is_terminal and not is_announced:
        announce_loading(models)
    quiet()
    from slipstream.models.weights.gguf_packing import packing_begins

    is_usual = config.dtype == config.device == config.fast == "auto"
    with packing_begins(models.target) if is_usual else nullcontext():
        with paused_collection(), interrupted_at_once():
            from slipstream.decoder import SpeculativeDecoder
        decoder = SpeculativeDecoder(models.target, models.draft, **vars(config))
    if not decoder.lossless:
        warn_lossy(config.acceptance)
    return decoder


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once: an exception in PyTorch's import would abort it with a core dump."""

    def end(*_: object) -> None:
        with suppress(OSError):
            print_error("interrupted")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def draft_name(models: Models, decoder: SpeculativeDecoder) -> str | None:
    """The draft model as the user named it, or the head or MTP layers that the target brings."""
    return None if decoder.draft is None else models.draft or decoder.draft.name


def announce_loading(models: Models) -> None:
    """Announce what is loaded; work done once per machine (download, conversion, calibration) has its own bars."""
    with suppress(OSError):
        err.sentence(loading_message(models), style="dim")


def loading_message(models: Models) -> str:
    """A line about the models that are loaded."""
    draft = f" and {models.draft}" if models.draft not in (None, NO_DRAFT) else ""
    return f"loading {models.target}{draft} ..."


def warn_lossy(acceptance: str) -> None:
    """Warn that an acceptance rule is lossy."""
    log.warning("acceptance %s is lossy: the output is not the target's own", acceptance)


@contextmanager
def interruptible(outcome: Callable[[], str]) -> Iterator[None]:
    """End the program with one line and exit code 130 on Ctrl-C. outcome: says what is saved and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print_error(f"interrupted; {outcome()}")
        raise typer.Exit(130) from None


def prompt_set(choice: PromptChoice) -> list[NamedPrompt]:
    """The prompts of a file, or the package's own."""
    categories = list(choice.category)
    if choice.prompt_file is None:
        return builtin_prompts(categories=categories, limit=choice.limit)
    return prompts_of_file(choice.prompt_file, categories, choice.limit)


def prompts_of_file(path: Path, categories: list[str], limit: int | None) -> list[NamedPrompt]:
    """The prompts of a file; - is standard input."""
    if path != STANDARD:
        return read_prompts(path, categories=categories, limit=limit)
    return parse_prompts(standard_input(), categories, limit)


def gather_prompts(source: PromptSource) -> list[NamedPrompt]:
    """The prompts of the command line or of --prompt-file; without either, standard input if it is not a terminal.

    Piped input is appended to each prompt of the command line: `cat notes.txt | slipstream generate "Summarize:"`.
    """
    texts = [*source.words, *source.prompt]
    if texts and source.prompt_file is not None:
        raise UsageError(
            f"prompt {texts[0]!r:.60} with --prompt-file {str(source.prompt_file)!r}; allowed: one of the two"
        )
    if source.prompt_file is not None:
        return prompts_of_file(source.prompt_file, list(source.category), source.limit)
    if source.category or source.limit is not None:
        raise UsageError("--category and --limit need --prompt-file FILE")
    if texts.count("-") > 1:
        raise UsageError("prompt - is given twice; allowed: once, as standard input can be read only once")
    if not texts and sys.stdin.isatty():
        raise UsageError("no prompt; allowed: a prompt as an argument, text on standard input, or --prompt-file FILE")
    if any(not text.strip() for text in texts):
        raise UsageError("prompt is empty; allowed: a text")
    if texts and "-" not in texts and (piped := piped_input().strip()):
        texts = [f"{text}\n\n{piped}" for text in texts]
    return [
        named_prompt("standard input", standard_input()) if text == "-" else NamedPrompt(text)
        for text in texts or ["-"]
    ]


def piped_input() -> str:
    """Piped or redirected input for a command that can do without; empty if standard input is a device.

    A pipe that stays silent is left alone: scripts and remote shells pass on such pipes.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is no standard input, or it is no file
        return ""
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        # Windows can wait for sockets only
        if os.name == "posix" and not select.select([sys.stdin], [], [], PIPE_SECONDS)[0]:
            err.sentence(
                f"nothing came through standard input for {PIPE_SECONDS:g} seconds: the prompt goes without it"
            )
            return ""
    elif not stat.S_ISREG(mode):
        return ""
    return standard_input()


def standard_input() -> str:
    """All of standard input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # else Python may keep wrong bytes as lone surrogates
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text") from error


def as_request(decoder: SpeculativeDecoder, prompt: NamedPrompt, system: str, answer_start: str = "") -> Prompt:
    """The prompt, with the system message before it and the beginning of the answer after it, if given."""
    if not system and not answer_start:
        return prompt.prompt
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        flag, name = "--system" if system else "--answer-start", decoder.target.name
        raise UsageError(f"{flag} needs a chat template, which {name!r} lacks; allowed: --prompt alone")
    roles = (("system", system), ("user", prompt.prompt), ("assistant", answer_start))
    return [{"role": role, "content": text} for role, text in roles if text or role == "user"]


def params_for(prompt: NamedPrompt, params: SamplingParams) -> SamplingParams:
    """The sampling options with the prompt's own prediction, if it has one."""
    return params if prompt.prediction is None else replace(params, prediction=prompt.prediction)


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Write the full result where --json asks for it; - is standard output."""
    if path is not None:
        write_text("--json", path, json.dumps(value, indent=2) + "\n")


def write_text(flag: str, path: Path, text: str) -> None:
    """Write the file that a flag names; - is standard output."""
    if path == STANDARD:
        sys.stdout.write(text)
    else:
        save_text(flag, path, text)


def demo_data() -> list[dict[str, str]]:
    """The prompts of the demonstration: category, prompt and the reason it is included."""
    data: list[dict[str, str]] = json.loads(
        resources.files("slipstream").joinpath("data/demo.json").read_text(encoding="utf-8")
    )
    return data
