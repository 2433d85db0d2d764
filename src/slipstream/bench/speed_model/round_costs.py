"""The costs of a round's parts, in milliseconds: measured (`Costs`), or from a machine's roofline (`paper_costs`).

Prompt processing is not included. This module knows neither models nor acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.checks import is_number, is_whole, read_json, save_json
from slipstream.core.kv_slots import Shapes
from slipstream.errors import UsageError

WIDTHS = ("padded", "alone", "totals")

Points = Mapping[int, float]  # tokens or batch -> milliseconds
Grid = Mapping[int, Points]  # batch -> tokens -> milliseconds
Arrays = tuple[Any, Any]  # the same points: ascending tokens or batches, and their milliseconds


def arrays_of(points: Points) -> Arrays:
    """The points as arrays for `interpolated`."""
    xs = sorted(points)
    return np.array(xs, dtype=float), np.array([points[x] for x in xs], dtype=float)


def interpolated(points: Arrays, x: float, name: str) -> float:
    """Linear between the points; UsageError outside them."""
    xs, milliseconds = points
    if not xs[0] <= x <= xs[-1]:
        raise UsageError(f"{name} {x:g} was not measured; allowed: {xs[0]:g} to {xs[-1]:g}")
    return float(np.interp(x, xs, milliseconds))


def neighbours(batches: Iterable[int], batch: float, name: str) -> dict[int, float]:
    """The measured batches around a batch, with their weights; only the batch itself if it was measured."""
    measured = sorted(batches)
    if not measured[0] <= batch <= measured[-1]:
        raise UsageError(f"{name} {batch:g} was not measured; allowed: {measured[0]} to {measured[-1]}")
    low, high = max(b for b in measured if b <= batch), min(b for b in measured if b >= batch)
    share = (batch - low) / (high - low) if high > low else 0.0
    return {low: 1 - share, high: share} if share else {low: 1.0}


@dataclass(frozen=True)
class TokenCosts:
    """Milliseconds of rounds whose rows are not padded, by batch and by the tokens of all rows.

    forward: one target forward; overhead: everything else in such a round except drafting.
    """

    forward: Grid
    overhead: Grid

    def __post_init__(self) -> None:
        for name in ("forward", "overhead"):
            check_grid(name, getattr(self, name))

    def spans(self, batch: int) -> bool:
        """Whether a batch lies between those measured."""
        return min(self.forward) <= batch <= max(self.forward)

    def milliseconds(self, batch: int, tokens: Sequence[int]) -> Any:
        """[len(tokens)] milliseconds of rounds of so many tokens; beyond the measured points, those of the nearest.

        A batch that was not measured is interpolated between its neighbours at the same number of tokens per row.
        """
        total = np.zeros(len(tokens))
        for near, weight in neighbours(self.forward, batch, "batch").items():
            scaled = np.asarray(tokens, dtype=float) * near / batch
            total += weight * sum(np.interp(scaled, *arrays[near]) for arrays in self._arrays)
        return total

    @cached_property
    def _arrays(self) -> list[dict[int, Arrays]]:
        grids = (self.forward, self.overhead)
        return [{batch: arrays_of(points) for batch, points in grid.items()} for grid in grids]

    @classmethod
    def from_dict(cls, name: str, values: object) -> TokenCosts | None:
        """Read from JSON; None stays None."""
        if values is None:
            return None
        if not isinstance(values, dict) or set(values) != {"forward", "overhead"}:
            raise UsageError(f"costs: {name}={values!r}; allowed: null, or an object with forward and overhead")
        return cls(**{part: grid_of(f"{name}.{part}", values[part]) for part in ("forward", "overhead")})


def check_grid(name: str, grid: object) -> None:
    """Refuse a value that is not a table of tables."""
    if not isinstance(grid, Mapping) or not grid:
        raise UsageError(f"costs: {name}={grid!r}; allowed: a table batch -> width -> milliseconds")
    for batch, points in grid.items():
        check_points(f"{name}[{batch!r}]", batch, points)


def check_points(name: str, batch: object, points: object) -> None:
    """Refuse a value that is not a table of milliseconds."""
    if not is_whole(batch, 1):
        raise UsageError(f"costs: {name} is for a batch of {batch!r}; allowed: whole numbers >= 1")
    if not isinstance(points, Mapping) or not points:
        raise UsageError(f"costs: {name}={points!r}; allowed: a table of milliseconds with at least one entry")
    for x, ms in points.items():
        if not is_whole(x, 1) or not is_number(ms, 0):
            raise UsageError(f"costs: {name} has {x!r}: {ms!r}; allowed: whole numbers >= 1 with milliseconds >= 0")


def points_of(name: str, table: object) -> dict[int, Any]:
    """A table from JSON, with the numbers that are its keys restored from text."""
    if not isinstance(table, dict):
        raise UsageError(f"costs: {name}={table!r}; allowed: a table")
    return {_whole(name, x): ms for x, ms in table.items()}


def grid_of(name: str, table: object) -> dict[int, dict[int, Any]]:
    """A table of tables from JSON; see `points_of`."""
    return {batch: points_of(name, points) for batch, points in points_of(name, table).items()}


def _whole(name: str, key: object) -> int:
    if not str(key).isdecimal():
        raise UsageError(f"costs: {name} has the key {key!r}; allowed: whole numbers >= 1")
    return int(str(key))


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round.

    target: verifying with one target forward in which every row is padded to the longest, by batch (rows) and width
    (tokens per row); overhead: what else a round of that shape takes (acceptance, the transfer, bookkeeping);
    draft_step: one more draft token for every row, by batch; draft_round: what else the drafter takes in every round,
    by batch (all of its time for most retrieval drafters).
    drafter: whose times these are; machine: where they come from.
    padded, alone, totals: the shapes of forwards that must agree to the bit, see `Shapes.widths`, `alone` and `totals`;
    empty if every forward is as large as its tokens.
    ragged: rounds without padding, None if rows are always padded. trees: rounds that verify trees, None if the target
    takes none or none were measured.
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

    def __post_init__(self) -> None:
        for name in ("target", "overhead"):
            check_grid(name, getattr(self, name))
        for name in ("draft_step", "draft_round"):
            check_points(name, 1, getattr(self, name))
        if any(ms <= 0 for points in self.target.values() for ms in points.values()):
            raise UsageError("costs: target holds a 0; allowed: milliseconds > 0")
        for name in WIDTHS:
            values = getattr(self, name)
            if not all(is_whole(value, 1) for value in values) or list(values) != sorted(set(values)):
                raise UsageError(f"costs: {name}={values!r}; allowed: rising whole numbers >= 1")

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.padded, 0, alone=self.alone, totals=self.totals)

    @property
    def widest(self) -> int:
        """The longest width known for every batch."""
        return min(max(points) for points in self.target.values())

    def width_for(self, width: int, rows: float = 2) -> int:
        """The width of the forward that takes `width` tokens per row."""
        return self.shapes.width_for(width, 1 if rows == 1 else 2)

    @property
    def batches(self) -> list[int]:
        """The batch sizes measured, ascending."""
        return sorted(self.target)

    def forward(self, batch: float, width: int) -> float:
        """Milliseconds of a target forward whose rows are padded."""
        return self._padded_ms("target", batch, width)

    def drafting(self, batch: float, longest: int) -> float:
        """Milliseconds in which the drafter proposes up to `longest` tokens per row.

        A round in which no row drafts anything still costs the attempt: a retrieval drafter that finds nothing takes as
        long.
        """
        step, fixed = (
            interpolated(arrays_of(getattr(self, name)), batch, f"{name}: batch")
            for name in ("draft_step", "draft_round")
        )
        return (longest * step if longest else 0.0) + fixed

    def plain(self, batch: float, width: int) -> float:
        """Milliseconds of a round without a drafter whose forward has `width` columns."""
        return self.forward(batch, width) + self._padded_ms("overhead", batch, width)

    def _padded_ms(self, name: str, batch: float, width: int) -> float:
        """Linear in the number of tokens: between widths at a measured batch, then between batches at that width."""
        grid = self._arrays[name]
        near = neighbours(grid, batch, f"{name}: batch")
        if len(near) > 1:  # a single row may be padded to more than the rows of a batch
            return sum(
                weight * interpolated(grid[b], max(width, grid[b][0][0]), f"{name}: width")
                for b, weight in near.items()
            )
        return interpolated(grid[int(batch)], width, f"{name}: width")

    @cached_property
    def _arrays(self) -> dict[str, dict[int, Arrays]]:
        grids = {"target": self.target, "overhead": self.overhead}
        return {name: {b: arrays_of(points) for b, points in grid.items()} for name, grid in grids.items()}

    def verifying(self, batch: int, longest: int, drafted: Sequence[int]) -> Any:
        """[len(drafted)] milliseconds of rounds without drafting, for chains of which the longest has `longest` tokens.

        drafted: the draft tokens of all rows. Rows are padded only if that takes no more tokens, as in the loop.
        """
        width = self.width_for(longest + 1, batch)
        milliseconds = np.full(len(drafted), self.plain(batch, width))
        if self.ragged is None or batch == 1 or not self.ragged.spans(batch):
            return milliseconds
        totals = [self.shapes.total_for(batch + count) for count in drafted]
        fit = [i for i, total in enumerate(totals) if total is not None and total < batch * width]
        milliseconds[fit] = self.ragged.milliseconds(batch, [totals[i] or 0 for i in fit])
        return milliseconds

    def to_dict(self) -> dict[str, Any]:
        """All costs as JSON has them; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Costs:
        """What `to_dict` returned, also after JSON has turned the numbers that are keys into text."""
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            shown = list(values) if isinstance(values, dict) else type(values).__name__
            raise UsageError(f"costs: {shown}; allowed: an object with exactly {', '.join(names)}")
        for name in WIDTHS:
            if not isinstance(values[name], list | tuple):
                raise UsageError(f"costs: {name}={values[name]!r}; allowed: a list of widths")
        costs: dict[str, Any] = {name: grid_of(name, values[name]) for name in ("target", "overhead")}
        costs |= {name: points_of(name, values[name]) for name in ("draft_step", "draft_round")}
        costs |= {name: TokenCosts.from_dict(name, values[name]) for name in ("ragged", "trees")}
        costs |= {name: str(values[name]) for name in ("drafter", "machine")}
        costs |= {name: tuple(values[name]) for name in WIDTHS}
        return cls(**costs)

    def save(self, path: Path) -> None:
        """Write to a JSON file."""
        save_json("costs file", path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Read what `save` wrote."""
        return cls.from_dict(read_json("costs file", path))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine on paper. memory_bandwidth: bytes/s; flops: FLOP/s of dense matrix products in the weights' precision.

    bytes_per_param: 2 for bf16. launch_ms: the least a forward takes, whatever its size (kernel launches); overhead_ms:
    per round. Use figures the machine reaches, not those of its data sheet, or take the result as a bound.
    """

    memory_bandwidth: float
    flops: float
    bytes_per_param: float = 2.0
    launch_ms: float = 0.0
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), "> 0" if f.name[-3:] != "_ms" else ">= 0"
            if not is_number(value, 0) or (value == 0 and least == "> 0"):
                raise UsageError(f"{f.name}={value!r}; allowed: a finite number {least}")

    def forward_ms(self, params: float, tokens: int) -> float:
        """Milliseconds of a forward of `tokens` tokens in all: reading the weights or computing, whichever is longer.

        The roofline (Williams, Waterman and Patterson 2009) with 2 FLOPs per parameter and token (Kaplan et al. 2020,
        section 2.1); attention and the reading of the KV cache are left out.
        """
        reading = params * self.bytes_per_param / self.memory_bandwidth
        computing = 2 * params * tokens / self.flops
        return max(self.launch_ms, 1e3 * max(reading, computing))


