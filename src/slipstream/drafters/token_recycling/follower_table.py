"""What followed contexts of a few tokens, best first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

KEEP = 0.9  # weight of what was known, each time a context comes again
SPAN = 1 << 15  # a table holds the last SPAN to 2 * SPAN contexts


class FollowerTable:
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

    def best(self, contexts: Sequence[int], count: int = 1) -> tuple[list[int], int] | None:
        """The `count` likeliest followers of the last of these contexts that is known, and which that is."""
        for at in range(len(contexts) - 1, -1, -1):
            known = self._find(contexts[at])
            if known is not None:
                return list(islice(known, count)), at
        return None

    def _find(self, context: int) -> dict[int, float] | None:
        known = self._young.get(context)
        return self._old.get(context) if known is None else known

    def _merged(self, ranks: dict[int, float], known: dict[int, float]) -> dict[int, float]:
        for token, weight in known.items():
            ranks[token] = ranks.get(token, 0.0) + KEEP * weight
        return dict(sorted(ranks.items(), key=itemgetter(1), reverse=True)[: len(self._weights)])
