"""The draft length through a text that turns to quoting its prompt and back to prose, word by word, without a model.

python benchmarks/policy_change.py README.md docs/exactness.md --plot lengths.png
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from policy_replay import Recording, auto, cost_model_of
from terminal import Count, console, run

from slipstream.bench.speed_model.formula import Costs
from slipstream.core.rounds import Round
from slipstream.errors import UsageError


def main(
    prompt: Path,
    prose: Path,
    words: Count = 60,
    quoted: Count = 120,
    ms: Annotated[float, typer.Option(min=0.001)] = 20.0,
    more: Annotated[float, typer.Option(min=0)] = 0.6,
    plot: Path | None = None,
) -> None:
    """Prose of one file, a quotation of the other, which is the prompt, then prose again.

    words, quoted: lengths of the parts. ms, more: of a forward, and for each further token it verifies.
    """
    ids: dict[str, int] = {}
    read, other = (
        [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+|\S", _text(file))] for file in (prompt, prose)
    )
    if len(read) < 2 * quoted or len(other) < 2 * words:
        raise UsageError(f"{len(read)} and {len(other)} words; allowed: at least {2 * quoted} and {2 * words}")
    parts = [other[:words], read[len(read) // 2 :][:quoted], other[words : 2 * words]]
    rounds = replayed(read, [token for part in parts for token in part], simple_costs(ms, more))
    show(rounds, len(read), (len(parts[0]), len(parts[0]) + len(parts[1])), plot)


def show(rounds: Sequence[Round], first: int, quotation: tuple[int, int], plot: Path | None) -> None:
    """Print, and draw, how much was drafted. first: tokens of the prompt; quotation: its first token and its end."""
    within = [
        [r for r in rounds if start <= r.start - first < end] for start, end in pairwise([0, *quotation, 1 << 30])
    ]
    for name, part in zip(("prose", "quotation", "prose again"), within, strict=True):
        lengths = " ".join(str(len(r.draft)) for r in part)
        tokens = sum(len(r.tokens) for r in part)
        console.print(f"{name}: {tokens} tokens in {len(part)} rounds; drafted {lengths}", soft_wrap=True)
    if plot is not None:
        _plot(rounds, first, quotation, plot)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(file)!r} cannot be read: {error}; allowed: text files") from error


def simple_costs(ms: float, more: float) -> Costs:
    """A forward of one token and what each further one costs; retrieval drafts cost nothing."""
    widths = {width: ms + more * (width - 1) for width in range(1, 33)}
    return Costs({1: widths}, {1: dict.fromkeys(widths, 0.0)}, {1: 0.0}, {1: 0.0})


def replayed(prompt: list[int], output: list[int], costs: Costs) -> list[Round]:
    """The rounds of `suffix` with lengths that pay, over a known text."""
    recording = Recording(costs, [{"prompt": prompt, "output": output}])
    replay = auto(recording, "suffix:outputs=0", cost_model_of(costs))
    replay.seconds([0])
    return replay.rows[0].rounds


def _plot(rounds: Sequence[Round], first: int, ends: tuple[int, int], file: Path) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    at = [r.start - first for r in rounds]
    axes.step(at, [len(r.draft) for r in rounds], where="post", label="drafted")
    axes.step(at, [r.num_accepted_tokens for r in rounds], where="post", label="accepted")
    axes.axvspan(*ends, alpha=0.15, label="quotation")
    axes.set(xlabel="token of the output", ylabel="tokens per round")
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {str(file)!r} cannot be written: {error}; allowed: a picture in a folder") from error
    console.print(f"written: {file}")


if __name__ == "__main__":
    run(main)
