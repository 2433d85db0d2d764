"""Separates an answer into thoughts, text and tool calls, as its text comes.

An answer fed in pieces gives the same as one fed whole. Whatever cannot be read is text, so nothing is lost: the
sources of all pieces together are the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, cast

import regex

from slipstream.tokenization.answer_forms import AnswerForm, CallForm
from slipstream.tokenization.tokenizer import ToolCall

Kind = Literal["thought", "text", "call"]
KEPT = 4096  # characters that were read, before they are forgotten
CAN_END_CALLS = re.compile(r"[}\])>]")
SPACE = re.compile(r"\s*")
SURROGATE = re.compile(r"\\ud[89a-f]")  # as `json.dumps` writes it
# JSON that may be a call without marks; in fences, it is one only if they are the whole answer
BARE_CALL = regex.compile(r'\[?\s*\{{1,2}\s*"(?:name|arguments|parameters|type|function)"\s*:')
FENCE = regex.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n\s*(?=[\[{])")
FENCE_END = regex.compile(r"\s*```\s*\Z")
BETWEEN_BARE_CALLS = regex.compile(r"\s*[;,]?\s*(?=\{)")
NEXT_FENCE = regex.compile(rf"\s*```\s*{FENCE.pattern}")
UNFINISHED = re.compile(r'"|-?\d*\.?\d*(?:[eE][+-]?\d*)?\Z|[a-zA-Z]+\Z|\\u?[0-9a-fA-F]{0,4}\Z')  # at the end of JSON
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer as it came. Several pieces of one kind join to one text; a call comes whole."""

    kind: Kind
    text: str  # of a thought or text, without marks and the whitespace next to them
    source: str  # the text as the model wrote it
    call: ToolCall | None = None


class _Section(NamedTuple):
    """Calls that were read, and the position after them."""

    calls: list[ToolCall]
    end: int


class _Unfinished(Exception):
    """More text must come to tell what this is."""


