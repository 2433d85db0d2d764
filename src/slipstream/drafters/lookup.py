"""Everything that can be looked up: `suffix` where the text is known, `recycle` where it is not, and behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.drafters import Setup, recycle, suffix
from slipstream.drafters.recycle import RecycleDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.sampling import Sampler
from slipstream.types import Draft, Row, UsageError, Verdict


@dataclass
class LookUpDrafter:
    """The draft of `known` or, where its first token is less likely, of `ranked`; `ranked` goes on behind it.

    Both are one-hot. Where they do not say what to hope for, `ranked` drafts for the rows for which `known` has
    nothing.
    """

    known: SuffixDrafter
    ranked: RecycleDrafter

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of one of the two, or of both in turn."""
        first, second = (drafter.propose(rows, lengths, sampler) for drafter in (self.known, self.ranked))
        choices = [
            self._draft(row, length, *both)
            for row, length, *both in zip(rows, lengths, _read(first), _read(second), strict=True)
        ]
        draft = Draft.from_lists([tokens for tokens, _ in choices], sampler.device)
        return draft if first.hopes is None else replace(draft, hopes=tuple(hopes for _, hopes in choices))

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """See `RecycleDrafter`."""
        self.ranked.observe(rows, draft, logits, verdict)

    def forget(self) -> None:
        """Drop what was learned from requests."""
        self.known.forget()
        self.ranked.forget()

    def _draft(
        self, row: Row, length: int, known: tuple[list[int], list[float]], ranked: tuple[list[int], list[float]]
    ) -> tuple[list[int], list[float]]:
        tokens, hopes = known
        if not tokens or (hopes and hopes[0] < max(ranked[1][:1], default=0.0)):
            return ranked
        more, hoped = self.ranked.goes_on(row, tokens, length - len(tokens), hopes[-1]) if hopes else ([], [])
        return tokens + more, hopes + hoped


def _read(draft: Draft) -> list[tuple[list[int], list[float]]]:
    """Tokens and hopes of each row."""
    hopes = draft.hopes or [None] * len(draft.lengths)
    rows = zip(draft.tokens.tolist(), draft.lengths, hopes, strict=True)
    return [(tokens[:length], list(hope or ())) for tokens, length, hope in rows]


def build(setup: Setup, argument: str) -> LookUpDrafter:
    """ "lookup", or "lookup:" and an argument of the drafter `suffix`."""
    known = suffix.build(setup, argument)
    if setup.hopes and known.odds is None:
        raise UsageError(f"drafter='lookup:{argument}'; allowed: arguments of suffix but p=PERCENT")
    return LookUpDrafter(known, recycle.build(setup, ""))
