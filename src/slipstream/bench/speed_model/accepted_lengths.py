"""How far drafts get, as probabilities: assumed, or estimated from a run's statistics and from its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from math import isfinite
from typing import Any

from slipstream.checks import is_number, is_whole
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rounds import chain_end, depths
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Acceptance:
    """How far drafts get. accepted[i]: probability that a round accepts more than i draft tokens; proposed[i]: that it
    proposes more than i, where drafters that find nothing propose less than they are asked for.

    By linearity of expectation these two are all that tokens per round depend on, whether or not positions are
    independent. Positions of a tree are its levels. nodes[i]: how many tokens a tree proposes for level i where it has
    that level; branched[i]: probability that more than i tokens are accepted, the last of these off the main chain.
    Both are empty for chains.
    """

    accepted: tuple[float, ...]
    proposed: tuple[float, ...]
    nodes: tuple[float, ...] = ()
    branched: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = {name: len(getattr(self, name)) for name in ("proposed", "nodes", "branched")}
        wrong = [name for name, size in sizes.items() if size != self.longest and (size or name == "proposed")]
        if wrong:
            counts = f"accepted for {self.longest} positions, {wrong[0]} for {sizes[wrong[0]]}"
            raise UsageError(f"acceptance: {counts}; allowed: the same number")
        for name in ("accepted", "proposed"):
            values = getattr(self, name)
            if not all(is_number(p, 0, 1) for p in values) or any(b > a for a, b in pairwise(values)):
                raise UsageError(f"acceptance: {name}={values!r}; allowed: probabilities from 0 to 1 that never rise")
        if any(a > p for a, p in zip(self.accepted, self.proposed, strict=True)):
            raise UsageError(f"acceptance: accepted={self.accepted!r}; allowed: at most proposed={self.proposed!r}")
        if any(not isfinite(n) or n < 1 for n in self.nodes):
            raise UsageError(f"acceptance: nodes={self.nodes!r}; allowed: numbers >= 1")
        if any(not 0 <= b <= a for a, b in zip(self.accepted, self.branched, strict=bool(self.branched))):
            raise UsageError(f"acceptance: branched={self.branched!r}; allowed: at most accepted={self.accepted!r}")

    @classmethod
    def constant(cls, alpha: float, siblings: Sequence[float] = ()) -> Acceptance:
        """Every draft token is accepted with probability alpha, independently (Leviathan et al. 2023, section 3.1).

        siblings: of those beside each draft token, see `by_position`.
        """
        return cls.by_position([alpha] * MAX_DRAFT_TOKENS, siblings=[siblings] * MAX_DRAFT_TOKENS if siblings else ())

    @classmethod
    def by_position(
        cls,
        alphas: Sequence[float],
        proposed: Sequence[float] | None = None,
        siblings: Sequence[Sequence[float]] = (),
    ) -> Acceptance:
        """alphas[i]: probability that draft token i is accepted if all before it were, and it was proposed.

        proposed: as in the class; all of them by default. Lengths are taken as independent of what is accepted.
        siblings[i]: under the same condition, for each of the tokens beside draft token i the probability that it is
        the one accepted, which ends the round. So 1 + i tokens or more are accepted with the probability that i of the
        chain are, times alphas[i] + sum(siblings[i]): path probabilities summed over the nodes of a level (Chen et al.
        2024, "Sequoia", section 3.1).
        """
        sizes = tuple(proposed) if proposed is not None else (1.0,) * len(alphas)
        of_siblings = list(siblings) or [()] * len(alphas)
        probabilities = (*alphas, *(alpha for alphas_beside in of_siblings for alpha in alphas_beside))
        if wrong := [alpha for alpha in probabilities if not is_number(alpha, 0, 1)]:
            raise UsageError(f"acceptance {wrong[0]!r}; allowed: from 0 to 1")
        for name, count in (("proposed", len(sizes)), ("siblings", len(of_siblings))):
            if count != len(alphas):
                raise UsageError(f"acceptance: {len(alphas)} alphas, {name} for {count}; allowed: the same number")
        accepted, branched, reached = list[float](), list[float](), 1.0
        for alpha, size, alphas_beside in zip(alphas, sizes, of_siblings, strict=True):
            if alpha + sum(alphas_beside) > 1 + 1e-9:
                raise UsageError(
                    f"acceptance {alpha:g} of a draft token and {sum(alphas_beside):g} of those beside it; allowed: at "
                    "most 1 together, since the target chooses one of them"
                )
            branched.append(reached * min(sum(alphas_beside), 1 - alpha) * size)
            reached *= alpha
            accepted.append(min(size, reached * size + branched[-1]))
        nodes = tuple(1.0 + len(alphas_beside) for alphas_beside in of_siblings)
        return cls(tuple(accepted), sizes, nodes, tuple(branched)) if siblings else cls(tuple(accepted), sizes)

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Acceptance:
        """What a run's `Stats.to_dict()` says; for trees with `LevelCounts.to_dict()` merged in.

        Known up to the longest draft of that run. Drafts are shortened at a text's end; in short runs this shows as
        positions not proposed.
        """
        rounds = stat(stats, "num_rounds")
        if not rounds:
            raise UsageError("stats: num_rounds=0; allowed: at least one round")
        accepted, proposed = counts_of(stats, "accepted_per_position"), counts_of(stats, "drafted_per_position")
        chances = tuple(n / rounds for n in accepted), tuple(n / rounds for n in proposed)
        if (drafted := stat(stats, "num_draft_tokens")) <= sum(proposed):
            return cls(*chances)
        node_counts = counts_of(stats, "nodes_per_position") if "nodes_per_position" in stats else ()
        if len(node_counts) != len(proposed):
            raise UsageError(
                f"stats: {drafted} draft tokens in {sum(proposed)} places, which were trees, and no counts of their "
                "branches; allowed: statistics of chains, trees with their rounds beside the statistics, or --alpha "
                "with --sibling-alpha"
            )
        nodes = tuple(n / levels for n, levels in zip(node_counts, proposed, strict=True))
        return cls(*chances, nodes, tuple(n / rounds for n in counts_of(stats, "branched_per_position")))

    @property
    def main_chain(self) -> Acceptance:
        """The drafts without their branches."""
        if not self.branches:
            return self
        on_chain = tuple(a - b for a, b in zip(self.accepted, self.branched, strict=True))
        return Acceptance(tuple(min(on_chain[: i + 1]) for i in range(len(on_chain))), self.proposed)

    @property
    def branches(self) -> bool:
        """Whether drafts have more tokens than levels."""
        return any(n > 1 for n in self.nodes)

    def num_nodes(self, levels: int) -> float:
        """Mean number of tokens of a draft that has so many levels."""
        return sum(self.nodes[:levels]) if self.nodes else float(levels)

    @property
    def longest(self) -> int:
        """The longest draft about which something is known."""
        return len(self.accepted)


def stat(stats: Mapping[str, Any], name: str) -> Any:
    """A total of `Stats.to_dict()`."""
    value = _field(stats, name)
    if not is_number(value, 0):
        raise UsageError(f"stats: {name}={value!r:.60}; allowed: a number >= 0")
    return value


def counts_of(stats: Mapping[str, Any], name: str) -> Sequence[int]:
    """The totals by position of `Stats.to_dict()`."""
    value = _field(stats, name)
    if not isinstance(value, list | tuple) or not all(map(is_whole, value)):
        raise UsageError(f"stats: {name}={value!r:.60}; allowed: a list of whole numbers >= 0")
    return value


def _field(stats: Mapping[str, Any], name: str) -> Any:
    if name not in stats:
        raise UsageError(f"stats: {name} is missing; allowed: what Stats.to_dict() gives")
    return stats[name]


@dataclass
class LevelCounts:
    """Totals over rounds, by level of the draft; those of a chain are its positions.

    nodes_per_position: draft tokens proposed for it; branched_per_position: rounds that accepted one for it which is
    not on the main chain.
    """

    nodes_per_position: list[int] = field(default_factory=list)
    branched_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rounds: Iterable[Mapping[str, Any]]) -> LevelCounts:
        """Counted over recorded rounds (`slipstream.bench.records.compact`)."""
        counts = cls()
        for record in rounds:
            parents = record.get("parents") or range(-1, len(record["draft"]) - 1)
            end, levels = chain_end(parents), depths(parents)
            longer = max(levels, default=-1) + 1 - len(counts.nodes_per_position)
            counts.nodes_per_position.extend([0] * longer)
            counts.branched_per_position.extend([0] * longer)
            for level in levels:
                counts.nodes_per_position[level] += 1
            for node in record.get("path") or ():
                counts.branched_per_position[levels[node]] += node >= end
        return counts

    @classmethod
    def total(cls, parts: Sequence[LevelCounts]) -> LevelCounts:
        """The sum of several counts."""
        columns = [zip_longest(*(getattr(part, f.name) for part in parts), fillvalue=0) for f in fields(cls)]
        return cls(*([sum(level) for level in levels] for levels in columns))

    def to_dict(self) -> dict[str, list[int]]:
        """For JSON, beside `Stats.to_dict()`."""
        return dict(vars(self))
