"""What the commands share: the application, its consoles, and how models and prompts are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from slipstream import drafters
from slipstream.apps.cli.command import SETTINGS, Command, Group
from slipstream.apps.cli.options import Models, PromptChoice, PromptSource
from slipstream.apps.cli.output_files import write_text
from slipstream.config import DecoderConfig
from slipstream.core.rule_names import check_rule, rule_names
from slipstream.errors import UsageError
from slipstream.models.paused_collection import paused_collection
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, named_prompt, read_prompts
from slipstream.text.terminal_text import harmless

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.requests import Prompt

app = typer.Typer(
    name="slipstream",
    cls=Group,
    help="Speculative decoding: any Hugging Face language model generates faster, and the text stays the same.",
    epilog="`slipstream COMMAND --help` lists the options; `slipstream demo` is a good beginning.",
    context_settings=SETTINGS,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Stream(Console):
    """A console that leaves a closed pipe to its caller, as every other failure to write.

    Texts are never markup, and control characters in them become pictures: see `harmless`.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is printed, before it gets its colours."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error that is being handled."""
        raise


# output that goes to a file or a pipe is not folded at 80 columns
out = Stream(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 120)
err = Stream(stderr=True, highlight=False, emoji=False, markup=False, width=None if sys.stderr.isatty() else 120)


def print_text(text: str, end: str = "\n") -> None:
    """A text as the model wrote it where it goes to a file or a pipe; a terminal gets no control characters."""
    out.file.write((harmless(text) if out.is_terminal else text) + end)  # rich would expand tabs and drop others
    out.file.flush()


def print_error(message: str) -> None:
    """Why something was not done, in one line."""
    err.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True)


def command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`."""
    return app.command(name, cls=Command, context_settings=SETTINGS)


def quiet_libraries() -> None:
    """Only our own notes reach the user, not the libraries' advice to developers. Imports transformers."""
    from slipstream.models.hf.model_files import quiet

    quiet()


def load_decoder(models: Models, config: DecoderConfig) -> SpeculativeDecoder:
    """The decoder of these models under these settings; a lossy rule is announced."""
    if (useless := config.contradiction()) is not None:
        raise UsageError(useless)
    drafters.check_name(config.drafter)
    if config.acceptance != "auto":
        check_rule(config.acceptance, rule_names())
    quiet_libraries()
    with paused_collection():
        from slipstream.decoder import SpeculativeDecoder
    decoder = SpeculativeDecoder(models.target, models.draft, **vars(config))
    if not decoder.lossless:
        warn_lossy(config.acceptance)
    return decoder


def warn_lossy(acceptance: str) -> None:
    """Say that an acceptance rule is lossy."""
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
    """What the decoder is asked: the prompt, behind the system message if there is one."""
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
    data: list[dict[str, str]] = json.loads(resources.files("slipstream").joinpath("data/demo.json").read_text())
    return data
