"""Texts of rows that enter and end while others run, decoded plainly and with right and wrong drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.architecture_checks import PROMPTS, QUEUE, PartlyWrongDrafter

COUNT, LENGTHS = 16, (6, 16, 9, 14, 11)
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
DRAFTED = 4


class QueuedTexts:
    """The texts of QUEUE by the models that `decoder_of` knows by name."""

    def __init__(self, decoder_of: Callable[[str], SpeculativeDecoder]) -> None:
        self._decoder_of = decoder_of
        self._plain: dict[str, dict[tuple[int, ...], list[int]]] = {}

    def plain(self, name: str) -> dict[tuple[int, ...], list[int]]:
        """Each prompt's text, decoded alone and without drafts."""
        if name not in self._plain:
            decoder = self._decoder_of(name)
            self._plain[name] = {tuple(prompt): decoder.generate(list(prompt), GREEDY).token_ids for prompt in QUEUE}
        return self._plain[name]

    def drafted(self, name: str, right: int | None, decoder: SpeculativeDecoder | None = None) -> list[list[int]]:
        """Texts decoded with drafts of which the first `right` tokens are right, or 0, 1, ... in turn.

        decoder: that of the name, if it is loaded already.
        """
        decoder = decoder or self._decoder_of(name)
        drafter = PartlyWrongDrafter(self.plain(name), decoder.target.backend.vocab_size, right)
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
        prompts = [list(prompt) for prompt in QUEUE]
        results = decoder.using(drafter, num_draft_tokens=DRAFTED).generate(prompts, params)
        assert drafter.rounds
        return [result.token_ids for result in results]

    def expected(self, name: str) -> list[list[int]]:
        """The texts that `drafted` must return."""
        return [self.plain(name)[tuple(prompt)][:length] for prompt, length in zip(QUEUE, LENGTHS, strict=True)]

    def check_seeded_rows(self, name: str) -> None:
        """Drafts verified by `match` change no sampled text."""
        decoder = self._decoder_of(name)
        params = [
            SamplingParams(temperature=0.8, max_tokens=COUNT, ignore_eos=True, seed=i) for i in range(len(PROMPTS))
        ]
        plain = [result.token_ids for result in decoder.generate(PROMPTS, params)]
        drafted = decoder.using("ngram", num_draft_tokens=4, acceptance="match")
        assert [result.token_ids for result in drafted.generate(PROMPTS, params)] == plain

    def check_own_drafts(self, name: str, model: Any) -> None:
        """The model drafts for itself, and nearly all is accepted."""
        decoder = SpeculativeDecoder(model, model, drafter="model", num_draft_tokens=3, max_batch_size=3)
        results = decoder.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        assert [result.token_ids for result in results] == [self.plain(name)[tuple(prompt)] for prompt in PROMPTS]
        assert results[0].stats.acceptance_rate > 0.9

    def check_conversation(self, name: str, decoder: SpeculativeDecoder) -> None:
        """The next turn of a chat continues from the last state that `decoder` keeps."""
        first = decoder.generate(PROMPTS[0], GREEDY)
        second_turn = [*PROMPTS[0], *first.token_ids, 7, 8, 9]
        before = decoder.num_prefilled_tokens
        second = decoder.generate(second_turn, GREEDY)
        assert decoder.num_prefilled_tokens - before <= 4  # what the last state lacks
        assert second.token_ids == self._decoder_of(name).generate(second_turn, GREEDY).token_ids
