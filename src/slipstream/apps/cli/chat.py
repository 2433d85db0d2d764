"""`slipstream chat`: a conversation at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from slipstream.apps.chat.conversation import Chat
from slipstream.apps.chat.input_lines import complete, handle
from slipstream.apps.cli.common import ConfigFile, DraftModel, Target, app, err, load_decoder, out
from slipstream.apps.cli.flags import flags
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.hf.model_files import EMBEDDED
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

LENGTH = 512  # tokens per answer
HOW_TO_LEAVE = "Ctrl-D or /quit leaves"
KEYS = f"/help lists the commands, Alt-Enter begins a new line, Ctrl-C stops an answer, {HOW_TO_LEAVE}"

System = Annotated[str, typer.Option("--system", help="what the model is told before the conversation")]
BatchProcessor = Annotated[
    Path | None, typer.Option("--history", help="file of lines typed before; default: in the cache folder")
]


@app.command()
@flags(DecoderConfig, SamplingParams, max_tokens=LENGTH)
def chat(
    config: DecoderConfig,
    params: SamplingParams,
    target: Target = EMBEDDED,
    draft: DraftModel = None,
    system: System = "",
    history: BatchProcessor = None,
    config_file: ConfigFile = None,
) -> None:
    """Talk with a model; /help lists the commands."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    lines = _typed(history or cache_folder() / "chat_history") if at_terminal else _piped()
    screen = Screen()
    screen.note(f"loading {target}{f' and {draft}' if draft else ''} ...")
    conversation = Chat(load_decoder(target, draft, config, config_file), screen, params, system)
    if at_terminal:
        screen.note(f"{target}, drafter {conversation.decoder.drafter_name}; {KEYS}")
    for line in lines:
        handle(conversation, line)
        if conversation.closed:
            break


class Screen:
    """Answers, and what was asked for, on standard output; everything else on standard error."""

    def piece(self, text: str) -> None:
        """A part of the answer, as it is."""
        out.print(Text(text), end="", soft_wrap=True)

    def say(self, line: str | Text) -> None:
        """What the user asked to see."""
        out.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)

    def note(self, line: str) -> None:
        """A remark, dim."""
        err.print(Text(line, "dim"), soft_wrap=True)

    def error(self, line: str) -> None:
        """Why something was not done."""
        err.print(Text.assemble(("error: ", "red"), line), soft_wrap=True)


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _typed(history: Path) -> Iterator[str]:
    """Lines with editing, completion and history; refuses at once what would only fail later."""
    if find_spec("prompt_toolkit") is None:
        raise SlipstreamError("chat at a terminal needs prompt_toolkit; run: pip install prompt_toolkit")
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.open("a").close()
    except OSError as error:
        raise UsageError(f"--history {str(history)!r} cannot be written: {error.strerror}") from error
    return _lines(_session(history, complete))


def _lines(session: PromptSession[str]) -> Iterator[str]:
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            err.print(Text(HOW_TO_LEAVE, "dim"))
        except EOFError:
            return


def _session(history: Path, candidates: Callable[[str], list[str]]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            text = document.text_before_cursor
            for word in candidates(text):
                yield Completion(word, start_position=-len(text.rpartition(" ")[2]))

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=FileHistory(str(history)),
        completer=Commands(),
        key_bindings=keys,
        prompt_continuation="  ",
    )
