"""What a round is made of, in milliseconds: measured tables, or the roofline of a machine one does not have.

Prompt processing is not part of it. This module knows neither models nor acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from slipstream.errors import UsageError

Points = Mapping[int, float]
Grid = Mapping[int, Points]  # batch -> width -> milliseconds


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round.

    target: one target forward, by batch (rows) and width (tokens per row); overhead: what else a round of that shape
    takes (inputs, acceptance, the transfer, bookkeeping); draft_step: one more draft token for every row, by batch;
    draft_round: what the drafter takes besides in every round, by batch (all of it for most retrieval drafters).
    drafter: whose times these are; machine: where they come from; padded: the widths forwards are padded to where
    they keep to shapes that agree to the bit, empty where they fit their tokens.
    """

    target: Grid
    overhead: Grid
    draft_step: Points
    draft_round: Points
    drafter: str = ""
    machine: str = ""
    padded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("target", "overhead"):
            grid = getattr(self, name)
            if not isinstance(grid, Mapping) or not grid:
                raise UsageError(f"costs: {name}={grid!r}; allowed: a table batch -> width -> milliseconds")
            for batch, points in grid.items():
                _check_points(f"{name}[{batch!r}]", batch, points)
        for name in ("draft_step", "draft_round"):
            _check_points(name, 1, getattr(self, name))
        if any(ms <= 0 for points in self.target.values() for ms in points.values()):
            raise UsageError("costs: target holds a 0; allowed: milliseconds > 0")
        if not all(map(_is_count, self.padded)) or list(self.padded) != sorted(set(self.padded)):
            raise UsageError(f"costs: padded={self.padded!r}; allowed: rising whole numbers >= 1")

    @property
    def widest(self) -> int:
        """The longest width known for every batch."""
        return min(max(points) for points in self.target.values())

    def pad(self, width: int) -> int:
        """The width of the forward that takes `width` tokens per row."""
        return next((wide for wide in self.padded if wide >= width), width)

    @property
    def batches(self) -> list[int]:
        """The batches measured."""
        return sorted(self.target)

    def forward(self, batch: float, width: int) -> float:
        """Milliseconds of a target forward."""
        return _at(self.target, batch, width, "target")

    def round(self, batch: float, width: int, drafted: int) -> float:
        """Milliseconds of a round whose forward has `width` columns and whose longest row drafted `drafted` tokens.

        A round in which no row drafts anything is charged for the attempt: a retrieval drafter that
        finds nothing takes as long.
        """
        drafting = drafted * _between(self.draft_step, batch, "draft_step: batch") if drafted else 0.0
        drafting += _between(self.draft_round, batch, "draft_round: batch")
        return drafting + self.plain(batch, width)

    def plain(self, batch: float, width: int) -> float:
        """Milliseconds of a round without a drafter whose forward has `width` columns."""
        return self.forward(batch, width) + _at(self.overhead, batch, width, "overhead")

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
        grids: dict[str, Any] = {
            name: {_whole(name, batch): _points(name, points) for batch, points in _items(name, values[name])}
            for name in ("target", "overhead")
        }
        tables: dict[str, Any] = {name: _points(name, values[name]) for name in ("draft_step", "draft_round")}
        if not isinstance(values["padded"], list | tuple):
            raise UsageError(f"costs: padded={values['padded']!r}; allowed: a list of widths")
        names: dict[str, Any] = {name: str(values[name]) for name in ("drafter", "machine")}
        return cls(**grids, **tables, **names, padded=tuple(values["padded"]))

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
            if not _is_number(value) or value < 0 or (value == 0 and least == "> 0"):
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

    Parameters are the active ones (all of them but in mixtures of experts).
    """
    for name, value, least in (("target_params", target_params, 1), ("draft_params", draft_params, 0)):
        if not _is_number(value) or value < least:
            raise UsageError(f"{name}={value!r}; allowed: a finite number >= {least}")
    batches, widths = list(batches), list(widths)
    step = {b: machine.forward_ms(draft_params, b) if draft_params else 0.0 for b in batches}
    return Costs(
        target={b: {w: machine.forward_ms(target_params, b * w) for w in widths} for b in batches},
        overhead={b: {w: float(machine.overhead_ms) for w in widths} for b in batches},
        draft_step=step,
        draft_round=dict.fromkeys(batches, 0.0),
        drafter="model" if draft_params else "retrieval",
        machine=f"on paper: {machine.memory_bandwidth / 1e9:g} GB/s, {machine.flops / 1e12:g} TFLOP/s",
    )


def _at(grid: Grid, batch: float, width: int, name: str) -> float:
    """Linear in the number of tokens: between widths at a measured batch, then between batches at that width."""
    if batch in grid:
        return _between(grid[int(batch)], width, f"{name}: width")
    low = max((b for b in grid if b < batch), default=None)
    high = min((b for b in grid if b > batch), default=None)
    if low is None or high is None:
        raise UsageError(f"{name}: batch {batch:g} was not measured; allowed: {min(grid)} to {max(grid)}")
    ends = {b: _between(grid[b], width, f"{name}: width") for b in (low, high)}
    return _between(ends, batch, f"{name}: batch")


def _between(points: Points, x: float, what: str) -> float:
    """Piecewise linear; outside the points nothing is known."""
    if x in points:
        return points[int(x)]
    low = max((p for p in points if p < x), default=None)
    high = min((p for p in points if p > x), default=None)
    if low is None or high is None:
        raise UsageError(f"{what} {x:g} was not measured; allowed: {min(points)} to {max(points)}")
    share = (x - low) / (high - low)
    return points[low] + share * (points[high] - points[low])


def _check_points(name: str, batch: object, points: object) -> None:
    if not _is_count(batch):
        raise UsageError(f"costs: {name} is for a batch of {batch!r}; allowed: whole numbers >= 1")
    if not isinstance(points, Mapping) or not points:
        raise UsageError(f"costs: {name}={points!r}; allowed: a table of milliseconds with at least one entry")
    for x, ms in points.items():
        if not _is_count(x) or not _is_number(ms) or ms < 0:
            raise UsageError(f"costs: {name} has {x!r}: {ms!r}; allowed: whole numbers >= 1 with milliseconds >= 0")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _items(name: str, table: object) -> list[tuple[object, object]]:
    if not isinstance(table, dict):
        raise UsageError(f"costs: {name}={table!r}; allowed: a table")
    return list(table.items())


def _points(name: str, table: object) -> dict[int, Any]:
    return {_whole(name, x): ms for x, ms in _items(name, table)}


def _whole(name: str, key: object) -> int:
    if not str(key).isdecimal():
        raise UsageError(f"costs: {name} has the key {key!r}; allowed: whole numbers >= 1")
    return int(str(key))
