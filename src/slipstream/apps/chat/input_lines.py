"""What a line typed in a conversation means, and how an unfinished one may go on."""

from __future__ import annotations

from slipstream.apps.chat.conversation import Chat
from slipstream.apps.chat.slash_commands import ALIASES, COMMANDS, find
from slipstream.errors import SlipstreamError, UsageError


def handle(chat: Chat, line: str) -> None:
    """One line of input: a command if it begins with a slash, else what the user says. A failure is one line."""
    text = line.strip()
    try:
        if line.startswith("/"):
            name, *rest = text.split(maxsplit=1)
            _run(chat, name, "".join(rest))
        elif text:
            chat.ask(text)
    except SlipstreamError as error:
        chat.face.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        chat.face.note("interrupted")


def _run(chat: Chat, name: str, argument: str) -> None:
    command = find(name)
    if argument and command.usage in COMMANDS:
        raise UsageError(f"{name} {argument}; allowed: {name} alone")
    command.run(chat, argument)


def complete(text: str) -> list[str]:
    """What the last word of `text`, an unfinished line, may become: a command's name or its first argument."""
    name, space, rest = text.partition(" ")
    if not text.startswith("/") or " " in rest:
        return []
    if not space:
        return [known for known in sorted([*COMMANDS, *ALIASES]) if known.startswith(name)]
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return []
    choices = command.choices() if callable(command.choices) else command.choices
    return [choice for choice in choices if choice.startswith(rest)]
