"""A conversation: its turns, settings and answers, and reports about it. Knows no terminal and no slash command.

Every prompt is made again from all turns, by the chat template or, for a model without one, as running text. The
decoder's session compares the prompt with its cache, token by token, and reads only what is new.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.text import Text

from slipstream.certificate.parity import TieJudge, verdict
from slipstream.checks import counted, expanded, read_json, save_text
from slipstream.core.rounds import FinishReason, Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.sampling.params import SamplingParams
from slipstream.text.answer_reader import AnswerReader, answer_tokenizer
from slipstream.text.requests import FormOptions, Message
from slipstream.text.results import Chunk, Stats, statistics_line
from slipstream.text.round_view import round_lines, time_split
from slipstream.tokenization.answer_parser import AnswerPiece


class ChatDisplay(Protocol):
    """The display that a conversation writes to; for the terminal, see `slipstream.apps.cli.chat`."""

    def token(self, text: str) -> None:
        """Show a part of the answer; the last one ends the line."""

    def thought(self, text: str) -> None:
        """Show a part of what the model thinks before it answers."""

    def show(self, line: str | Text) -> None:
        """Show information that the user requested."""

    def show_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Show names and explanations, such as the list of commands."""

    def remark(self, line: str) -> None:
        """Show a remark next to the answers."""

    def error(self, line: str) -> None:
        """Show the reason why something was not done."""


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and how the answer was generated."""

    user: str
    answer: str
    thought: str  # what the model thought before it answered
    target: str
    drafter: str
    prompt_ids: list[int]
    params: SamplingParams  # with the seed that was drawn
    rounds: list[Round]
    finish_reason: FinishReason | Literal["interrupted"]
    prefilled: int  # prompt tokens missing from the target's KV cache, without the few read with the first draft
    lossless: bool
    coupled: bool  # every token was the target's own draw

    @property
    def token_ids(self) -> list[int]:
        return [token for round in self.rounds for token in round.tokens]

    @property
    def stats(self) -> Stats:
        return Stats.of(self.rounds, lossless=self.lossless)

    @property
    def summary(self) -> str:
        """One line: tokens, speed, drafter, acceptance, reason for the end, and the seed of a sampled answer."""
        seed = f", seed {self.params.seed}" if self.params.temperature else ""
        return f"{statistics_line(self.stats, self.drafter)}, ended by {self.finish_reason}{seed}"

    def to_dict(self) -> dict[str, Any]:
        """Everything except the rounds, for JSON."""
        kept = ("user", "answer", "thought", "target", "drafter", "finish_reason", "token_ids", "prefilled")
        counts = {"prompt_tokens": len(self.prompt_ids), "params": self.params.to_dict(), "stats": self.stats.to_dict()}
        return {name: getattr(self, name) for name in kept} | counts


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The options with another `max_tokens`, and `min_tokens` not above it."""
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


