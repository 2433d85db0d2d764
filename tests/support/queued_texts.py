"""Texts of rows that enter and end while others run, as decoded plainly and from drafts right and wrong."""

from __future__ import annotations

from collections.abc import Callable

from architecture_checks import QUEUE, Liar

from slipstream import SamplingParams, SpeculativeDecoder

COUNT, LENGTHS = 16, (6, 16, 9, 14, 11)
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
DRAFTED = 4


class QueuedTexts:
    """The texts of QUEUE, of the models that go by these names."""

    def __init__(self, decoder_of: Callable[[str], SpeculativeDecoder]) -> None:
        self._decoder_of = decoder_of
        self._plain: dict[str, dict[tuple[int, ...], list[int]]] = {}

    def plain(self, name: str) -> dict[tuple[int, ...], list[int]]:
        """Each prompt's text, decoded alone and without drafts."""
        if name not in self._plain:
            decoder = self._decoder_of(name)
            self._plain[name] = {tuple(one): decoder.generate(list(one), GREEDY).token_ids for one in QUEUE}
        return self._plain[name]

    def drafted(self, name: str, right: int | None) -> list[list[int]]:
        """Texts from drafts of which the first `right` tokens are right, or 0, 1, ... in turn."""
        decoder = self._decoder_of(name)
        liar = Liar(self.plain(name), decoder.target.backend.vocab_size, right)
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
        prompts = [list(prompt) for prompt in QUEUE]
        results = decoder.using(liar, num_draft_tokens=DRAFTED).generate(prompts, params)
        assert liar.rounds
        return [result.token_ids for result in results]

    def expected(self, name: str) -> list[list[int]]:
        """What `drafted` has to be."""
        return [self.plain(name)[tuple(prompt)][:length] for prompt, length in zip(QUEUE, LENGTHS, strict=True)]
