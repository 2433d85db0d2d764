"""Token recycling: what the target ranked highest after a token is stored and drafted when the token comes again.

Luo et al. 2024, "Turning Trash into Treasure" (arXiv:2408.08696), who verify trees of alternatives; here a draft is
the chain of best ones. Every verified position teaches, also behind a rejected draft token: the target's ranking there
is right for the text that was drafted. Unlike in the paper, contexts have up to three tokens, and a row's own text
teaches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.traits import Traits
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup
from slipstream.errors import UsageError

CONTEXT = 3  # tokens of the longest context
WIDTH, LIMIT = 4, 64  # alternatives stored per context
KEEP = 0.9  # weight of what was known, each time a context comes again
SPAN = 1 << 15  # a table holds the last SPAN to 2 * SPAN contexts
# chance of a token behind a context of one, two, three tokens, of the row's own table and of the common one
PRIOR = (0.2, 0.15, 0.45, 0.35, 0.6, 0.5)
UNLIKELY = 0.01  # a chain less likely than this is not followed


class _Table:
    """The likeliest followers of contexts, best first, with their weights.

    A ranking of n tokens gives them the weights `width`, `width` - 1, ...; the sums of earlier ones fade. Contexts are
    numbers (`_contexts`). When SPAN have been entered, those not seen among the SPAN before are dropped.
    """

    def __init__(self, width: int) -> None:
        self._weights = range(width, 0, -1)
        self._young: dict[int, dict[int, float]] = {}
        self._old: dict[int, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def enter(self, contexts: Sequence[int], ranking: Sequence[int]) -> None:
        """Note what the target ranked highest behind a position, which is the end of all these contexts."""
        for context in contexts:
            known = self._find(context)
            ranks: dict[int, float] = dict(zip(ranking, self._weights, strict=False))
            self._young[context] = ranks if known is None else self._merged(ranks, known)
        if len(self._young) >= SPAN:
            self._old, self._young = self._young, {}

    def best(self, contexts: Sequence[int]) -> tuple[int, int] | None:
        """The likeliest follower of the last of these contexts that is known, and which that is."""
        for at in range(len(contexts) - 1, -1, -1):
            known = self._find(contexts[at])
            if known is not None:
                return next(iter(known)), at
        return None

    def _find(self, context: int) -> dict[int, float] | None:
        known = self._young.get(context)
        return self._old.get(context) if known is None else known

    def _merged(self, ranks: dict[int, float], known: dict[int, float]) -> dict[int, float]:
        for token, weight in known.items():
            ranks[token] = ranks.get(token, 0.0) + KEEP * weight
        return dict(sorted(ranks.items(), key=itemgetter(1), reverse=True)[: len(self._weights)])


@dataclass
class TokenRecyclingDrafter:
    """Drafts the chain of the target's best alternatives after contexts that were verified before.

    width: alternatives stored per context. A row has a table of its own, which begins with its text as far as it stands
    at its first draft; what the target ranked in any row goes into a common one as well. Contexts of two and three
    tokens go before single ones, the row's own before common ones. Drafts are one-hot. A table holds at most 2 * SPAN
    contexts.
    acceptance_model: given, a draft has acceptance probabilities, by how often such tokens were accepted before.
    """

    vocab_size: int
    width: int = WIDTH
    acceptance_model: AcceptanceModel | None = None
    _guesses: WeakKeyDictionary[Row, tuple[int, list[int], list[int]]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    _own: WeakKeyDictionary[Row, _Table] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= LIMIT:
            raise UsageError(f"token_recycling width={self.width!r}; allowed: a whole number from 1 to {LIMIT}")
        self._common = _Table(self.width)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the chain of likeliest followers; it ends where nothing is known."""
        drafts = [self._draft(row, length) if length else ([], []) for row, length in zip(rows, lengths, strict=True)]
        known = None if self.acceptance_model is None else [acceptance_probs for _, acceptance_probs in drafts]
        return Draft.from_lists([tokens for tokens, _ in drafts], sampler.device, known)

    def extend(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens after a draft by another drafter, with acceptance probabilities; see `Extender`."""
        more, kinds = self._follow(row, [*row.tokens[-CONTEXT:], *tokens], length)
        return self._likely(row, more, kinds, acceptance_prob)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Note the target's likeliest tokens at every verified position; see `Observer`. Waits for the device."""
        size = min(self.width, logits.shape[-1])
        top = logits.topk(size, dim=-1).indices
        told: list[list[int]] = torch.cat([verdict.accepted[:, None], draft.tokens, top.flatten(1)], dim=1).tolist()
        for row, length, (accepted, *others) in zip(rows, draft.lengths, told, strict=True):
            text, rankings = [*row.tokens[-CONTEXT:], *others[:length]], others[draft.width :]
            own = self._own.get(row)
            tables = [self._common] if own is None else [self._common, own]
            # where a draft repeats itself, accepted tokens have the last word
            for j in (*range(accepted + 1, length + 1), *range(accepted + 1)):
                contexts = self._contexts(text[: len(text) - length + j])
                for table in tables:
                    table.enter(contexts, rankings[j * size : (j + 1) * size])

    def forget(self) -> None:
        """Drop what was learned from requests; rows under way begin again with their text."""
        self._common = _Table(self.width)
        self._own.clear()
        if self.acceptance_model is not None:
            self.acceptance_model.forget()

    def num_contexts(self) -> int:
        """How many contexts the common table holds."""
        return len(self._common)

    def _draft(self, row: Row, length: int) -> tuple[list[int], list[float]]:
        if self.acceptance_model is not None and row in self._guesses:
            start, tokens, kinds = self._guesses[row]
            self.acceptance_model.learn(row, kinds, tokens, row.tokens[start : start + len(tokens)])
        tokens, kinds = self._follow(row, row.tokens[-CONTEXT:], length)
        tokens, acceptance_probs = self._likely(row, tokens, kinds, 1.0)
        self._guesses[row] = len(row.tokens), tokens, kinds
        return tokens, acceptance_probs

    def _likely(
        self, row: Row, tokens: list[int], kinds: list[int], acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """With an acceptance model the chain as far as it is likely, and its acceptance probabilities."""
        acceptance_probs = list[float]()
        if self.acceptance_model is None:
            return tokens, acceptance_probs
        for kind in kinds:
            acceptance_prob *= self.acceptance_model.chance(row, kind)
            if acceptance_prob < UNLIKELY:
                break
            acceptance_probs.append(acceptance_prob)
        return tokens[: len(acceptance_probs)], acceptance_probs

    def _follow(self, row: Row, text: list[int], length: int) -> tuple[list[int], list[int]]:
        """Up to `length` tokens after a text, and their kinds."""
        own, drafted, kinds = self._table(row), list[int](), list[int]()
        while len(drafted) < length and (found := self._likeliest(own, self._contexts(text))) is not None:
            drafted.append(found[0])
            kinds.append(found[1])
            text = [*text[-CONTEXT + 1 :], found[0]]
        return drafted, kinds

    def _likeliest(self, own: _Table, contexts: Sequence[int]) -> tuple[int, int] | None:
        """A token and its kind: two for each length of context, of the own table and of the common one."""
        for first, part in ((1, contexts[1:]), (0, contexts[:1])):
            for common, table in enumerate((own, self._common)):
                if (found := table.best(part)) is not None:
                    return found[0], 2 * (first + found[1]) + common
        return None

    def _table(self, row: Row) -> _Table:
        """The row's own, which first reads as much of the text as it can hold."""
        table = self._own.get(row)
        if table is None:
            table = self._own[row] = _Table(self.width)
            for end in range(max(1, len(row.tokens) - SPAN), len(row.tokens)):
                table.enter(self._contexts(row.tokens[max(0, end - CONTEXT) : end]), row.tokens[end : end + 1])
        return table

    def _contexts(self, text: Sequence[int]) -> list[int]:
        """The last 1, 2, ... CONTEXT tokens of a text, each as one number."""
        numbers, number = list[int](), 1  # the leading 1 tells contexts of different lengths apart
        for token in reversed(text[-CONTEXT:]):
            number = number * self.vocab_size + token
            numbers.append(number)
        return numbers


USAGE = "token_recycling[:WIDTH]"
TRAITS = Traits(samples=False, costs_time=False, default_length=7)


def build(setup: Setup, argument: str) -> TokenRecyclingDrafter:
    """ "token_recycling" or "token_recycling:WIDTH", the alternatives stored per context."""
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= LIMIT):
        raise UsageError(
            f"drafter='token_recycling:{argument}'; allowed: token_recycling, or token_recycling:WIDTH with 1 to "
            f"{LIMIT} alternatives"
        )
    return TokenRecyclingDrafter(
        setup.vocab_size, int(argument or WIDTH), AcceptanceModel(PRIOR) if setup.acceptance_probs else None
    )