@dataclass
class Chat:
    """A conversation with a decoder."""

    decoder: SpeculativeDecoder
    display: ChatDisplay
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str = ""
    answer_start: str = ""  # first words of every answer, which the model continues
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables that the chat template reads
    speculative: bool = True  # False: plain decoding
    cache: bool = True  # False: empty the cache before every answer
    debug: bool = False  # show the rounds after every answer
    turns: list[Turn] = field(default_factory=list)
    earlier: list[Message] = field(default_factory=list)  # of a conversation that was loaded, before `turns`
    files: dict[str, str] = field(default_factory=dict)  # texts by name that go with the next message
    kept_in: Path | None = None  # file that holds the conversation after every answer
    closed: bool = False  # the user wants to leave
    _target_without_template: str | None = None  # the target whose lack of a chat template has been mentioned

    def __post_init__(self) -> None:
        _refuse_without_tokenizer(self.decoder)

    @property
    def active(self) -> SpeculativeDecoder:
        return self.decoder if self.speculative else self.decoder.using("none", num_draft_tokens="auto")

    @property
    def last(self) -> Turn:
        """The last turn; UsageError before the first."""
        if not self.turns:
            raise UsageError("there is no turn yet; allowed: after the first answer")
        return self.turns[-1]

    @property
    def messages(self) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += self.earlier
        for turn in self.turns:
            thought = {"reasoning_content": turn.thought} if turn.thought else {}
            answer = {"role": "assistant", "content": turn.answer, **thought}
            messages += [{"role": "user", "content": turn.user}, answer]
        return messages

    def encode(self, text: str) -> list[int]:
        """Token ids of the conversation so far, with `text` as the user's next message."""
        tokenizer = self.decoder.tokenizer
        if tokenizer is not None and tokenizer.has_chat_template:
            messages = [*self.messages, {"role": "user", "content": text}]
            start = [{"role": "assistant", "content": self.answer_start}] if self.answer_start else []
            form = FormOptions(chat_template_kwargs=self.template_kwargs, continue_final_message=bool(start))
            return self.decoder.encode([*messages, *start], **form)
        name = self.decoder.target.name
        if self.answer_start or self.template_kwargs:
            what = "--answer-start" if self.answer_start else "--chat-template-kwargs"
            raise UsageError(f"{what} needs a chat template, which {name!r} lacks; allowed: without it")
        if self._target_without_template != name:
            self._target_without_template = name
            self.display.remark(f"{name} has no chat template: it continues the raw text of the conversation")
        texts = [self.system] if self.system else []
        texts += [str(message["content"]) for message in self.earlier]
        texts += [turn.user + turn.answer for turn in self.turns]
        return self.decoder.encode("\n".join([*texts, text]), chat=False)

    def send(self, text: str) -> None:
        """Ask `text` after the texts of the attached files."""
        parts = [f"{name}:\n\n{content.strip()}" for name, content in self.files.items()]
        if self.ask("\n\n".join([*parts, text])) is not None:
            self.files.clear()

    def ask(self, text: str) -> Turn | None:
        """Answer `text`, piece by piece, and keep what an interrupted answer has; None if it has nothing."""
        decoder, ids = self.active, self.encode(text)
        params = self._fitting(len(ids))
        if not self.cache:
            decoder.forget()
        chunks: list[Chunk] = []
        separating = answer_tokenizer(decoder.tokenizer, ())
        reader = None if separating is None else AnswerReader(separating, ids, stops=params.stop)
        pieces: list[AnswerPiece] = []
        before = decoder.num_prefilled_tokens
        try:
            for chunk in decoder.stream(ids, params):
                if not chunks and self.answer_start:
                    self.display.token(self.answer_start)
                chunks.append(chunk)
                new = [AnswerPiece("text", chunk.text, "")] if reader is None else reader.push(chunk.token_ids)
                self._show(new, pieces)
        except KeyboardInterrupt:
            if not chunks:
                self.display.remark("interrupted before the first token: nothing is kept")
                return None
        self._show([] if reader is None else reader.end(), pieces)
        self.display.token("\n")
        turn = Turn(
            user=text,
            answer=self.answer_start + "".join(piece.text for piece in pieces if piece.kind == "text"),
            thought="".join(piece.text for piece in pieces if piece.kind == "thought"),
            target=decoder.target.name,
            drafter=decoder.drafter_name,
            prompt_ids=ids,
            params=params,
            rounds=[chunk.round for chunk in chunks],
            finish_reason=chunks[-1].round.finish_reason or "interrupted",
            prefilled=decoder.num_prefilled_tokens - before,
            lossless=decoder.lossless,
            coupled=decoder.coupled,
        )
        self.turns.append(turn)
        if self.debug:
            self.display.show(round_lines(turn.rounds, decoder.tokenizer))
        self.display.remark(turn.summary)
        if self.kept_in is not None:
            self.kept_in.touch(0o600)
            save(self, self.kept_in)
        return turn

    def _show(self, new: Sequence[AnswerPiece], pieces: list[AnswerPiece]) -> None:
        """Keep and show new pieces of an answer."""
        for piece in new:
            pieces.append(piece)
            (self.display.thought if piece.kind == "thought" else self.display.token)(piece.text)

    def _fitting(self, prompt_length: int) -> SamplingParams:
        """The options of the next answer: a seed, and no more tokens than the context has room for."""
        params = self.decoder.reader.own_options(self.params).explicit
        context, max_tokens = self.decoder.target.backend.max_length, params.max_tokens
        room = context - prompt_length
        if room < 1:
            raise UsageError(f"the conversation has {prompt_length} tokens; allowed: at most {context - 1}; see /reset")
        if room < max_tokens:
            self.display.remark(
                f"room for {room} tokens, not {max_tokens}: the model's context is {context}; see /reset"
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        prediction = params.prediction if self.speculative else None
        return replace(shortened(params, min(room, max_tokens)), seed=seed, prediction=prediction)

    def retry(self) -> Turn | None:
        """Answer the last question again; the new answer replaces the old one."""
        old = self.last
        del self.turns[-1]
        turn = None
        try:
            turn = self.ask(old.user)
        finally:
            if turn is None:
                self.turns.append(old)
        return turn

    def load_target(self, name: str) -> None:
        """Answer with another target from now on; the conversation stays."""
        draft = None if self.decoder.draft is None else self.decoder.draft.name
        with self._loading(name if draft is None else f"{name} and {draft}"):
            decoder = SpeculativeDecoder(name, draft, **vars(self.decoder.config))
            _refuse_without_tokenizer(decoder)
        self.decoder = decoder

    def load_draft(self, name: str | None) -> None:
        """Draft with another model, or with none; the drafter becomes the default one."""
        with self._loading(name):
            self.decoder = self.decoder.with_draft(name)

    @contextmanager
    def _loading(self, names: str | None) -> Iterator[None]:
        """Announce the load; failures such as a lack of memory become `SlipstreamError`."""
        if names is not None:
            self.display.remark(f"loading {names} ...")
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            raise SlipstreamError(f"{names} could not be loaded: {first_line(error)}") from error


def _refuse_without_tokenizer(decoder: SpeculativeDecoder) -> None:
    if decoder.tokenizer is None:
        raise UsageError(f"model {decoder.target.name!r} has no tokenizer; allowed: a model that can read text")


def compare(chat: Chat) -> str:
    """Answer the last question by plain decoding: both speeds, and whether the outputs are the same."""
    turn, decoder = chat.last, chat.decoder
    if turn.target != decoder.target.name:
        raise UsageError(f"the last answer is by {turn.target}, not {decoder.target.name}; allowed: after /retry")
    ids, params = turn.token_ids, turn.params
    length = len(ids) if turn.finish_reason == "interrupted" else params.max_tokens
    plain_params = replace(shortened(params, length), prediction=None)
    plain = decoder.using("none", num_draft_tokens="auto").generate(turn.prompt_ids, plain_params)
    difference = TieJudge(decoder).judge(turn.prompt_ids, plain.token_ids, ids, params, coupled=turn.coupled)
    fast, slow = _speed(turn.stats), _speed(plain.stats)
    speeds = f"{turn.drafter} {fast:.1f} tok/s, plain {slow:.1f} tok/s: {fast / slow:.2f}x, prompt not counted"
    return f"{speeds}; text {verdict(difference)}"


def totals(chat: Chat) -> list[str]:
    """Lines about the whole conversation."""
    stats = Stats.of(round for turn in chat.turns for round in turn.rounds)
    prompts, prefilled = sum(len(t.prompt_ids) for t in chat.turns), sum(t.prefilled for t in chat.turns)
    interrupted = sum(turn.finish_reason == "interrupted" for turn in chat.turns)
    lines = [f"{counted(len(chat.turns), 'turn')}, {interrupted} interrupted"]
    if chat.turns:
        drafters = "+".join(dict.fromkeys(turn.drafter for turn in chat.turns))
        lines += [statistics_line(stats, drafters), f"prompts: {prompts} tokens, {prefilled} of them not cached"]
        lines.append(f"time: {time_split(stats.to_dict()).partition(': ')[2]}")
    if seeds := [str(turn.params.seed) for turn in chat.turns if turn.params.temperature]:
        lines.append(f"seeds of sampled answers: {', '.join(seeds)}")
    return lines


def save(chat: Chat, path: Path) -> None:
    """Write the conversation as JSON: its messages, and how every answer was generated."""
    decoder = chat.decoder
    value = {
        "target": decoder.target.name,
        "draft": None if decoder.draft is None else decoder.draft.name,
        "config": vars(decoder.config),
        "messages": chat.messages,
        "turns": [turn.to_dict() for turn in chat.turns],
    }
    save_text("file", expanded(path), json.dumps(value, indent=2) + "\n")


def load(chat: Chat, path: Path) -> None:
    """Go on with a saved conversation. UsageError for a file that holds none."""
    value = read_json("conversation", expanded(path))
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"conversation {str(path)!r} has no messages; allowed: a file that /save has written")
    chat.turns.clear()
    chat.system = next((message["content"] for message in messages if message["role"] == "system"), "")
    chat.earlier = [message for message in messages if message["role"] != "system"]
    chat.display.show(f"{counted(len(chat.earlier), 'message')} of {path}; the last one:")
    chat.display.show(chat.earlier[-1]["content"] if chat.earlier else "")


def _is_message(value: Any) -> bool:
    """True for a message of text alone."""
    has_role = isinstance(value, dict) and value.get("role") in ("system", "user", "assistant")
    return has_role and isinstance(value.get("content"), str)


def _speed(stats: Stats) -> float:
    """Output tokens per second of decoding alone."""
    return stats.num_output_tokens / max(stats.total_seconds - stats.prefill_seconds, 1e-9)
