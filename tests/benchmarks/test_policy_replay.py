"""Automatic draft lengths, replayed over known texts and costs: their gains, their losses, and their causes."""

from __future__ import annotations

import copy
import json
import random
import statistics
from pathlib import Path
from typing import Any

import policy_replay as replay
import pytest
import terminal

from slipstream.bench.speed_formula import table_of
from slipstream.core.rounds import Round
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.policies import Fixed
from slipstream.errors import UsageError
from slipstream.reproducibility.expert_reads import ExpertReads
from tests.support.command_line import run_main

pytestmark = pytest.mark.slow

STEPS, FIXED = 6, (0, 1, 2, 4, 6)  # fixed lengths to compare with


def costs(column: float = 1.0, step: float = 5.0, experts: ExpertReads | None = None) -> CostModel:
    """A forward of one token takes 20 ms, each further one `column`, a step of the draft model `step`; rows padded.

    experts: of a mixture, whose forwards take as much longer as these take.
    """
    forwards = {tokens: 20 + column * (tokens - 1) for tokens in range(1, 300)}
    steps = {1: step, 8: step}
    return CostModel(measured=forwards, together=forwards, max_batch_size=8, steps=steps, experts=experts)


def texts(accepted: float, count: int = 8, length: int = 80, seed: int = 0) -> list[dict[str, Any]]:
    """Texts without repetition; the draft model is right with this probability, and reports it truthfully."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        output = [rng.randrange(1 << 19) for _ in range(length)]
        model = [[[t if rng.random() < accepted else 0, 1] for t in output[at : at + STEPS]] for at in range(length)]
        model = [line + [[0, 1]] * (STEPS - len(line)) for line in model]
        made.append({"family": "f", "prompt": [1, 2, 3], "output": output, "model": model})
        made[-1]["chances"] = [[[accepted, 0.0]] * STEPS for _ in range(length)]
    return made


def seconds(
    records: list[dict[str, Any]],
    table: CostModel,
    drafter: str,
    length: int | None,
    batch: int = 1,
    cost_model: CostModel | None = None,
) -> float:
    """Seconds of one setting over all texts; length None is automatic, by `cost_model` (default: the costs)."""
    recording = replay.Recording(table, copy.deepcopy(records))
    if length is None:
        played = replay.auto(recording, drafter, cost_model or replay.cost_model_of(table))
    else:
        played = replay.replay_of(recording, drafter, lambda _: Fixed(length))
    return sum(played.seconds(range(at, at + batch)) for at in range(0, len(records), batch))


@pytest.mark.each_value
@pytest.mark.parametrize("accepted", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("step", [1.0, 5.0, 15.0])
def test_auto_lengths_come_near_the_best_fixed_length(accepted: float, step: float) -> None:
    records, table = texts(accepted), costs(step=step)
    fixed = [seconds(records, table, "model", n) for n in FIXED]
    assert seconds(records, table, "model", None) < 1.08 * min(fixed)


@pytest.mark.parametrize("batch", [4])
@pytest.mark.parametrize("accepted", [0.0, 0.6, 0.9])
def test_auto_lengths_come_near_the_best_fixed_length_in_batches(accepted: float, batch: int) -> None:
    records, table = texts(accepted, count=12), costs(column=0.3)  # fewer end before the lengths are learned
    fixed = [seconds(records, table, "model", n, batch) for n in FIXED]
    assert seconds(records, table, "model", None, batch) < 1.08 * min(fixed)


@pytest.mark.each_value
@pytest.mark.parametrize("exponent", [0.75, 0.9, 1.0])  # of trained mixtures on texts; of independent choices
@pytest.mark.parametrize("accepted", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 4])
def test_auto_is_hardly_ever_slower_than_plain_decoding_of_a_mixture(
    accepted: float, exponent: float, batch: int
) -> None:
    table = costs(0.3, experts=ExpertReads(128, 8, 3.3, exponent))  # 57 % of a token's time is that of its experts
    records = texts(accepted)
    fixed = [seconds(records, table, "model", n, batch) for n in FIXED]
    took = seconds(records, table, "model", None, batch)
    assert took < fixed[0] / 0.97 and took < 1.08 * min(fixed)


@pytest.mark.parametrize("drafter", ["suffix:outputs=0", "ngram", "ngram_table", "model"])
def test_drafting_random_tokens_costs_almost_nothing(drafter: str) -> None:
    rng = random.Random(1)
    records = texts(0.0, count=6)
    for record in records:
        record["output"] = [rng.randrange(50) for _ in range(200)]  # everything seems to repeat, nothing does
        record["prompt"] = [rng.randrange(50) for _ in range(300)]
        # sure, and wrong
        record["model"], record["chances"] = ([[[60, 61]] * STEPS] * 200, [[[0.9, 0.05]] * STEPS] * 200)
    plain = seconds(records, costs(), "none", 0)
    assert seconds(records, costs(), drafter, None) < plain / (0.96 if drafter in ("ngram_table", "model") else 0.97)
    assert drafter == "suffix:outputs=0" or seconds(records, costs(), drafter, 6) > plain / 0.97


def replayed(prompt: list[int], output: list[int], costs: CostModel) -> list[Round]:
    """The rounds of `suffix` with automatic lengths over a known text."""
    recording = replay.Recording(costs, [{"prompt": prompt, "output": output}])
    replayed_text = replay.auto(recording, "suffix:outputs=0", replay.cost_model_of(costs))
    replayed_text.seconds([0])
    return replayed_text.rows[0].rounds


@pytest.mark.parametrize("column", [1.0, 4.0])
def test_auto_lengths_adapt_when_a_text_begins_and_ends_a_quotation(column: float) -> None:
    rng = random.Random(2)
    prompt, prose = ([rng.randrange(1 << 18) for _ in range(n)] for n in (300, 120))
    output = prose[:60] + prompt[100:220] + prose[60:]
    rounds = replayed(prompt, output, costs(column, step=0.0))
    drafted = [(round.start - len(prompt), len(round.draft)) for round in rounds]
    assert all(length <= 1 for at, length in drafted if at < 60 or at >= 200)
    quoting = [length for at, length in drafted if 60 <= at < 180]
    assert next(i for i, length in enumerate(quoting) if length >= 7) < 8
    assert len(quoting) < 30


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_recording_is_replayed_with_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_mixture: bool
) -> None:
    records = [record | {"family": name} for record, name in zip(texts(0.8, 3, 30), "aab", strict=True)]
    measured = table_of(costs(experts=ExpertReads(64, 8, 0.5) if is_mixture else None))
    table = {"widths": [], "alone": [], "totals": [], **measured, "token": 0.1}
    header = {"costs": table, "search": 0.1, "overhead": 0.5, "trees": False}
    file = tmp_path / "record.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in [header, *records]))
    code, out, _ = run_main(capsys, monkeypatch, lambda: terminal.run(replay.main), file)
    assert code == 0 and "batch 1, 6 texts" in out and out.count("1.00") >= 3


def test_measured_costs_can_be_given_an_error() -> None:
    table = costs()
    assert replay.cost_model_of(table).measured == table.measured
    off = [taken / table.measured[width] for width, taken in replay.cost_model_of(table, 0.1).measured.items()]
    assert 0.05 < statistics.stdev(off) < 0.2


@pytest.mark.parametrize("text", [None, "{}", '{"category": "a", "prompt": "x"}', ""])
def test_a_file_that_is_not_a_recording_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "file.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match="allowed") as error:
        replay.main(file)
    assert "\n" not in str(error.value)
    if text is None:  # the command says the same
        code, out, err = run_main(capsys, monkeypatch, lambda: terminal.run(replay.main), file)
        assert code == 2 and err == "" and out.count("\n") == 1