def paper_costs(
    target_params: float,
    draft_params: float,
    machine: Machine,
    *,
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
    widths: Iterable[int] = range(1, 18),
) -> Costs:
    """Costs of a target and a draft model by the roofline of a machine; draft_params=0 is a free retrieval draft.

    Parameters are the active ones (all of them, except in mixtures of experts). Rows are not padded, and a tree costs
    what its tokens cost.
    """
    for name, value, least in (("target_params", target_params, 1), ("draft_params", draft_params, 0)):
        if not is_number(value, least):
            raise UsageError(f"{name}={value!r}; allowed: a finite number >= {least}")
    batches, widths = list(batches), list(widths)
    step = {b: machine.forward_ms(draft_params, b) if draft_params else 0.0 for b in batches}
    overhead = float(machine.overhead_ms)
    tokens = {b: range(b, b * max(widths) + 1) for b in batches}
    flat = TokenCosts(
        {b: {n: machine.forward_ms(target_params, n) for n in tokens[b]} for b in batches},
        {b: dict.fromkeys(tokens[b], overhead) for b in batches},
    )
    return Costs(
        target={b: {w: machine.forward_ms(target_params, b * w) for w in widths} for b in batches},
        overhead={b: {w: overhead for w in widths} for b in batches},
        draft_step=step,
        draft_round=dict.fromkeys(batches, 0.0),
        ragged=flat,
        trees=flat,
        drafter="model" if draft_params else "retrieval",
        machine=f"on paper: {machine.memory_bandwidth / 1e9:g} GB/s, {machine.flops / 1e12:g} TFLOP/s",
    )
