"""Reads thoughts, text and tool calls from an answer's tokens, as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.constraints.answer_grammar import thought_rules
from slipstream.text.detokenizer import StopStrings, TextStream
from slipstream.tokenization.answer_parser import AnswerParser, AnswerPiece
from slipstream.tokenization.tokenizer import AnswerTokenizer, Tokenizer

PROMPT_END = 32  # tokens in which the opening of a thought is looked for


class AnswerReader:
    """Reads one answer, with its marks, which may be special tokens, up to the first stop string."""

    def __init__(
        self,
        tokenizer: AnswerTokenizer,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> None:
        self._parser = AnswerParser(tokenizer.answer_form(), tools, in_thought=begins_in_thought(tokenizer, prompt))
        self._stream, self._stops = TextStream(tokenizer.decode_marked), StopStrings(stops)
        self.num_thought_tokens = 0  # marks included

    def push(self, tokens: Sequence[int]) -> list[AnswerPiece]:
        """The pieces that these tokens complete."""
        pieces: list[AnswerPiece] = []
        for token in tokens:
            was_in_thought = self._parser.in_thought
            pieces += self._parser.feed(self._stops.push(self._stream.push(token)))
            self.num_thought_tokens += was_in_thought or self._parser.in_thought
        return pieces

    def end(self) -> list[AnswerPiece]:
        """The remaining pieces of an answer that has ended."""
        return self._parser.feed(self._stops.push(self._stream.flush(), final=True)) + self._parser.end()


def begins_in_thought(tokenizer: AnswerTokenizer, prompt: Sequence[int]) -> bool:
    """True if the prompt ends with the opening of a thought."""
    thought = tokenizer.answer_form().thought
    if thought is None:
        return False
    return tokenizer.decode_marked(prompt[-PROMPT_END:]).rstrip().endswith(thought.opening.rstrip())


def ends_thought(tokenizer: AnswerTokenizer, prompt: Sequence[int]) -> bool:
    """True if the prompt ends with the closing mark of a thought: the model is not to think."""
    thought = tokenizer.answer_form().thought
    tail = tokenizer.decode_marked(prompt[-PROMPT_END:]).rstrip()
    return thought is not None and tail.endswith(thought.closing)


def thought_preamble(tokenizer: AnswerTokenizer, prompt: Sequence[int], *, with_text: bool) -> str:
    """The part of a grammar for the thought that may precede an answer; empty if there can be none.

    with_text: text follows, rather than calls.
    """
    thought = tokenizer.answer_form().thought
    if thought is None or (ends_thought(tokenizer, prompt) and not thought.text):
        return ""
    is_open = begins_in_thought(tokenizer, prompt)
    return thought_rules(thought, tokenizer.special_tokens(), is_open=is_open, with_text=with_text)


def answer_tokenizer(tokenizer: Tokenizer | None, tools: Sequence[Mapping[str, Any]]) -> AnswerTokenizer | None:
    """The tokenizer, if it can separate answers and they may have more parts than text."""
    if not isinstance(tokenizer, AnswerTokenizer) or not (tools or tokenizer.answer_form().thought):
        return None
    return tokenizer
