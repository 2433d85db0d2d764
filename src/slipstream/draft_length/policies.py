"""The policies other than the planner, and the choice of a policy for a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from slipstream.checks import is_whole
from slipstream.core.interfaces import Policy, Source
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rounds import PREDICTION
from slipstream.core.types import Draft, Row
from slipstream.core.user_objects import texts_kept, user_object
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.planner import Planner, lengths_without_costs
from slipstream.errors import UsageError, with_class


@dataclass(frozen=True)
class Fixed(Policy):
    """Drafts the same number of tokens for every row in every round."""

    count: int

    def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
        return lengths_without_costs([self.count] * len(rows), draft, room)

    def expects_drafts(self, row: Row) -> bool:
        return self.count > 0


@dataclass
class Heuristic(Policy):
    """Hugging Face's "heuristic" schedule, for each row: two tokens more after a draft accepted whole, else one less.

    A row begins with 5 tokens and stays between 1 and `longest`.
    """

    longest: int = MAX_DRAFT_TOKENS
    _lengths: WeakKeyDictionary[Row, int] = field(default_factory=WeakKeyDictionary)

    def observe(self, rows: Sequence[Row]) -> None:
        for row in rows:
            newest = row.rounds[-1].without_forced
            if newest.draft and newest.origin.source != PREDICTION:
                change = 2 if newest.num_accepted_tokens == newest.num_draft_tokens else -1
                self._lengths[row] = max(1, min(self._length(row) + change, self.longest))

    def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
        return lengths_without_costs([self._length(row) for row in rows], draft, room)

    def _length(self, row: Row) -> int:
        return self._lengths.get(row, min(5, self.longest))


@dataclass(frozen=True)
class UsersPolicy(Policy):
    """A user's policy, whose answers are checked.

    It is not asked to cut a sampled draft, because cutting one for its tokens would bias the text. It gets tuples and
    copies, so that it cannot change the batch.
    """

    name: str  # as the setting names it
    policy: Policy

    @classmethod
    def load(cls, name: str) -> UsersPolicy:
        """The policy object that `name` stands for, or what the class of that name makes."""
        value = user_object("num_draft_tokens", name)
        try:
            policy = value() if isinstance(value, type) else value
        except Exception as error:  # a user's class may raise anything
            raise UsageError(f"num_draft_tokens={name!r} cannot be made: {with_class(error)}") from error
        if not isinstance(policy, Policy):
            raise UsageError(f"num_draft_tokens={name!r} is {policy!r:.60}; allowed: a subclass of slipstream.Policy")
        return cls(name, policy)

    def observe(self, rows: Sequence[Row]) -> None:
        with texts_kept(f"policy {self.name}", rows):
            self.policy.observe(tuple(rows))

    def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
        with texts_kept(f"policy {self.name}", rows):
            lengths = self.policy.lengths(tuple(rows), source, draft, tuple(room))
        is_list = isinstance(lengths, list) and len(lengths) == len(rows) and all(type(n) is int for n in lengths)
        if not is_list or any(not 0 <= n <= limit for n, limit in zip(lengths, room, strict=True)):
            raise UsageError(
                f"policy {self.name} returned lengths {lengths!r:.80}; allowed: a list of {len(rows)} whole numbers, "
                f"each from 0 to that row's room {list(room)}"
            )
        return lengths

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        if draft.probs is not None:
            return draft
        with texts_kept(f"policy {self.name}", rows):
            cut = self.policy.worth_verifying(tuple(rows), replace(draft, tokens=draft.tokens.clone()))
        if not isinstance(cut, Draft) or len(cut.lengths) != len(rows) or not all(map(is_whole, cut.lengths)):
            raise UsageError(f"policy {self.name} returned {cut!r:.80}; allowed: the draft, or draft.cut(lengths)")
        return draft.cut(cut.lengths)

    def expects_drafts(self, row: Row) -> bool:
        return self.policy.expects_drafts(row)


def make_policy(choice: LengthChoice, planner: Planner | None, *, limit: int | None) -> Policy:
    """The policy of a setting. planner: the policy of "auto". limit: the longest draft that fits; None if all do."""
    if planner is not None:
        return planner
    if choice.kind == "user":
        return UsersPolicy.load(choice.policy)
    longest = MAX_DRAFT_TOKENS if limit is None else limit
    if choice.kind == "confidence":
        return Fixed(longest)
    length = longest if choice.count is None else choice.count
    if length > longest:
        why = "" if limit is None else " in reproducible mode, or reproducible=False"
        spelled: object = f"heuristic:{length}" if choice.kind == "heuristic" else length
        if choice.siblings > 0:
            spelled = f"'{length // (1 + choice.siblings)}x{1 + choice.siblings}', a tree of {length} tokens"
        raise UsageError(f"num_draft_tokens={spelled}; allowed: at most {longest}{why}")
    return Heuristic(length) if choice.kind == "heuristic" else Fixed(length)
