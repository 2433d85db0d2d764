"""What statistics do not say of drafts: how many tokens each level of a tree has, and which accepted ones branched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from slipstream.core.trees import chain_end, depths


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
        """Of recorded rounds, see `slipstream.bench.records.compact`."""
        counts = cls()
        for done in rounds:
            parents = done.get("parents") or range(-1, len(done["draft"]) - 1)
            end, levels = chain_end(parents), depths(parents)
            longer = max(levels, default=-1) + 1 - len(counts.nodes_per_position)
            counts.nodes_per_position.extend([0] * longer)
            counts.branched_per_position.extend([0] * longer)
            for level in levels:
                counts.nodes_per_position[level] += 1
            for node in done.get("path") or ():
                counts.branched_per_position[levels[node]] += node >= end
        return counts

    @classmethod
    def total(cls, parts: Sequence[LevelCounts]) -> LevelCounts:
        """Several added up."""
        columns = [zip_longest(*(getattr(one, f.name) for one in parts), fillvalue=0) for f in fields(cls)]
        return cls(*([sum(level) for level in levels] for levels in columns))

    def to_dict(self) -> dict[str, list[int]]:
        """To be laid beside `Stats.to_dict()`."""
        return dict(vars(self))
