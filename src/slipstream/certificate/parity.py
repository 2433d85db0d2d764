"""Compares two texts and tells whether their first difference is a tie or a bug.

Two forwards of different shapes round differently, so a near-tie between two tokens can flip. At the first mismatch
one forward in float32 scores both candidates: both within rounding of the maximum is a tie, anything else a bug.
Scores are what a token is chosen by: logits after penalties and the other processors, and after temperature, cuts and
the seed's noise where text is sampled. `TieJudge` does this for a decoder's texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isinf
from typing import Any

import torch
from torch import Tensor

from slipstream.core.rng import Race, Stream, key
from slipstream.decoder import SpeculativeDecoder
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler

# no rounding explains a larger gap than this, whatever was measured
CEILING = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.5}
NEIGHBORS = 10
POSITIONS = 12  # at which rounding is measured: at a few alone it may happen to be small
Scores = Callable[[list[int]], Tensor]
LastScores = Callable[[list[int], int], Tensor]


@dataclass(frozen=True)
class Difference:
    """The first difference of two texts."""

    position: int
    expected: int | None
    got: int | None
    expected_gap: float = 0.0  # distance of the expected token's score from the maximum, in full precision
    got_gap: float = 0.0  # the same of the other token
    noise: float = 0.0  # largest error of working precision among the leading tokens, here or just before
    tie: bool = False
    # False if the texts may differ: sampled texts of a rule that does not couple draws, or a rounding error that moves
    # a token across the edge of top-k, top-p or min-p
    compared: bool = True


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first mismatch, the shorter length if one is a prefix of the other, None if equal."""
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def count_differences(differences: Sequence[Difference | None]) -> dict[str, Any]:
    """Counts of texts that are identical, ties, different or not compared, and details of those that differ."""
    different = [d for d in differences if d is not None]
    ties, compared = sum(d.tie for d in different), sum(d.compared for d in different)
    return {
        "identical": len(differences) - len(different),
        "ties": ties,
        "different": compared - ties,
        "not_compared": len(different) - compared,
        "differences": [{"prompt": i, **asdict(d)} for i, d in enumerate(differences) if d is not None],
    }


