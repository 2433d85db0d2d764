"""All retrieval in one: `suffix` where the text is known, `token_recycling` where it is not, and after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits, Verdict
from slipstream.drafters import Setup, suffix, token_recycling
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.token_recycling import TokenRecyclingDrafter
from slipstream.errors import UsageError


@dataclass
class RetrievalDrafter:
    """The draft of `known` or, where its first token is less likely, of `ranked`; `ranked` goes on behind it.

    Both are one-hot. Where they know no acceptance probabilities, `ranked` drafts for the rows for which `known` has
    nothing.
    """

    known: SuffixDrafter
    ranked: TokenRecyclingDrafter

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two, or of both in turn."""
        first, second = (drafter.propose(rows, lengths, sampler) for drafter in (self.known, self.ranked))
        choices = [
            self._draft(row, length, *both)
            for row, length, *both in zip(rows, lengths, _read(first), _read(second), strict=True)
        ]
        known = None if first.acceptance_probs is None else [acceptance_probs for _, acceptance_probs in choices]
        return Draft.from_lists([tokens for tokens, _ in choices], sampler.device, known)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """See `TokenRecyclingDrafter`."""
        self.ranked.observe(rows, draft, logits, verdict)

    def forget(self) -> None:
        """Drop what was learned from requests."""
        self.known.forget()
        self.ranked.forget()

    def _draft(
        self, row: Row, length: int, known: tuple[list[int], list[float]], ranked: tuple[list[int], list[float]]
    ) -> tuple[list[int], list[float]]:
        tokens, acceptance_probs = known
        if not tokens or (acceptance_probs and acceptance_probs[0] < max(ranked[1][:1], default=0.0)):
            return ranked
        more, more_probs = (
            self.ranked.extend(row, tokens, length - len(tokens), acceptance_probs[-1])
            if acceptance_probs
            else ([], [])
        )
        return tokens + more, acceptance_probs + more_probs


def _read(draft: Draft) -> list[tuple[list[int], list[float]]]:
    """Tokens and acceptance probabilities of each row."""
    acceptance_probs = draft.acceptance_probs or [None] * len(draft.lengths)
    rows = zip(draft.tokens.tolist(), draft.lengths, acceptance_probs, strict=True)
    return [(tokens[:length], list(acceptance_prob or ())) for tokens, length, acceptance_prob in rows]


TRAITS = Traits(samples=False, needs_forwards=False, default_length=7)


def build(setup: Setup, argument: str) -> RetrievalDrafter:
    """ "retrieval", or "retrieval:" and an argument of the drafter `suffix`."""
    setup = replace(setup, siblings=0, fixed_tree=False)  # one goes on behind the other
    known = suffix.build(setup, argument, "retrieval:")
    if setup.acceptance_probs and known.acceptance_model is None:
        raise UsageError(f"drafter='retrieval:{argument}'; allowed: arguments of suffix but p=PERCENT")
    return RetrievalDrafter(known, token_recycling.build(setup, ""))
