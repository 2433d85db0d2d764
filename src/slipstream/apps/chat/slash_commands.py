"""The slash commands of a conversation, one function each, and a parser of typed lines. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from slipstream import drafters
from slipstream.apps.chat.conversation import Chat, compare, load, save, totals
from slipstream.checks import counted, expanded, why_unreadable
from slipstream.errors import SlipstreamError, UsageError, did_you_mean, one_line
from slipstream.models.weights.model_files import EMBEDDED, list_models
from slipstream.sampling.params import SAMPLED, SamplingParams

KEEP_ALL: dict[str, float] = {name: value for name, value in SamplingParams().unset.items() if name in SAMPLED}
# for each method its numbers, in the order in which they are typed, with their defaults
METHODS: dict[str, dict[str, float]] = {
    "greedy": {},
    "multinomial": {"temperature": 1.0, "min_p": 0.0},
    "topk": {"temperature": 1.0, "top_k": 50, "min_p": 0.0},
    "nucleus": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.0},
    "topknucleus": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.0},
}
NOT_TYPED = ("logits_processors", "constraint", "n", "logprobs", "suffix")
OPTIONS = tuple(f.name for f in fields(SamplingParams) if f.name not in NOT_TYPED)
SWITCH = ("on", "off")
ALIASES = {"/gamma": "/draft-length", "/length-of-draft": "/draft-length", "/exit": "/quit"}


def numbers(method: str, words: Sequence[str]) -> dict[str, Any]:
    """The sampling options of a method; its numbers come in the order of `METHODS` or as NAME=VALUE."""
    meaning = METHODS[method]
    chosen = dict(meaning)
    order = iter(meaning)
    allowed = f"allowed: /sampling {method} [{'] ['.join(meaning)}], each a number or NAME=NUMBER"
    for word in words:
        name, equals, value = word.partition("=")
        name, value = (name, value) if equals else (next(order, ""), word)
        if name not in meaning:
            raise UsageError(f"/sampling {method} {' '.join(words)}; {allowed if meaning else 'allowed: greedy alone'}")
        try:
            chosen[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise UsageError(f"/sampling {method}: {name} {value!r}; {allowed}") from None
    if meaning and chosen["temperature"] == 0:
        raise UsageError(f"/sampling {method}: temperature 0 is greedy; allowed: above 0, or /sampling greedy")
    return KEEP_ALL | chosen


def value_of(name: str, text: str) -> Any:
    """A typed value, read as JSON if possible, else as a string."""
    if text == "none":
        return getattr(SamplingParams(), name)
    try:
        value = json.loads({"on": "true", "off": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return text
    if name == "stop" and not isinstance(value, str | list):
        return text
    if name == "logit_bias" and isinstance(value, dict):  # JSON's keys are text
        return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
    return value


Run = Callable[[Chat, str], None]
Choices = Sequence[str] | Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Command:
    """A slash command: how it is typed, explained, run and completed."""

    usage: str
    help: str
    run: Run  # called with the conversation and the text after the name
    choices: Choices  # for the text after the name


COMMANDS: dict[str, Command] = {}


def _command(usage: str, text: str, choices: Choices = ()) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        COMMANDS[usage.split()[0]] = Command(usage, text, run, choices)
        return run

    return register


def find(name: str) -> Command:
    """The command called `name`, slash included; UsageError suggests similar names if there is none."""
    names = [*COMMANDS, *ALIASES]
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, names, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "/help lists them;"
        raise UsageError(f"unknown command {name!r}; {hint} a message that begins with / needs a space before it")
    return COMMANDS[name]


@cache
def _targets() -> tuple[str, ...]:
    folders = (item["folder"] for item in list_models() if item["name"] != EMBEDDED)
    return ("toy", EMBEDDED, *folders)


def _only(command: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise UsageError(f"/{command} {text}; allowed: {', '.join(allowed)}{did_you_mean(text, *allowed)}")
    return text


@_command("/target MODEL", "answer with another target: hub id, folder, .gguf file, smollm2, toy", _targets)
def _target(chat: Chat, text: str) -> None:
    if text:
        chat.load_target(text)
    chat.display.show(f"target: {chat.decoder.target.name}")


@_command("/draft MODEL|none", "draft with another model, or without one", lambda: ("none", *_targets()))
def _draft(chat: Chat, text: str) -> None:
    if text:
        chat.load_draft(None if text == "none" else text)
    name = "none" if chat.decoder.draft is None else chat.decoder.draft.name
    chat.display.show(f"draft model: {name}, drafter: {chat.decoder.drafter_name}")


@_command("/speculative on|off", "off answers by plain decoding", SWITCH)
def _speculative(chat: Chat, text: str) -> None:
    if text:
        chat.speculative = _only("speculative", text, SWITCH) == "on"
    chat.display.show(f"speculative: {_word(chat.speculative)}, drafter: {chat.active.drafter_name}")


@_command("/drafter NAME", "auto, or a drafter with its argument, such as ngram:5", lambda: ("auto", *drafters.names()))
def _drafter(chat: Chat, text: str) -> None:
    if text:
        chat.decoder = chat.decoder.using(text)
    off = "" if chat.speculative else " (not in use: speculative is off)"
    chat.display.show(f"drafter: {chat.decoder.drafter_name}{off}")


@_command("/draft-length N|auto", "tokens drafted per round; 0 drafts nothing", ("auto",))
def _draft_length(chat: Chat, text: str) -> None:
    if text:
        chat.decoder = chat.decoder.using(num_draft_tokens=int(text) if text.isdecimal() else text)
        chat.params = replace(chat.params, num_draft_tokens=None)
    num_draft_tokens = chat.params.num_draft_tokens
    chat.display.show(
        f"draft length: {chat.decoder.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens}"
    )


@_command("/acceptance RULE", "auto, block, rejection, match, topk:K or typical (the last two are lossy)")
def _acceptance(chat: Chat, text: str) -> None:
    if text:
        chat.decoder = chat.decoder.using(acceptance=text)
    lossy = "" if chat.decoder.lossless else " (lossy: the output is not the target's own)"
    chat.display.show(f"acceptance: {chat.decoder.config.acceptance}{lossy}")


@_command("/length N", "at most N tokens per answer")
def _length(chat: Chat, text: str) -> None:
    _assign(chat, "max_tokens", text)


@_command("/seed N|none", "seed of every answer; none draws one each time", ("none",))
def _seed(chat: Chat, text: str) -> None:
    _assign(chat, "seed", text)


@_command(
    "/sampling METHOD", f"{', '.join(METHODS)}, then temperature, top_k, top_p, min_p as they apply", tuple(METHODS)
)
def _sampling(chat: Chat, text: str) -> None:
    if text:
        method, *words = text.split()
        _only("sampling", method, tuple(METHODS))
        chat.params = replace(chat.params, **numbers(method, words))
    params = chat.decoder.reader.own_options(chat.params)
    chat.display.show(", ".join(f"{name}={getattr(params, name)}" for name in KEEP_ALL))


@_command("/temperature X", "0 is greedy; higher is more random; none is the model's own", ("none",))
def _temperature(chat: Chat, text: str) -> None:
    _assign(chat, "temperature", text)


@_command("/top-p X", "sample from the likeliest tokens of this total probability; none is the model's own", ("none",))
def _top_p(chat: Chat, text: str) -> None:
    _assign(chat, "top_p", text)


@_command("/set NAME VALUE", "any sampling option; lists as JSON; VALUE none is the default", OPTIONS)
def _set(chat: Chat, text: str) -> None:
    name, _, value = text.partition(" ")
    if text:
        _assign(chat, name, value.strip())
    else:
        params = chat.decoder.reader.own_options(chat.params)
        chat.display.show("\n".join(f"{option}: {getattr(params, option)!r}" for option in OPTIONS))


def _assign(chat: Chat, name: str, text: str) -> None:
    _only("set", name, OPTIONS)
    if text:
        chat.params = replace(chat.params, **{name: value_of(name, text)})
    chat.display.show(f"{name}: {getattr(chat.decoder.reader.own_options(chat.params), name)!r}")


@_command("/cache on|off|clear", "how many tokens are cached; off empties it before every answer", (*SWITCH, "clear"))
def _cache(chat: Chat, text: str) -> None:
    if text and _only("cache", text, (*SWITCH, "clear")) != "clear":
        chat.cache = text == "on"
    if text in ("off", "clear"):
        chat.decoder.forget()
    target, draft = chat.decoder.tokens_in_memory()
    counts = f"{target} tokens cached" + (f", the draft model's {draft}" if chat.decoder.draft is not None else "")
    chat.display.show(f"cache: {_word(chat.cache)}; {counts}")


@_command("/debug on|off", "after each answer what was accepted and rejected, round by round", SWITCH)
def _debug(chat: Chat, text: str) -> None:
    if text:
        chat.debug = _only("debug", text, SWITCH) == "on"
    chat.display.show(f"debug: {_word(chat.debug)}")


@_command("/compare", "the last answer again by plain decoding: speeds, and whether the output is the same")
def _compare(chat: Chat, text: str) -> None:
    chat.display.show(compare(chat))


@_command("/stats", "totals of the conversation")
def _stats(chat: Chat, text: str) -> None:
    chat.display.show("\n".join(totals(chat)))


@_command("/reset", "forget the conversation; settings and the system message stay")
def _reset(chat: Chat, text: str) -> None:
    chat.turns.clear()
    chat.earlier.clear()
    chat.display.show("the conversation is empty")


@_command("/thought", "show what the model thought before its last answer")
def _thought(chat: Chat, text: str) -> None:
    chat.display.show(chat.last.thought or "the last answer has no thought")


@_command("/retry", "answer the last question again")
def _retry(chat: Chat, text: str) -> None:
    chat.retry()


@_command("/save FILE", "write the conversation as JSON")
def _save(chat: Chat, text: str) -> None:
    if not text:
        raise UsageError("/save; allowed: /save FILE")
    save(chat, Path(text))
    chat.display.show(f"{counted(len(chat.earlier) + 2 * len(chat.turns), 'message')} written to {text}")


@_command("/load FILE", "go on with a conversation that /save has written")
def _load(chat: Chat, text: str) -> None:
    if not text:
        raise UsageError("/load; allowed: /load FILE")
    load(chat, Path(text))


@_command("/file FILE|none", "send a text file with the next message", ("none",))
def _file(chat: Chat, text: str) -> None:
    if text == "none":
        chat.files.clear()
    elif text:
        path = expanded(text)
        if (guess_type(path.name)[0] or "").startswith("image/") and path.suffix.lower() != ".svg":
            raise UsageError(f"/file {text!r} is a picture; allowed: a text file (`slipstream serve` takes pictures)")
        try:
            chat.files[path.name] = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = why_unreadable(error)
            raise UsageError(f"/file {text!r} cannot be read: {why}; allowed: a file of UTF-8 text") from error
    sizes = ", ".join(f"{name} ({counted(len(content), 'character')})" for name, content in chat.files.items())
    chat.display.show(f"with the next message: {sizes or 'no file'}")


@_command("/system TEXT|none", "what the model is told before the conversation", ("none",))
def _system(chat: Chat, text: str) -> None:
    if text:
        chat.system = "" if text == "none" else text
    chat.display.show(f"system: {chat.system or 'none'}")


@_command("/help [COMMAND]", "this list", lambda: tuple(COMMANDS))
def _help(chat: Chat, text: str) -> None:
    chosen = [find("/" + text.removeprefix("/"))] if text else list(COMMANDS.values())
    chat.display.show_pairs([(command.usage, command.help) for command in chosen])


@_command("/quit", "leave")
def _quit(chat: Chat, text: str) -> None:
    chat.closed = True


def _word(on: bool) -> str:
    return "on" if on else "off"


def handle(chat: Chat, line: str) -> None:
    """Handle a line of input: a command if it begins with a slash, else a message. A failure is one line."""
    text = line.strip()
    try:
        if line.startswith("/"):
            name, *rest = text.split(maxsplit=1)
            command, argument = find(name), "".join(rest)
            if argument and command.usage in COMMANDS:
                raise UsageError(f"{name} {argument}; allowed: {name} alone")
            command.run(chat, argument)
        elif text:
            chat.send(text)
    except SlipstreamError as error:
        chat.display.error(one_line(error))
    except KeyboardInterrupt:
        chat.display.remark("interrupted")


def complete(text: str) -> list[str]:
    """Completions of the last word of `text`, an unfinished line: a command's name or its first argument."""
    name, space, rest = text.partition(" ")
    if not text.startswith("/") or " " in rest:
        return []
    if not space:
        return [command_name for command_name in sorted([*COMMANDS, *ALIASES]) if command_name.startswith(name)]
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return []
    choices = command.choices() if callable(command.choices) else command.choices
    return [choice for choice in choices if choice.startswith(rest)]
