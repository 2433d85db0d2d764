"""The one judge of texts that should be equal: identical, a tie, different, or not comparable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isinf
from typing import Any

import torch
from torch import Tensor

from slipstream.certificate.full_precision import full_precision_model, last_logits
from slipstream.certificate.parity import Difference, explain, plain_difference
from slipstream.core.rng import Race, Stream, key
from slipstream.core.types import Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.models.loaded import LoadOptions
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler


@dataclass
class TieJudge:
    """Tells ties from bugs; the full-precision model is loaded when the first difference turns up."""

    decoder: SpeculativeDecoder

    @cached_property
    def _full(self) -> Any:
        config = self.decoder.config
        options = LoadOptions(config.dtype, config.device, False, config.load_options)
        return full_precision_model(self.decoder.target, options)

    @cached_property
    def _race(self) -> Race:
        backend = self.decoder.target.backend
        return Race(backend.vocab_size, backend.device)

    def judge(
        self,
        prompt: list[int],
        expected: list[int],
        got: list[int],
        params: SamplingParams,
        *,
        coupled: bool = True,
        same_bits: bool = False,
    ) -> Difference | None:
        """The first difference between two texts made under the same options, explained; None if they are equal.

        params: with the seed used, where text is sampled. coupled: whether every token of both texts is the target's
        own draw (`coupled`); if not, sampled texts that differ are not compared. same_bits: whether both were computed
        in shapes that agree to the bit, so that no rounding excuses a difference at an edge of top-k, top-p or min-p.
        """
        found = plain_difference(expected, got)
        if found is None:
            return None
        if params.temperature > 0 and (not coupled or params.seed is None):
            return replace(found, compared=False)
        if self.decoder.target.model is None:
            return found

        def full(ids: list[int], count: int) -> Tensor:
            logits = last_logits(self._full, ids, count)
            prefixes = [ids[: len(ids) - back] for back in range(count - 1, -1, -1)]
            return torch.stack(
                [self._scores(prompt, ids, one, params) for ids, one in zip(prefixes, logits, strict=True)]
            )

        def working(ids: list[int]) -> Tensor:
            return self._scores(prompt, ids, self.decoder.next_logits(ids), params)

        explained = explain(prompt, expected, got, full, working, self.decoder.target.model.dtype)
        if explained is None or explained.tie or not params.temperature:
            return explained
        cut = isinf(explained.expected_gap) or isinf(explained.got_gap)
        return replace(explained, compared=not cut or same_bits)

    def _scores(self, prompt: list[int], ids: list[int], logits: Tensor, params: SamplingParams) -> Tensor:
        """[V] what the token after `ids` is chosen by, the largest first. Before the output begins: logits [V]."""
        if len(ids) < len(prompt):
            return logits.float()
        row = self._row(prompt, ids, params)
        vocab_size = self.decoder.target.backend.vocab_size
        sampler = Sampler([row], self._race, vocab_size, logits.device)
        nothing = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
        scores = sampler.scores(logits[None, None, :vocab_size], nothing)
        if not params.temperature:
            return scores[0, 0]
        noise = self._race.noise(key(row.seed, Stream.TOKEN, len(ids)))
        return sampler.probs(scores)[0, 0].log() - noise.log()

    def _row(self, prompt: list[int], ids: list[int], params: SamplingParams) -> Row:
        """The row as it stood when its tokens were `ids`."""
        row = self.decoder.rows([prompt], params)[0]
        row.tokens.extend(ids[len(prompt) :])
        return row


def coupled(decoder: SpeculativeDecoder, params: SamplingParams) -> bool:
    """Whether the decoder's text must be plain decoding's: greedy, or every token the target's own draw."""
    return params.temperature == 0 or decoder.coupled
