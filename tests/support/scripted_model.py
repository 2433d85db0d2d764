"""A model that answers every conversation as a script says, whatever its weights would."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream import SpeculativeDecoder
from slipstream.models.loaded import Loaded
from slipstream.models.toy import ToyBackend
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.vocabularies import decoder_of

Script = Callable[[str], str]  # a prompt, with its special tokens -> the answer


class ScriptedBackend(ToyBackend):
    """Its likeliest token continues the script's answer to the conversation that its cache holds.

    opening: the text after which the template lets an answer begin.
    """

    def __init__(self, tokenizer: HFTokenizer, end_id: int, opening: str, script: Script, window: int) -> None:
        super().__init__(0)
        self.vocab_size, self.max_length = len(tokenizer.inner), window
        self._tokenizer, self._end_id, self._script = tokenizer, end_id, script
        self._opening = tokenizer.bare(opening)
        self._answers: dict[tuple[int, ...], list[int]] = {}  # tokens of the answers by those of their prompts

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        rows, width = tokens.shape
        for row, start in enumerate(starts):
            self._cache.slots[first_slot + row, start : start + width] = tokens[row]
        if not logits:
            return torch.empty(0)
        out = torch.zeros(rows, width, self.vocab_size)
        for row, start in enumerate(starts):
            context = self._cache.slots[first_slot + row, : start + width].tolist()
            for column in range(width):
                out[row, column, self._next(context[: start + column + 1])] = 100.0
        return out

    def _next(self, context: list[int]) -> int:
        size = len(self._opening)
        begin = next((i for i in range(len(context), size - 1, -1) if context[i - size : i] == self._opening), 0)
        prompt, answer = tuple(context[:begin]), context[begin:]
        if prompt not in self._answers:
            shown = self._tokenizer.inner.decode(prompt, skip_special_tokens=False)
            self._answers[prompt] = [*self._tokenizer.bare(self._script(shown)), self._end_id]
        scripted = self._answers[prompt]
        return scripted[len(answer)] if answer == scripted[: len(answer)] != scripted else self._end_id


def scripted_decoder(tokenizer: HFTokenizer, opening: str, script: Script, window: int) -> SpeculativeDecoder:
    """A decoder of a scripted model with this tokenizer and its template."""
    end_id = tokenizer.inner.eos_token_id
    backend = ScriptedBackend(tokenizer, end_id, opening, script, window)
    target = Loaded(backend, "scripted", (end_id,), tokenizer, fingerprint="scripted")
    return decoder_of(target, None, drafter="suffix", acceptance="match")
