"""`slipstream chat`: a conversation at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.live import Live
from rich.text import Text

from slipstream.apps.chat.markdown_stream import MarkdownStream
from slipstream.apps.cli.application import announce_loading, command, load_decoder
from slipstream.apps.cli.command_classes import definition_lines
from slipstream.apps.cli.consoles import err, out, print_error, write_raw
from slipstream.apps.cli.flags import (
    PROMPTS,
    AnswerStart,
    Models,
    Structure,
    TemplateKwargs,
    flags,
    json_object,
    option,
)
from slipstream.checks import counted
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError, os_reason
from slipstream.models.cache_folder import cache_folder
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.tokenizer import check_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from slipstream.apps.chat.conversation import Chat

HOW_TO_LEAVE = "Ctrl-D or /quit leaves"
THOUGHT_SHOWN = 400  # characters of a thought that are shown while the model thinks
KEYS = f"/help lists the commands, Alt-Enter begins a new line, Ctrl-C stops an answer, {HOW_TO_LEAVE}"


@command(
    "chat",
    "slipstream chat",
    "slipstream chat --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    """slipstream chat --system "Be brief." --chat-template-kwargs '{"enable_thinking": false}'""",
)
@flags(Models, DecoderConfig, SamplingParams, Structure, also=("prediction",))
def chat_command(
    models: Models,
    config: DecoderConfig,
    params: SamplingParams,
    system: Annotated[str, option(PROMPTS, "--system", "system message before the conversation", "TEXT")] = "",
    answer_start: AnswerStart = "",
    template_kwargs: TemplateKwargs = "{}",
    history: Annotated[
        Path | None,
        option(PROMPTS, "--history", "file of typed lines; default: in the cache folder", "FILE"),
    ] = None,
    no_history: Annotated[
        bool, option(PROMPTS, "--no-history", "keep neither typed lines nor the conversation on disk")
    ] = False,
    goes_on: Annotated[
        bool, option(PROMPTS, "--continue", "go on with the last conversation that was typed at a terminal")
    ] = False,
) -> None:
    """Talk with a model; /help lists the commands."""
    check_text("--system", system)
    check_text("--answer-start", answer_start)
    variables = json_object("--chat-template-kwargs", template_kwargs)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if no_history and history is not None:
        raise UsageError(f"--no-history with --history {str(history)!r}; allowed: one of them")
    last = cache_folder() / "last_conversation.json"
    if goes_on and not last.exists():
        raise UsageError(f"--continue: there is no {str(last)!r}; allowed: after an answer without --no-history")
    file = history or cache_folder() / "chat_history"
    if at_terminal and not no_history:
        _check_history(file)
    session = _session(None if no_history else file) if at_terminal else None
    screen = Screen()
    try:
        if not err.is_terminal:
            announce_loading(models)
        decoder = load_decoder(models, config)
        from slipstream.apps.chat.conversation import Chat, load

        conversation = Chat(decoder, screen, params, system, answer_start, variables)
        if goes_on:
            load(conversation, last)
            conversation.system = system or conversation.system
        if at_terminal and not no_history:
            last.parent.mkdir(parents=True, exist_ok=True)
            conversation.kept_in = last
        _converse(conversation, screen, session)
    finally:
        screen.close()


def _converse(conversation: Chat, screen: Screen, session: PromptSession[str] | None) -> None:
    """Answer lines until the user leaves. session: reads lines at a terminal; None if they come from a pipe."""
    from slipstream.apps.chat.slash_commands import handle

    if session is not None:
        screen.remark(f"{conversation.decoder.target.name}, drafter {conversation.decoder.drafter_name}; {KEYS}")
    for line in _piped() if session is None else _lines(session):
        handle(conversation, line)
        if conversation.closed:
            break


class Screen:
    """Writes answers and requested information to standard output, everything else to standard error.

    On a terminal answers are rendered as Markdown, and what the model thinks is folded into one line once it answers;
    in a pipe answers stay as the model wrote them, without thoughts.
    """

    def __init__(self) -> None:
        self._answer: MarkdownStream | None = None
        self._thought = ""
        self._thinking = Live(console=out, auto_refresh=False, transient=True)

    def thought(self, text: str) -> None:
        if not out.is_terminal:
            return
        self._thought += text
        self._thinking.start()
        self._thinking.update(Text(self._thought[-THOUGHT_SHOWN:].strip(), "dim italic"), refresh=True)

    def token(self, text: str) -> None:
        if not out.is_terminal:
            write_raw(text)
            return
        self._fold()
        if self._answer is None:
            self._answer = MarkdownStream(out)
        self._answer.write(text)

    def _fold(self) -> None:
        if self._thought:
            self._thinking.update("", refresh=True)
            self._thinking.stop()
            out.sentence(f"Thought: {counted(len(self._thought.split()), 'word')}; /thought shows them", style="dim")
            self._thought = ""

    def close(self) -> None:
        """End the answer, so that what follows begins on a new line."""
        self._fold()
        if self._answer is not None:
            self._answer.end()
            self._answer = None

    def show(self, line: str | Text) -> None:
        self.close()
        out.sentence(line)

    def show_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.close()
        for line in definition_lines(pairs, out.width):
            out.print(line, soft_wrap=True)

    def remark(self, line: str) -> None:
        self.close()
        err.sentence(line, style="dim")

    def error(self, line: str) -> None:
        self.close()
        print_error(line)


def _piped() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not valid UTF-8; allowed: lines of UTF-8 text") from error


def _check_history(history: Path) -> None:
    """Refuse an unwritable history before models are loaded."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(0o600)
        history.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(f"--history {str(history)!r} cannot be written: {os_reason(error)}") from error


def _lines(session: PromptSession[str]) -> Iterator[str]:
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            err.print(Text(HOW_TO_LEAVE, "dim"))
        except EOFError:
            return


def _session(history: Path | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            from slipstream.apps.chat.slash_commands import complete  # which imports the models' code

            text = document.text_before_cursor
            for word in complete(text):
                yield Completion(word, start_position=-len(text.rpartition(" ")[2]))

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        completer=Commands(),
        key_bindings=keys,
        prompt_continuation="  ",
    )
