"""The application: its consoles, how its commands and their help look, and how models and prompts are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from slipstream import drafters
from slipstream.apps.cli.flags import Models, PromptChoice, PromptSource
from slipstream.apps.cli.output_files import write_text
from slipstream.config import DecoderConfig
from slipstream.core.rule_names import check_rule
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.paused_collection import paused_collection
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, named_prompt, read_prompts
from slipstream.text.terminal_text import harmless

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.requests import Prompt

WIDTH = 100  # columns of help
SETTINGS = {"max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
COMMANDS = {
    "Generate text": ("generate", "chat", "serve", "batch"),
    "Check": ("demo", "compare", "verify", "models", "doctor"),
    "Measure": ("bench", "sweep", "tune", "simulate", "report"),
}
MODULES = {"batch": "batch_requests"}  # of commands whose name another module has
NUMBERS = {"a valid integer": "a whole number", "a valid number": "a number"}


class Command(TyperCommand):
    """A command whose help has the sections that its options name (`rich_help_panel`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; the message about a wrong value repeats the value."""
        words = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            values = [] if error.param is None else _values(words, error.param.opts)
            if not values or error.param is None:
                raise
            allowed = error.message.removeprefix("Input should be ").partition(",")[0]
            name, value = max(error.param.opts, key=len), " ".join(values)
            raise UsageError(f"{name} {value!r}; allowed: {NUMBERS.get(allowed, allowed)}") from error

    def invoke(self, ctx: Any) -> Any:
        """Run; one line says so if the reader closes the output, as `head` does."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise SlipstreamError("standard output was closed before everything was written") from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections in the order in which their first options come."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            usual = "Arguments" if option.param_type_name == "argument" else "Options"
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(option, "rich_help_panel", None) or usual, []).append(record)
        _write(formatter, sections)


class Group(TyperGroup):
    """The list of commands, in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first sentences of their help."""
        grouped = {name for names in COMMANDS.values() for name in names}
        others = {"Commands": tuple(name for name in self.list_commands(ctx) if name not in grouped)}
        for title, names in (COMMANDS | others).items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            lines = [(name, command.get_short_help_str(WIDTH)) for name, command in commands if command is not None]
            if lines:
                _write(formatter, {title: lines})


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, lines in sections.items():
        with formatter.section(title):
            formatter.write_dl(lines)


def _values(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """All values of an option on the command line, from `--name value` and `--name=value`."""
    values = []
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name in names and (equals or i + 1 < len(args)):
            values.append(value if equals else args[i + 1])
    return values


app = typer.Typer(
    name="slipstream",
    cls=Group,
    help="Speculative decoding: any Hugging Face language model generates faster, and the text stays the same.",
    epilog="`slipstream COMMAND --help` lists the usual options, `--help-all` every one; "
    "`slipstream demo` is a good beginning.",
    context_settings=SETTINGS,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Stream(Console):
    """A console that raises when its pipe is closed, as for any other failure to write.

    Texts are never markup, and their control characters become pictures: see `harmless`.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, without control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error that is being handled."""
        raise


# output that goes to a file or a pipe is not folded at 80 columns
out = Stream(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 120)
err = Stream(stderr=True, highlight=False, emoji=False, markup=False, width=None if sys.stderr.isatty() else 120)


def print_text(text: str, end: str = "\n") -> None:
    """Print a text as the model wrote it; without control characters on a terminal."""
    out.file.write((harmless(text) if out.is_terminal else text) + end)  # rich would expand tabs and drop others
    out.file.flush()


def print_error(message: str) -> None:
    """Print an error in one line."""
    err.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True)


def command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`."""
    return app.command(name, cls=Command, context_settings=SETTINGS)


def quiet_libraries() -> None:
    """Silence the libraries' advice to developers. Imports transformers."""
    from slipstream.models.weights.model_files import quiet

    quiet()


def load_decoder(models: Models, config: DecoderConfig) -> SpeculativeDecoder:
    """Load a decoder; warn if its rule is lossy."""
    if (useless := config.contradiction()) is not None:
        raise UsageError(useless)
    drafters.check_name(config.drafter)
    if config.acceptance != "auto":
        check_rule(config.acceptance)
    quiet_libraries()
    with paused_collection():
        from slipstream.decoder import SpeculativeDecoder
    decoder = SpeculativeDecoder(models.target, models.draft, **vars(config))
    if not decoder.lossless:
        warn_lossy(config.acceptance)
    return decoder


def warn_lossy(acceptance: str) -> None:
    """Warn that an acceptance rule is lossy."""
    err.print(f"acceptance {acceptance} is lossy: the text is not the target's own", style="yellow")


def config_from(flags: DecoderConfig, file: Path | None, defaults: DecoderConfig | None = None) -> DecoderConfig:
    """The settings of --config, or those of the flags. defaults: the command's own, for both; None: the class's."""
    if file is None:
        return flags
    if flags != (defaults or DecoderConfig()):
        raise UsageError("--config replaces the decoder's flags; allowed: one or the other")
    return DecoderConfig.from_json(file, defaults)


def prompt_set(choice: PromptChoice) -> list[NamedPrompt]:
    """The prompts of a file, or the package's own."""
    categories = list(choice.category)
    if choice.prompt_file is None:
        return builtin_prompts(categories=categories, limit=choice.limit)
    return read_prompts(choice.prompt_file, categories=categories, limit=choice.limit)


def gather_prompts(source: PromptSource) -> list[NamedPrompt]:
    """The prompts of --prompt or of --prompt-file."""
    if bool(source.prompt) == (source.prompt_file is not None):
        raise UsageError("prompts come from --prompt or from --prompt-file; allowed: exactly one of them")
    if source.prompt_file is not None:
        return read_prompts(source.prompt_file, categories=list(source.category), limit=source.limit)
    if source.category or source.limit is not None:
        raise UsageError("--category and --limit choose from a --prompt-file; allowed: together with one")
    if source.prompt.count("-") > 1:
        raise UsageError("--prompt - is given twice; allowed: once, as standard input can be read only once")
    return [
        named_prompt("--prompt -", standard_input()) if text == "-" else NamedPrompt(text) for text in source.prompt
    ]


def standard_input() -> str:
    """All of standard input."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text") from error


def as_request(decoder: SpeculativeDecoder, prompt: NamedPrompt, system: str) -> Prompt:
    """The prompt, after the system message if there is one."""
    if not system:
        return prompt.prompt
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UsageError(
            f"--system needs a chat template, which {decoder.target.name!r} lacks; allowed: --prompt alone"
        )
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt.prompt}]


def params_for(prompt: NamedPrompt, params: SamplingParams) -> SamplingParams:
    """The options with the prompt's own prediction, if it has one."""
    return params if prompt.prediction is None else replace(params, prediction=prompt.prediction)


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Write the full result where --json asks for it."""
    if path is not None:
        write_text("--json", path, json.dumps(value, indent=2) + "\n")


def demo_data() -> list[dict[str, str]]:
    """The prompts of the demonstration: category, prompt and why it is in."""
    data: list[dict[str, str]] = json.loads(
        resources.files("slipstream").joinpath("data/demo.json").read_text(encoding="utf-8")
    )
    return data
