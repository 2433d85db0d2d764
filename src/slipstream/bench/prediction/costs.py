"""What a round is made of, in milliseconds.

Prompt processing is not part of it. This module knows neither models nor acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.prediction.cost_tables import (
    Grid,
    Points,
    TokenCosts,
    at,
    between,
    check_grid,
    check_points,
    grid_of,
    is_count,
    is_number,
    points_of,
)
from slipstream.core.cache_state import Shapes
from slipstream.errors import UsageError

WIDTHS = ("padded", "alone", "totals")


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round.

    target: one target forward in which every row is padded to the longest, by batch (rows) and width (tokens per row);
    overhead: what else a round of that shape takes (inputs, acceptance, the transfer, bookkeeping); draft_step: one
    more draft token for every row, by batch (of trees one more level); draft_round: what the drafter takes besides in
    every round, by batch (all of it for most retrieval drafters).
    drafter: whose times these are; machine: where they come from.
    padded, alone, totals: the shapes kept to where they must agree to the bit, see `Shapes.widths`, `alone` and
    `totals`; empty where forwards fit their tokens.
    ragged: rounds without padding, None where rows are always padded. trees: rounds that verify trees, None where the
    target takes none or none were measured; move: bringing an accepted branch to its place, per row.
    """

    target: Grid
    overhead: Grid
    draft_step: Points
    draft_round: Points
    drafter: str = ""
    machine: str = ""
    padded: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    ragged: TokenCosts | None = None
    trees: TokenCosts | None = None
    move: float = 0.0

    def __post_init__(self) -> None:
        for name in ("target", "overhead"):
            check_grid(name, getattr(self, name))
        for name in ("draft_step", "draft_round"):
            check_points(name, 1, getattr(self, name))
        if any(ms <= 0 for points in self.target.values() for ms in points.values()):
            raise UsageError("costs: target holds a 0; allowed: milliseconds > 0")
        for name in WIDTHS:
            values = getattr(self, name)
            if not all(map(is_count, values)) or list(values) != sorted(set(values)):
                raise UsageError(f"costs: {name}={values!r}; allowed: rising whole numbers >= 1")
        if not is_number(self.move) or self.move < 0:
            raise UsageError(f"costs: move={self.move!r}; allowed: milliseconds >= 0")

    @property
    def shapes(self) -> Shapes:
        """The shapes that forwards keep to."""
        return Shapes(self.padded, 0, alone=self.alone, totals=self.totals)

    @property
    def widest(self) -> int:
        """The longest width known for every batch."""
        return min(max(points) for points in self.target.values())

    def pad(self, width: int, rows: float = 2) -> int:
        """The width of the forward that takes `width` tokens per row."""
        return self.shapes.pad(width, 1 if rows == 1 else 2)

    @property
    def batches(self) -> list[int]:
        """The batches measured."""
        return sorted(self.target)

    def forward(self, batch: float, width: int) -> float:
        """Milliseconds of a target forward whose rows are padded."""
        return at(self.target, batch, width, "target")

    def drafting(self, batch: float, longest: int) -> float:
        """Milliseconds in which the drafter proposes up to `longest` tokens per row.

        A round in which no row drafts anything is charged for the attempt: a retrieval drafter that
        finds nothing takes as long.
        """
        steps = longest * between(self.draft_step, batch, "draft_step: batch") if longest else 0.0
        return steps + between(self.draft_round, batch, "draft_round: batch")

    def round(self, batch: float, width: int, drafted: int) -> float:
        """Milliseconds of a padded round of `width` columns whose longest row drafted `drafted` tokens."""
        return self.drafting(batch, drafted) + self.plain(batch, width)

    def plain(self, batch: float, width: int) -> float:
        """Milliseconds of a round without a drafter whose forward has `width` columns."""
        return self.forward(batch, width) + at(self.overhead, batch, width, "overhead")

    def verifying(self, batch: int, longest: int, drafted: Sequence[int]) -> Any:
        """[len(drafted)] milliseconds of rounds but for drafting, of chains of which the longest has so many tokens.

        drafted: the draft tokens of all rows. Rows are padded only where that takes no more tokens, as in the loop.
        """
        width = self.pad(longest + 1, batch)
        found = np.full(len(drafted), self.plain(batch, width))
        if self.ragged is None or batch == 1 or not self.ragged.spans(batch):
            return found
        totals = [self.shapes.pad_total(batch + count) for count in drafted]
        fit = [i for i, total in enumerate(totals) if total is not None and total < batch * width]
        found[fit] = self.ragged.milliseconds(batch, [totals[i] or 0 for i in fit])
        return found

    def verifying_trees(self, batch: int, nodes: Sequence[int]) -> Any:
        """[len(nodes)] milliseconds of rounds that verify trees, but for drafting. nodes: of all rows."""
        assert self.trees is not None
        if batch in self.trees.forward and nodes and batch + max(nodes) > (most := self.trees.most(batch)):
            raise UsageError(f"trees of {batch + max(nodes)} tokens were not measured; allowed: up to {most}")
        return self.trees.milliseconds(batch, [self.shapes.pad_tree(batch + n, batch) or batch + n for n in nodes])

    def takes_tree(self, batch: int, nodes: int) -> bool:
        """Whether the allowed shapes take trees of so many nodes in all; where none do, main chains are verified."""
        if self.trees is None or not self.trees.spans(batch):
            return False
        return self.shapes.pad_tree(batch + nodes, batch) is not None

    def knows_trees(self, nodes: float) -> bool:
        """Whether rounds of trees of so many nodes per row were measured at every batch at which they are taken."""
        if self.trees is None:
            return False
        sizes = {batch: ceil(round(batch * nodes, 9)) for batch in self.trees.batches}
        return all(batch + n <= self.trees.most(batch) for batch, n in sizes.items() if self.takes_tree(batch, n))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Costs:
        """What `to_dict` wrote, also after JSON has made text of the numbers that are keys."""
        known = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or set(values) != set(known):
            found = list(values) if isinstance(values, dict) else type(values).__name__
            raise UsageError(f"costs: {found}; allowed: an object with exactly {', '.join(known)}")
        for name in WIDTHS:
            if not isinstance(values[name], list | tuple):
                raise UsageError(f"costs: {name}={values[name]!r}; allowed: a list of widths")
        made: dict[str, Any] = {name: grid_of(name, values[name]) for name in ("target", "overhead")}
        made |= {name: points_of(name, values[name]) for name in ("draft_step", "draft_round")}
        made |= {name: TokenCosts.from_dict(name, values[name]) for name in ("ragged", "trees")}
        made |= {name: str(values[name]) for name in ("drafter", "machine")}
        made |= {name: tuple(values[name]) for name in WIDTHS}
        return cls(**made, move=values["move"])

    def save(self, path: Path) -> None:
        """Write to a JSON file."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"costs file {str(path)!r} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Read what `save` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"costs file {str(path)!r} cannot be read: {error}") from error
        return cls.from_dict(values)
