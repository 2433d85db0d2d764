"""Which charts a folder of runs gives, as data; `plots` draws them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from slipstream.bench.arms import parse_arm
from slipstream.bench.bootstrap import Estimate
from slipstream.bench.records import Arm
from slipstream.bench.report.charts import Chart, Line, Point
from slipstream.bench.report.ratios import acceptance, acceptance_at, decoding_speed_up
from slipstream.bench.report.report_data import Data
from slipstream.bench.summary import ArmSummary
from slipstream.bench.sweep_grid import Cell, Series, parity_of, series_of

MOST = 6  # arms in one picture
INTERVALS = "Bars are 95 % bootstrap intervals over prompts"
T = TypeVar("T")
SPEED = f"{INTERVALS} and repeats; prompt processing is counted."


def charts(data: Data) -> list[Chart]:
    """All charts that the runs have something for, in the order of a report."""
    found: list[Chart] = []
    for batch in dict.fromkeys(one.batch for one in data.summaries):
        own = [one for one in data.summaries if one.batch == batch]
        series = [one for one in series_of(data.summaries) if one.batch == batch]
        made = [*_families(data, own), *_over_length(data, series), *_by_position(data, own), *_predicted(data, own)]
        found += [replace(c, name=f"{c.name}_batch_{batch}", title=f"{c.title}, batch size {batch}") for c in made]
    return found


def selected(summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    """All of a few arms; of many, the fastest draft length of each drafter, rule and temperature."""
    timed = [one for one in summaries if one.speed is not None]
    if len(timed) <= MOST:
        return timed
    fastest: dict[Arm, ArmSummary] = {}
    for one in timed:
        kind = replace(parse_arm(one.arm), name="", num_draft_tokens=None)
        if kind not in fastest or _speed(one) > _speed(fastest[kind]):
            fastest[kind] = one
    return list(fastest.values())


def _speed(one: ArmSummary) -> float:
    return one.speed.tokens_per_second.value if one.speed is not None else 0.0


def _families(data: Data, summaries: Sequence[ArmSummary]) -> Iterator[Chart]:
    """Speed-up by family, several arms to a picture."""
    shown = [one for one in selected(summaries) if one.arm != data.references[one.arm]]
    for number, part in enumerate(_parts(shown), 1):
        families = list(dict.fromkeys(family for one in part for family in one.families))
        lines = _filled(Line(data.label(one.arm), _family_points(one, families), look) for look, one in enumerate(part))
        if lines:
            name, title = _numbered("speed_up_by_family", "Speed-up", number, len(shown))
            bases = {data.label(data.references[one.arm]) for one in part}
            compared = next(iter(bases)) if len(bases) == 1 else "plain decoding at the same temperature"
            label = f"speed-up over {compared} (times)"
            caption = f"Geometric mean over prompts. {SPEED} The dotted line is the speed of {compared}."
            caption = f"{caption} Texts: {parity_of(part)}."
            yield Chart(name, title, caption, label, "", lines, "rows", (*families, "all"), level=1.0)


def _family_points(one: ArmSummary, families: Sequence[str]) -> tuple[Point, ...]:
    speeds = [one.families.get(family) for family in families] + [one.speed]
    found = [(row, speed.speed_up) for row, speed in enumerate(speeds) if speed is not None]
    return tuple(_point(row, ratio) for row, ratio in found if ratio is not None)


def _over_length(data: Data, series: Sequence[Series]) -> Iterator[Chart]:
    """Tokens per second and acceptance rate over draft length."""
    for number, part in enumerate(_parts(series), 1):
        speeds = _filled(Line(data.label(one.name), _speeds(one.cells), look) for look, one in enumerate(part))
        rates = _filled(Line(data.label(one.name), _rates(data, one.cells), look) for look, one in enumerate(part))
        x = "draft length (tokens)"
        if speeds:
            name, title = _numbered("speed_by_draft_length", "Tokens per second", number, len(series))
            caption = f"Output tokens per second; length 0 is plain decoding. {SPEED} Texts: {_parity(part)}."
            yield Chart(name, title, caption, x, "tokens per second", speeds)
        if rates:
            name, title = _numbered("acceptance_by_draft_length", "Acceptance rate", number, len(series))
            caption = f"Accepted of all drafted tokens. {INTERVALS}."
            label = "accepted / drafted"
            yield Chart(name, title, caption, x, label, rates, share=True)


def _speeds(cells: Sequence[Cell]) -> tuple[Point, ...]:
    timed = [(cell.length, cell.summary.speed) for cell in cells]
    return tuple(_point(length, speed.tokens_per_second) for length, speed in timed if speed is not None)


def _rates(data: Data, cells: Sequence[Cell]) -> tuple[Point, ...]:
    rates = [(c.length, acceptance(data.runs_of(c.summary.arm, c.summary.batch))) for c in cells if c.length > 0]
    return tuple(_point(length, rate) for length, rate in rates if rate is not None)


def _by_position(data: Data, summaries: Sequence[ArmSummary]) -> Iterator[Chart]:
    """The share of draft tokens accepted at each position of the draft."""
    drafting = [one for one in summaries if one.stats is not None and one.stats.num_draft_tokens]
    if len(drafting) > MOST:
        longest: dict[Arm, ArmSummary] = {}
        for one in sorted(drafting, key=lambda s: len(s.acceptance_by_position)):
            longest[replace(parse_arm(one.arm), name="", num_draft_tokens=None)] = one
        drafting = [one for one in drafting if one in longest.values()]
    for number, part in enumerate(_parts(drafting), 1):
        lines = tuple(Line(data.label(one.arm), _positions(data, one), look) for look, one in enumerate(part))
        name, title = _numbered("acceptance_by_position", "Acceptance by position", number, len(drafting))
        caption = f"Accepted of the tokens drafted at each position. {INTERVALS}."
        label = "accepted / drafted"
        yield Chart(name, title, caption, "position in the draft (tokens)", label, lines, share=True)


def _positions(data: Data, one: ArmSummary) -> tuple[Point, ...]:
    runs = data.runs_of(one.arm, one.batch)
    shares = [(place, acceptance_at(runs, place)) for place in range(len(one.acceptance_by_position))]
    return tuple(_point(place + 1, ratio) for place, ratio in shares if ratio is not None)


def _predicted(data: Data, summaries: Sequence[ArmSummary]) -> Iterator[Chart]:
    """What the cost model predicts against what was observed: over draft length, and all arms in one picture."""
    caption = "Predicted from the accepted lengths and the measured costs of a round; prompt processing is not counted."
    known = [one for one in series_of(summaries) if any(cell.summary.prediction for cell in one.cells)]
    for number, part in enumerate(_parts(known, MOST // 2), 1):
        lines = []
        for look, one in enumerate(part):
            arms = [(cell.length, cell.summary) for cell in one.cells if cell.summary.prediction]
            lines.append(Line(data.label(one.name), tuple(_observed(data, arm, n) for n, arm in arms), look))
            predicted = tuple(Point(n, _prediction(arm, "predicted")) for n, arm in arms)
            lines.append(Line(f"{data.label(one.name)}, predicted", predicted, look, plain=True))
        name, title = _numbered("predicted_by_draft_length", "Predicted and observed", number, len(known), MOST // 2)
        x, y = "draft length (tokens)", "speed-up over plain decoding (times)"
        yield Chart(name, title, f"{caption} {INTERVALS}. Texts: {_parity(part)}.", x, y, tuple(lines), level=1.0)
    kinds: dict[str, list[Point]] = {}
    drafting = [one for one in summaries if one.prediction]
    for arm in drafting:
        kind = str(parse_arm(arm.arm).drafter)
        kinds.setdefault(kind, []).append(_observed(data, arm, _prediction(arm, "predicted")))
    if kinds:
        dots = tuple(Line(kind, tuple(points), look) for look, (kind, points) in enumerate(kinds.items()))
        x, y = "predicted speed-up (times)", "observed speed-up (times)"
        caption = (
            f"{caption} One point per arm; on the dotted line both agree. {INTERVALS}. Texts: {parity_of(drafting)}."
        )
        yield Chart("predicted_observed", "Predicted against observed", caption, x, y, dots, "scatter")


def _observed(data: Data, one: ArmSummary, x: float) -> Point:
    """The speed-up that stands beside the prediction, with the relative width of the bootstrap interval."""
    value = _prediction(one, "observed")
    base = data.runs_of(data.references[one.arm], one.batch)
    spread = decoding_speed_up(data.runs_of(one.arm, one.batch), base)
    if spread is None or spread.low is None or spread.high is None:
        return Point(x, value)
    return Point(x, value, value * spread.low / spread.value, value * spread.high / spread.value)


def _prediction(one: ArmSummary, key: str) -> float:
    assert one.prediction is not None
    return one.prediction[key]


def _point(x: float, estimate: Estimate) -> Point:
    return Point(x, estimate.value, estimate.low, estimate.high)


def _parity(series: Sequence[Series]) -> str:
    return parity_of(cell.summary for one in series for cell in one.cells if cell.length > 0)


def _filled(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _parts(items: Sequence[T], most: int = MOST) -> list[Sequence[T]]:
    return [items[at : at + most] for at in range(0, len(items), most)]


def _numbered(name: str, title: str, number: int, count: int, most: int = MOST) -> tuple[str, str]:
    """File name and title of a picture; those of several pictures of one kind are numbered."""
    pictures = -(-count // most)
    return (name, title) if pictures == 1 else (f"{name}_{number}", f"{title} ({number} of {pictures})")
