"""How many tokens to draft for each row of the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream import drafters
from slipstream.core.interfaces import Policy
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.acceptance_model import NOTHING, DraftNote, with_notes
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.planner import DraftController
from slipstream.errors import UsageError

FIRST, UP, DOWN = 5, 2, 1  # of the heuristic schedule


@dataclass(frozen=True)
class Fixed:
    """Always the same number."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 0 <= self.count <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"num_draft_tokens={self.count!r}; allowed: 'auto' or a whole number from 0 to {MAX_DRAFT_TOKENS}"
            )

    def observe(self, rows: Sequence[Row]) -> None:
        """Nothing to learn."""

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """The number, for every row."""
        return [self.count] * len(rows)

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as it is."""
        return draft


@dataclass
class Heuristic:
    """Two more after a draft that was accepted whole, one less after any other; Hugging Face's "heuristic" schedule.

    A row begins with 5 tokens. Each row has its own number, which stays between 1 and `longest`.
    """

    longest: int = MAX_DRAFT_TOKENS
    _lengths: WeakKeyDictionary[Row, int] = field(default_factory=WeakKeyDictionary)

    def observe(self, rows: Sequence[Row]) -> None:
        """Move each row's number by its newest round."""
        for row in rows:
            done = row.rounds[-1].without_forced
            if done.draft:
                by = UP if done.num_accepted_tokens == done.num_draft_tokens else -DOWN
                self._lengths[row] = max(1, min(self._length(row) + by, self.longest))

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Each row's number."""
        return [self._length(row) for row in rows]

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as it is."""
        return draft

    def _length(self, row: Row) -> int:
        return self._lengths.get(row, min(FIRST, self.longest))


@dataclass
class Auto:
    """As many tokens as pay, by measured costs and by what drafts have brought; see `DraftController`.

    reproducible_length: tokens for sampled rows whose text depends on the draft (samples: the drafter samples from a
    distribution of its own); costs do not count for them, so that a seed gives the same text again.
    stepwise: every token of a draft costs time; else drafts cost nothing but their verification.
    """

    controller: DraftController
    reproducible_length: int
    samples: bool = False
    stepwise: bool = False
    _decided: dict[int, DraftNote] = field(default_factory=dict)  # about this round's rows, before anything was read

    def observe(self, rows: Sequence[Row]) -> None:
        """See `DraftController.observe`."""
        self.controller.observe(rows)

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """As many as can pay; where drafts have acceptance probabilities, as many as may be cut afterwards."""
        controller = self.controller
        longest = 0 if controller.quiet.left else controller.longest_of(len(rows))
        chosen = [longest] * len(rows)
        if self.stepwise:
            chosen, notes = controller.stepping(rows)
            self._decided = {id(row): note for row, note in zip(rows, notes, strict=True)}
        return [
            self.reproducible_length if self._is_fixed(row) else length
            for row, length in zip(rows, chosen, strict=True)
        ]

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft as far as it is worth its verification."""
        if self.stepwise:
            draft = with_notes(draft, [self._decided.get(id(row), NOTHING) for row in rows])
        if any(map(self._is_fixed, rows)):
            return draft
        return self.controller.cut(rows, draft)

    def drafts_for(self, row: Row) -> bool:
        """Whether a draft model will draft for a row, as far as costs tell."""
        return self._is_fixed(row) or self.controller.pays_for(row)

    def _is_fixed(self, row: Row) -> bool:
        return self.samples and row.params.temperature > 0


def make_policy(
    choice: LengthChoice, traits: Traits, controller: DraftController | None, *, coupled: bool, limit: int | None
) -> Policy:
    """The policy of a choice for a drafter of these traits.

    controller: given where costs decide. coupled: drafts share the target's random numbers. limit: the longest draft
    that the forward shapes allow, None for any.
    """
    if controller is not None:
        stepwise = traits.needs_forwards and not traits.plans_itself
        return Auto(controller, traits.default_length, traits.samples and not coupled, stepwise)
    most = MAX_DRAFT_TOKENS if limit is None else limit
    if choice.kind == "auto":
        return Fixed(traits.default_length)
    if choice.kind == "confidence":
        return Fixed(most)
    length = most if choice.count is None else choice.count
    if length > most:
        why = "" if limit is None else " in reproducible mode, or reproducible=False"
        said: object = f"heuristic:{length}" if choice.kind == "heuristic" else length
        if choice.siblings > 0:
            said = f"'{length // (1 + choice.siblings)}x{1 + choice.siblings}', a tree of {length} tokens"
        raise UsageError(f"num_draft_tokens={said}; allowed: at most {most}{why}")
    return Heuristic(length) if choice.kind == "heuristic" else Fixed(length)


def drafts_for(policy: Policy, row: Row) -> bool:
    """Whether a draft model will draft for a row, as far as is known beforehand."""
    own = row.params.num_draft_tokens
    if own is not None:
        return own > 0
    return policy.drafts_for(row) if isinstance(policy, Auto) else policy.lengths([row])[0] > 0


def check_confidence(choice: LengthChoice, spelled: object, drafter: str, traits: Traits) -> None:
    """Refuse "confidence:CHANCE" with a drafter that knows no probabilities or has a threshold of its own."""
    if choice.confidence and (not traits.knows_confidence or "p=" in drafter):
        able = sorted(name for name in drafters.names() if drafters.traits(name).knows_confidence)
        raise UsageError(
            f"num_draft_tokens={spelled!r} with drafter={drafter!r}; allowed: drafters {', '.join(able)} "
            "without p=PERCENT"
        )
