"""`slipstream chat`: a conversation at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from slipstream.apps.chat.markdown_stream import MarkdownStream
from slipstream.apps.cli.application import announce_loading, command, config_from, load_decoder
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
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError, os_reason
from slipstream.models.cache_folder import cache_folder
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.tokenizer import check_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from slipstream.apps.chat.conversation import Chat

LENGTH = 512  # tokens per answer
HOW_TO_LEAVE = "Ctrl-D or /quit leaves"
KEYS = f"/help lists the commands, Alt-Enter begins a new line, Ctrl-C stops an answer, {HOW_TO_LEAVE}"


@command(
    "chat",
    "slipstream chat",
    "slipstream chat --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    """slipstream chat --system "Be brief." --chat-template-kwargs '{"enable_thinking": false}'""",
)
@flags(Models, DecoderConfig, SamplingParams, Structure, also=("prediction",), max_tokens=LENGTH)
def chat_command(
    models: Models,
    config: DecoderConfig,
    params: SamplingParams,
    structure: Structure,
    system: Annotated[
        str, option(PROMPTS, "--system", text="system message before the conversation", metavar="TEXT")
    ] = "",
    answer_start: AnswerStart = "",
    template_kwargs: TemplateKwargs = "{}",
    history: Annotated[
        Path | None,
        option(PROMPTS, "--history", text="file of typed lines; default: in the cache folder", metavar="FILE"),
    ] = None,
) -> None:
    """Talk with a model; /help lists the commands."""
    config = config_from(config, models.config_file)
    params = structure.added_to(params)
    check_text("--system", system)
    check_text("--answer-start", answer_start)
    variables = json_object("--chat-template-kwargs", template_kwargs)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    file = history or cache_folder() / "chat_history"
    if at_terminal:
        _check_terminal(file)
    screen = Screen()
    try:
        if not err.is_terminal:
            announce_loading(models)
        decoder = load_decoder(models, config)
        from slipstream.apps.chat.conversation import Chat

        conversation = Chat(decoder, screen, params, system, answer_start, variables)
        _converse(conversation, screen, file if at_terminal else None)
    finally:
        screen.close()


def _converse(conversation: Chat, screen: Screen, history: Path | None) -> None:
    """Answer lines until the user leaves. history: file of lines typed at a terminal; None if they come from a pipe."""
    from slipstream.apps.chat.slash_commands import complete, handle

    if history is not None:
        screen.remark(f"{conversation.decoder.target.name}, drafter {conversation.decoder.drafter_name}; {KEYS}")
    for line in _piped() if history is None else _lines(_session(history, complete)):
        handle(conversation, line)
        if conversation.closed:
            break


class Screen:
    """Writes answers and requested information to standard output, everything else to standard error.

    On a terminal answers are rendered as Markdown; in a pipe they stay as the model wrote them.
    """

    def __init__(self) -> None:
        self._answer: MarkdownStream | None = None

    def token(self, text: str) -> None:
        if not out.is_terminal:
            write_raw(text)
            return
        if self._answer is None:
            self._answer = MarkdownStream(out)
        self._answer.write(text)

    def close(self) -> None:
        """End the answer."""
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


def _check_terminal(history: Path) -> None:
    """Refuse a missing package or an unwritable history before models are loaded."""
    if find_spec("prompt_toolkit") is None:
        raise SlipstreamError("chat at a terminal needs prompt_toolkit; run: pip install prompt_toolkit")
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
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
        history=FileHistory(str(history)), completer=Commands(), key_bindings=keys, prompt_continuation="  "
    )
