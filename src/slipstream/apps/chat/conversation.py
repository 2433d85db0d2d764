"""A conversation: its turns, its settings and its answers. This module knows no terminal and no slash command.

The turns are the only truth. Every prompt is made of all of them afresh, by the chat template or, for a model without
one, as running text; how much of it the memory holds already is found by the decoder's session, token by token.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from slipstream.apps.chat.face import Face
from slipstream.apps.chat.turn import Turn, shortened
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.sampling.params import SamplingParams
from slipstream.text.requests import Message
from slipstream.text.results import Chunk
from slipstream.text.round_view import round_lines


@dataclass
class Chat:
    """A conversation with a decoder.

    speculative: False answers by plain decoding. cache: False empties the memory before every answer. debug: show the
    rounds after every answer. closed: the user wants to leave.
    """

    decoder: SpeculativeDecoder
    face: Face
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str = ""
    speculative: bool = True
    cache: bool = True
    debug: bool = False
    turns: list[Turn] = field(default_factory=list)
    closed: bool = False
    _told_raw: str | None = None  # the target whose lack of a template has been mentioned

    def __post_init__(self) -> None:
        _refuse_wordless(self.decoder)

    @property
    def active(self) -> SpeculativeDecoder:
        """The decoder that answers."""
        return self.decoder if self.speculative else self.decoder.using("none", num_draft_tokens="auto")

    @property
    def last(self) -> Turn:
        """The last turn."""
        if not self.turns:
            raise UsageError("there is no turn yet; allowed: after the first answer")
        return self.turns[-1]

    @property
    def messages(self) -> list[Message]:
        """The conversation so far as chat messages."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        return said

    def encode(self, text: str) -> list[int]:
        """Token ids of the prompt in which the user says `text` next."""
        tokenizer = self.decoder.tokenizer
        if tokenizer is not None and tokenizer.has_chat_template:
            return self.decoder.encode([*self.messages, {"role": "user", "content": text}])
        name = self.decoder.target.name
        if self._told_raw != name:
            self._told_raw = name
            self.face.note(f"{name} has no chat template: it continues the raw text of the conversation")
        said = [self.system] if self.system else []
        said += [turn.user + turn.answer for turn in self.turns]
        return self.decoder.encode("\n".join([*said, text]), chat=False)

    def ask(self, text: str) -> Turn | None:
        """Answer `text`, piece by piece; an interrupted answer stays as far as it came, unless nothing came."""
        decoder, ids = self.active, self.encode(text)
        params = self._fitting(len(ids))
        if not self.cache:
            decoder.forget()
        chunks: list[Chunk] = []
        before = decoder.num_prefilled_tokens
        try:
            for chunk in decoder.stream(ids, params):
                chunks.append(chunk)
                self.face.piece(chunk.text)
        except KeyboardInterrupt:
            if not chunks:
                self.face.note("interrupted before the first token: nothing is kept")
                return None
        self.face.piece("\n")
        turn = Turn(
            user=text,
            answer="".join(chunk.text for chunk in chunks),
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
        self._report(turn)
        return turn

    def _fitting(self, prompt_length: int) -> SamplingParams:
        """The options of the next answer: a seed, and no more tokens than the context has room for."""
        context, wanted = self.decoder.target.backend.max_length, self.params.max_tokens
        room = context - prompt_length
        if room < 1:
            raise UsageError(f"the conversation has {prompt_length} tokens; allowed: at most {context - 1}; see /reset")
        if room < wanted:
            self.face.note(f"room for {room} tokens, not {wanted}: the model's context is {context}; see /reset")
        seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        prediction = self.params.prediction if self.speculative else None
        return replace(shortened(self.params, min(room, wanted)), seed=seed, prediction=prediction)

    def _report(self, turn: Turn) -> None:
        if self.debug:
            self.face.say(round_lines(turn.rounds, self.decoder.tokenizer))
        self.face.note(turn.summary)

    def retry(self) -> Turn | None:
        """Answer the last question again; the old answer goes when there is a new one."""
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
            _refuse_wordless(decoder)
        self.decoder = decoder

    def load_draft(self, name: str | None) -> None:
        """Draft with another model, or with none; the drafter becomes the default one."""
        with self._loading(name):
            self.decoder = self.decoder.with_draft(name)

    @contextmanager
    def _loading(self, names: str | None) -> Iterator[None]:
        """Say what is loaded; running out of memory or files is one line too."""
        if names is not None:
            self.face.note(f"loading {names} ...")
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            raise SlipstreamError(f"{names} could not be loaded: {first_line(error)}") from error


def _refuse_wordless(decoder: SpeculativeDecoder) -> None:
    if decoder.tokenizer is None:
        raise UsageError(f"model {decoder.target.name!r} has no tokenizer; allowed: a model that can read text")