class AnswerParser:
    """Reads one answer. tools: whose calls are read; without any, calls are text.

    in_thought: the prompt opened a thought. Text between two parts of one kind is joined by a newline.
    """

    def __init__(self, form: AnswerForm, tools: Sequence[Mapping[str, Any]] = (), *, in_thought: bool = False) -> None:
        self.in_thought = in_thought
        self._thought, self._calls = form.thought, form.calls if tools else None
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._text = ""
        self._place = 0  # of the first character that belongs to no piece yet
        self._skipped = ""  # marks and whitespace before it, which go with the next piece
        self._search = 0  # where the search for marks goes on, if a mark before it turned out to be text
        self._incomplete_at = 0  # how much of the text was there when a section of calls was not complete
        self._is_fresh = True  # the present part has no text yet
        self._follows_mark = in_thought  # whitespace here belongs to the mark
        self._can_be_bare = bool(tools)  # no text and no call in marks yet
        self._begun = set[Kind]()  # the kinds that have text

    def feed(self, text: str) -> list[AnswerPiece]:
        """The pieces that this text completes."""
        if self._place > KEPT:  # one character stays, so that nothing else looks like the beginning of the answer
            cut = self._place - 1
            self._text, self._place = self._text[cut:], 1
            self._search = max(0, self._search - cut)
            self._incomplete_at = max(0, self._incomplete_at - cut)
        self._text += text
        return self._pieces(is_end=False)

    def end(self) -> list[AnswerPiece]:
        """The remaining pieces of an answer that is complete, or was cut off."""
        return self._pieces(is_end=True)

    def _pieces(self, *, is_end: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        try:
            while self._place < len(self._text):
                self._step(pieces, is_end)
        except _Unfinished:
            pass
        if is_end and self._skipped:
            pieces.append(AnswerPiece("text", "", self._skipped))
            self._skipped = ""
        return pieces

    def _step(self, pieces: list[AnswerPiece], is_end: bool) -> None:
        """Consume text up to the next mark, or a mark. Raises `_Unfinished` if more text must come first."""
        if self._is_fresh and self._opens(pieces, is_end):
            return
        start, end, kind = self._next_mark(is_end)
        if kind == "calls":
            assert self._calls is not None
            section = self._section(self._calls, end, is_end)
            if section is None:
                self._search = start + 1
            elif self.in_thought and not self._ends_thought(section, is_end):
                self._search = section.end
            else:
                self._show(pieces, start, before_mark=True, is_end=is_end)
                self._add_calls(pieces, section)
        elif kind is None:
            self._show(pieces, start, before_mark=False, is_end=is_end)
            if self._place < len(self._text):
                raise _Unfinished
        else:
            self._show(pieces, start, before_mark=True, is_end=is_end)
            self._skip_to(end)
            self.in_thought = {"opening": True, "closing": False, "hidden": self.in_thought}[kind]

    def _opens(self, pieces: list[AnswerPiece], is_end: bool) -> bool:
        """Open a thought, or read calls without marks, at the beginning of a part; True if one was found."""
        blank = SPACE.match(self._text, self._place)
        start = blank.end() if blank else self._place
        if start == len(self._text):
            if is_end:
                return False
            raise _Unfinished
        if self._thought is not None and not self._thought.anywhere:
            mark = self._matched(self._thought.opening_pattern, start, is_end)
            if mark is not None:
                self._skip_to(mark.end())
                self.in_thought = True
                return True
        if self._can_be_bare and not self.in_thought:
            section = self._bare_calls(start, is_end)
            if section is not None:
                self._add_calls(pieces, section)
                self._can_be_bare = True
                return True
            self._can_be_bare = False
        return False

    def _next_mark(self, is_end: bool) -> tuple[int, int, str | None]:
        """The beginning, end and kind of the next mark; no kind: text goes on up to the beginning."""
        patterns = []
        if self._thought is not None:
            if self.in_thought:
                patterns.append(("closing", self._thought.closing_pattern))
            elif self._thought.anywhere:
                patterns.append(("opening", self._thought.opening_pattern))
            if not self.in_thought and self._thought.hidden_pattern is not None:
                patterns.append(("hidden", self._thought.hidden_pattern))
        if self._calls is not None:
            patterns.append(("calls", self._calls.opening_pattern))
        start, end, kind = len(self._text), len(self._text), None
        held = len(self._text)  # where an incomplete mark begins
        for name, pattern in patterns:
            search = max(self._search, self._place) if name == "calls" else self._place
            match = pattern.search(self._text, search, partial=not is_end)
            if match is None:
                continue
            if match.partial:
                held = min(held, match.start())
            elif kind is None or (match.start(), -match.end()) < (start, -end):
                start, end, kind = match.start(), match.end(), name
        return (start, end, kind) if kind is not None and start <= held else (held, held, None)

    def _show(self, pieces: list[AnswerPiece], end: int, *, before_mark: bool, is_end: bool) -> None:
        """Add the text up to `end`, without whitespace next to marks; what may stand before a mark waits."""
        text = self._text[self._place : end]
        kind: Kind = "thought" if self.in_thought else "text"
        if not before_mark and not is_end and self._can_meet_marks:
            end = self._place + len(text.rstrip())
        shown = text.rstrip() if before_mark else self._text[self._place : end]
        source = self._text[self._place : end]
        if self._follows_mark and self._is_fresh:
            shown = shown.lstrip()
        self._place = end
        if not shown:
            self._skipped += source
            return
        if self._is_fresh and kind in self._begun:
            shown = "\n" + shown
        pieces.append(AnswerPiece(kind, shown, self._skipped + source))
        self._skipped, self._is_fresh = "", False
        self._can_be_bare = self._can_be_bare and kind == "thought"
        self._begun.add(kind)

    @property
    def _can_meet_marks(self) -> bool:
        return self.in_thought or self._calls is not None or (self._thought is not None and self._thought.anywhere)

    def _skip_to(self, end: int) -> None:
        """Leave out a mark; another part begins after it."""
        self._skipped += self._text[self._place : end]
        self._place, self._is_fresh, self._follows_mark = end, True, True

    def _add_calls(self, pieces: list[AnswerPiece], section: _Section) -> None:
        source = self._skipped + self._text[self._place : section.end]
        for call in section.calls:
            pieces.append(AnswerPiece("call", "", source, call))
            source = ""
        self._skipped, self._place = "", section.end
        self.in_thought, self._can_be_bare, self._is_fresh, self._follows_mark = False, False, True, True

    def _ends_thought(self, section: _Section, is_end: bool) -> bool:
        """True if calls inside a thought end it: nothing but further calls follows. Others are quoted."""
        assert self._calls is not None
        place = section.end
        while True:
            blank = SPACE.match(self._text, place)
            place = blank.end() if blank else place
            if place == len(self._text):
                if is_end:
                    return True
                raise _Unfinished
            mark = self._matched(self._calls.opening_pattern, place, is_end)
            following = None if mark is None else self._section(self._calls, mark.end(), is_end)
            if following is None:
                return False
            place = following.end

    def _matched(self, pattern: Any, place: int, is_end: bool) -> Any:
        """A match at this place, or None. Raises `_Unfinished` if it may become one."""
        match = pattern.match(self._text, place, partial=not is_end)
        if match is not None and match.partial:
            raise _Unfinished
        return match

    def _section(self, form: CallForm, place: int, is_end: bool) -> _Section | None:
        """The calls of a section whose opening mark ends here; None if it is text."""
        self._wait_for_end(is_end)
        calls: list[ToolCall] = []
        while True:
            try:
                calls_read, place = self._calls_at(form, place, is_end)
            except (ValueError, KeyError, RecursionError):  # a model may write anything
                break
            calls += calls_read
            if form.closing_pattern is None:
                break
            mark = form.closing_pattern.match(self._text, place, partial=True)
            if mark is not None:
                if mark.partial and not is_end:
                    raise _Unfinished
                place = mark.end()  # an answer may be cut off within the mark
                break
        self._incomplete_at = 0
        return _Section(calls, place) if calls else None

    def _wait_for_end(self, is_end: bool) -> None:
        """Raise `_Unfinished` if calls were not complete before, and nothing came that can complete them."""
        before, self._incomplete_at = self._incomplete_at, len(self._text)
        if before and not is_end and not CAN_END_CALLS.search(self._text, before):
            raise _Unfinished

    def _calls_at(self, form: CallForm, place: int, is_end: bool) -> tuple[list[ToolCall], int]:
        """The calls at a place, usually one, and the position after them. ValueError if there are none."""
        head = self._matched(form.head_pattern, place, is_end)
        if head is None:
            raise ValueError
        place, names = head.end(), head.groupdict()
        value: Any = None
        if form.arguments == "tags":
            match = self._matched(form.tail_pattern, place, is_end)
            if match is None:
                raise ValueError
            return [self._tagged(form, names["name"], match)], match.end()
        if form.arguments == "python":
            calls, place = _python_calls(self._text, place, is_end)
            return [_call(name, arguments) for name, arguments in calls], place
        if form.arguments == "lax":
            value, place = _Literals(self._text, place, is_end, form.quotes).read()
        else:
            value, place = _json(self._text, place, is_end)
        tail = self._matched(form.tail_pattern, place, is_end)
        if tail is None:
            raise ValueError
        if form.arguments != "call":
            return [_call(names["name"], value, names.get("id"))], tail.end()
        return [_named_call(item) for item in (value if isinstance(value, list) else [value])], tail.end()

    def _tagged(self, form: CallForm, name: str, match: Any) -> ToolCall:
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        texts = match.captures("string") if "string" in match.re.groupindex else []
        arguments = {}
        for number, (key, text) in enumerate(zip(match.captures("key"), match.captures("value"), strict=True)):
            if form.padding:
                text = text.removeprefix(form.padding).removesuffix(form.padding)
            types = schema_types(properties.get(key) if isinstance(properties, Mapping) else None)
            if texts:
                types = {"string"} if texts[number] == "true" else set()
            arguments[key] = _typed(text, types, is_json=bool(texts))
        return _call(name, arguments)

    def _bare_calls(self, place: int, is_end: bool) -> _Section | None:
        """Calls of the request's tools that are JSON without marks."""
        fence = self._matched(FENCE, place, is_end)
        place = place if fence is None else fence.end()
        if self._matched(BARE_CALL, place, is_end) is None:
            return None
        self._wait_for_end(is_end)
        calls: list[ToolCall] = []
        while True:
            try:
                value, end = _json(self._text, place, is_end)
                calls_read = [_named_call(item) for item in (value if isinstance(value, list) else [value])]
            except (ValueError, KeyError, RecursionError):
                break
            if not calls_read or any(call.name not in self._schemas for call in calls_read):
                break
            calls, place = calls + calls_read, end
            between = self._matched(BETWEEN_BARE_CALLS, place, is_end)
            if between is None and fence is not None:
                between = self._matched(NEXT_FENCE, place, is_end)
            if between is None:
                break
            place = between.end()
        self._incomplete_at = 0
        if not calls or fence is None:
            return _Section(calls, place) if calls else None
        closing = FENCE_END.match(self._text, place, partial=not is_end)
        if closing is None:
            return None
        if not is_end:  # more may follow
            raise _Unfinished
        return _Section(calls, closing.end())


def schema_types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {item for item in named or () if isinstance(item, str)}
    for case in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= schema_types(case)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return types or {_type_of(value) for value in values}


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _typed(text: str, types: set[str], *, is_json: bool) -> Any:
    """The value of an argument between tags: texts are written as they are, all else as JSON."""
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not is_json and (not types or "string" in types):
        return text
    if types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return WORDS.get(text.strip(), text)
    return int(value) if types == {"integer"} and isinstance(value, float) and value.is_integer() else value


def _named_call(value: Any) -> ToolCall:
    """A call from JSON with its name. LookupError or ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value["name"] if "name" in value else value["tool_name"]
    return _call(name, value.get("arguments", value.get("parameters")))


def _call(name: Any, arguments: Any, identifier: str | None = None) -> ToolCall:
    """A call with a name and a JSON object of arguments, which is all that clients can read. ValueError for others."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError(f"a call of {name!r:.80} with arguments of type {type(arguments).__name__}")
    name.encode()  # halves of surrogate pairs can be written in JSON, but not sent
    written = json.dumps(arguments, allow_nan=False)
    if SURROGATE.search(written):  # half of a pair cannot be sent: it becomes U+FFFD
        pairs = json.dumps(arguments, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
        written = json.dumps(json.loads(pairs.decode("utf-16-le", "replace")))
    return ToolCall(name, written, identifier or "")


def _json(text: str, place: int, is_end: bool) -> tuple[Any, int]:
    """A JSON value and the position after it. Raises `_Unfinished` if it may go on, ValueError if it is none.

    Double braces around an object count once: templates of Qwen2.5-Coder show calls with them.
    """
    place = cast("re.Match[str]", SPACE.match(text, place)).end()
    is_doubled = text.startswith("{{", place)
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, place + is_doubled)
    except json.JSONDecodeError as error:
        if not is_end and (error.pos >= len(text) or UNFINISHED.match(text, error.pos)):
            raise _Unfinished from None
        raise
    if is_doubled:
        brace = cast("re.Match[str]", SPACE.match(text, end)).end()
        if brace == len(text) and not is_end:
            raise _Unfinished
        end = brace + 1 if text.startswith("}", brace) else end
    return value, end


class _Literals:
    """Reads literals as models write them: JSON, Python's, and objects with unquoted keys.

    quotes: further marks around strings, without escapes. Raises like `_json`.
    """

    NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
    WORD = re.compile(r"[^\s{}\[\](),:='\"<]+")
    STOPS: Mapping[str, re.Pattern[str]] = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
    ESCAPES: Mapping[str, str] = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}

    def __init__(self, text: str, place: int, is_end: bool, quotes: Sequence[str] = ()) -> None:
        self.text, self.place, self.is_end, self.quotes = text, place, is_end, quotes

    def read(self, depth: int = 0) -> tuple[Any, int]:
        value = self.value(depth)
        return value, self.place

    def peek(self) -> str:
        """The next character that is no whitespace."""
        self.place = cast("re.Match[str]", SPACE.match(self.text, self.place)).end()
        if self.place >= len(self.text):
            self.fail_at_end()
        return self.text[self.place]

    def fail_at_end(self) -> NoReturn:
        if not self.is_end:
            raise _Unfinished
        raise ValueError

    def take(self, character: str) -> bool:
        """Consume this character if it comes next."""
        is_next = self.peek() == character
        self.place += is_next
        return is_next

    def expect(self, character: str) -> None:
        if not self.take(character):
            raise ValueError

    def value(self, depth: int = 0) -> Any:
        if depth > 100:
            raise ValueError
        first = self.peek()
        if first == "{":
            return self.object(depth)
        if first in "[(":
            self.place += 1
            return self.items("]" if first == "[" else ")", depth)
        if (string := self.string()) is not None:
            return string
        return self.scalar()

    def items(self, closing: str, depth: int) -> list[Any]:
        values: list[Any] = []
        while not self.take(closing):
            values.append(self.value(depth + 1))
            if not self.take(","):
                self.expect(closing)
                break
        return values

    def object(self, depth: int) -> dict[str, Any]:
        self.place += 1
        values: dict[str, Any] = {}
        while not self.take("}"):
            self.peek()
            key = self.string()
            if key is None:
                key = self.word()
            self.expect(":")
            values[key] = self.value(depth + 1)
            if not self.take(","):
                self.expect("}")
                break
        return values

    def word(self) -> str:
        match = self.WORD.match(self.text, self.place)
        if match is None:
            raise ValueError
        self.place = match.end()
        if self.place == len(self.text):
            self.fail_at_end()
        return match[0]

    def scalar(self) -> Any:
        word = self.word()
        if word in WORDS:
            return WORDS[word]
        if self.NUMBER.fullmatch(word) is None:
            raise ValueError
        return int(word) if word.lstrip("-").isdigit() else float(word)

    def string(self) -> str | None:
        for quote in self.quotes:
            if len(quote) > 1 and self.text.startswith(quote, self.place):
                end = self.text.find(quote, self.place + len(quote))
                if end < 0:
                    self.fail_at_end()
                string = self.text[self.place + len(quote) : end]
                self.place = end + len(quote)
                return string
            if len(quote) > 1 and not self.is_end and quote.startswith(self.text[self.place :]):
                raise _Unfinished
        quote = self.text[self.place]
        if quote not in "\"'":
            return None
        place, parts = self.place + 1, list[str]()
        while True:
            stop = self.STOPS[quote].search(self.text, place)
            end = -1 if stop is None else stop.start()
            if end < 0 or (self.text[end] == "\\" and end + 1 == len(self.text)):
                self.fail_at_end()
            parts.append(self.text[place:end])
            if self.text[end] == quote:
                self.place = end + 1
                return "".join(parts)
            escape = self.text[end + 1]
            size = {"u": 4, "x": 2, "U": 8}.get(escape)
            if size is None:
                parts.append(self.ESCAPES.get(escape, escape if escape in "\\'\"/" else "\\" + escape))
                place = end + 2
                continue
            if end + 2 + size > len(self.text):
                self.fail_at_end()
            parts.append(chr(int(self.text[end + 2 : end + 2 + size], 16)))
            place = end + 2 + size


def _python_calls(text: str, place: int, is_end: bool) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """A list of Python calls with named literals, or one call, and the position after it. Raises like `_json`."""
    reader = _Literals(text, place, is_end)
    calls: list[tuple[str, dict[str, Any]]] = []
    is_list = reader.take("[")
    while True:
        reader.peek()
        name, arguments = reader.word(), dict[str, Any]()
        reader.expect("(")
        while not reader.take(")"):
            reader.peek()
            key = reader.word()
            reader.expect("=")
            arguments[key] = reader.value()
            if not reader.take(","):
                reader.expect(")")
                break
        calls.append((name, arguments))
        if not is_list or reader.take("]"):
            return calls, reader.place
        reader.expect(",")