def plain_difference(expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """The first difference between two texts, unexplained; None if they are equal."""
    position = first_difference(expected, got)
    if position is None:
        return None
    a, b = (ids[position] if position < len(ids) else None for ids in (expected, got))
    return Difference(position, a, b)


def explain(
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    full: LastScores,
    working: Scores,
    dtype: torch.dtype,
) -> Difference | None:
    """The first difference between two texts, judged in full precision; None if they are equal.

    full(ids, n): [n, V] float32 scores that follow the last n prefixes of the token ids, the whole one last.
    working(ids): [V] scores that follow them, in the precision that was used. A forbidden token has score -inf.
    """
    difference = plain_difference(expected, got)
    if difference is None or difference.expected is None or difference.got is None:
        return difference
    context = [*prompt, *expected[: difference.position]]
    count = min(POSITIONS, len(context))
    exact = full(context, count).double().cpu()
    prefixes = [context[: len(context) - back] for back in range(count - 1, -1, -1)]
    pair = torch.tensor([difference.expected, difference.got])
    noise = max(_noise(scores, working(ids).double().cpu(), pair) for scores, ids in zip(exact, prefixes, strict=True))
    gaps = [float(exact[-1].max() - exact[-1, token]) for token in pair]
    tie = max(gaps) <= min(2 * noise, CEILING.get(dtype, 0.0))
    return Difference(difference.position, difference.expected, difference.got, gaps[0], gaps[1], noise, tie)


def _noise(exact: Tensor, rounded: Tensor, pair: Tensor) -> float:
    """The largest error among the leading tokens and the two candidates; a common shift changes nothing.

    Tokens forbidden in either precision are left out.
    """
    leading = torch.cat([exact.topk(min(NEIGHBORS, len(exact))).indices, pair])
    error = (rounded - exact)[leading]
    error = error[error.isfinite()]
    return float((error - error.mean()).abs().max()) if len(error) else 0.0


def plain_model(loaded: Loaded, options: LoadOptions) -> Any:
    """A model as transformers loads it: the loaded object, or a second copy if that has packed weights."""
    if loaded.plain_model is not None:
        return loaded.plain_model
    from slipstream.models.plain_models import load_unpacked

    return load_unpacked(loaded.source or loaded.name, replace(options, rounding=loaded.rounding))


@torch.inference_mode()
def last_logits(model: Any, tokens: list[int], count: int = 1) -> Tensor:
    """[count, V] float32 logits after the last `count` of `tokens`, by one forward without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits
    return logits[0, -count:].float()


@dataclass
class TieJudge:
    """Distinguishes ties from bugs; the full-precision model is loaded at the first difference."""

    decoder: SpeculativeDecoder

    @cached_property
    def _full(self) -> Any:
        config = self.decoder.config
        model = plain_model(self.decoder.target, LoadOptions("float32", config.device, False, config.load_options))
        is_full = model.dtype == torch.float32 and not model.training
        return model if is_full else copy.deepcopy(model).float().eval()

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
        """The first difference between two texts generated under the same options, explained; None if they are equal.

        params: with the seed used, for sampled texts. coupled: every token of both texts is the target's own draw; if
        not, sampled texts that differ are not compared. same_bits: both were computed in shapes that agree to the bit,
        so that no rounding excuses a difference at an edge of top-k, top-p or min-p.
        """
        difference = plain_difference(expected, got)
        if difference is None:
            return None
        if params.temperature > 0 and (not coupled or params.seed is None):
            return replace(difference, compared=False)
        if self.decoder.target.model is None:
            return difference

        def full(ids: list[int], count: int) -> Tensor:
            logits = last_logits(self._full, ids, count)
            prefixes = [ids[: len(ids) - back] for back in range(count - 1, -1, -1)]
            return torch.stack(
                [
                    self._scores(prompt, ids, row_logits, params)
                    for ids, row_logits in zip(prefixes, logits, strict=True)
                ]
            )

        def working(ids: list[int]) -> Tensor:
            return self._scores(prompt, ids, self.decoder.next_logits(ids), params)

        explained = explain(prompt, expected, got, full, working, self.decoder.target.model.dtype)
        if explained is None or explained.tie or not params.temperature:
            return explained
        cut = isinf(explained.expected_gap) or isinf(explained.got_gap)
        return replace(explained, compared=not cut or same_bits)

    def _scores(self, prompt: list[int], ids: list[int], logits: Tensor, params: SamplingParams) -> Tensor:
        """[V] the scores by which the token after `ids` is chosen: the largest wins. Within the prompt: the logits."""
        if len(ids) < len(prompt):
            return logits.float()
        row = self.decoder.rows([prompt], params)[0]
        row.tokens.extend(ids[len(prompt) :])  # the row as it stood when its tokens were `ids`
        vocab_size = self.decoder.target.backend.vocab_size
        sampler = Sampler([row], self._race, vocab_size, logits.device)
        nothing = torch.empty(1, 0, dtype=torch.int64, device=logits.device)
        scores = sampler.scores(logits[None, None, :vocab_size], nothing)
        if not params.temperature:
            return scores[0, 0].float()
        noise = self._race.noise(key(row.seed, Stream.TOKEN, len(ids)))
        return sampler.probs(scores)[0, 0].log() - noise.log()


def verdict(difference: Difference | None) -> str:
    """One word on whether a text equals plain decoding's."""
    if difference is None:
        return "identical"
    if not difference.compared:
        return f"differs at {difference.position}, as sampled text may"
    if difference.tie:
        gap = abs(difference.expected_gap - difference.got_gap)
        return f"tie at {difference.position} (gap {gap:.2g}, noise {difference.noise:.2g})"
    return f"DIFFERS at {difference.position}"
