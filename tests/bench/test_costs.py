"""Costs: tables of measurements, the roofline model, and the probe on small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.speed_model.formula import best_length
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs, Machine, paper_costs
from slipstream.models.toy import load_toy
from tests.support.architectures import tiny_model
from tests.support.cost_cases import linear_costs
from tests.support.markers import subcases
from tests.support.tiny_models import Oracle, perturbed, shared
from tests.support.vocabularies import decoder_of, fable_model


def test_costs_are_interpolated_in_tokens() -> None:
    costs = Costs(
        {2: {1: 10.0, 5: 18.0}, 4: {1: 12.0, 5: 40.0}},
        {2: {1: 1.0, 5: 1.0}, 4: {1: 2.0, 5: 2.0}},
        {2: 3, 4: 5},
        {2: 0, 4: 0},
    )
    assert costs.forward(2, 1) == 10
    assert costs.forward(2, 2) == pytest.approx(12)
    assert costs.forward(3, 5) == pytest.approx(29)
    assert costs.forward(2.5, 3) == pytest.approx(0.75 * 14 + 0.25 * 26)
    assert costs.plain(3, 1) + costs.drafting(3, 2) == pytest.approx(2 * 4 + 11 + 1.5)
    assert costs.batches == [2, 4] and costs.widest == 5


@settings(max_examples=40)
@given(st.floats(1, 8), st.integers(1, 17))
def test_interpolation_is_exact_where_costs_are_linear(batch: float, width: int) -> None:
    sparse = Costs(
        {b: {w: 10 + 0.5 * b * w for w in (1, 4, 17)} for b in (1, 3, 8)},
        {b: {1: 0.0, 17: 0.0} for b in (1, 8)},
        {1: 1.0, 8: 1.0},
        {1: 0.0, 8: 0.0},
    )
    assert sparse.forward(batch, width) == pytest.approx(10 + 0.5 * batch * width)


@subcases("batch, width", [(1, 18), (9, 1), (0.5, 1), (1, 0), (3, 18)])
def test_extrapolation_is_refused(batch: float, width: int) -> None:
    with pytest.raises(UsageError, match="was not measured; allowed: 1 to"):
        linear_costs().forward(batch, width)


def test_costs_survive_a_round_trip_through_json(tmp_path: Path) -> None:
    costs = linear_costs(drafter="ngram", machine="m", padded=(2, 4))
    costs.save(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@subcases(
    "change, message",
    [
        ({"target": {}}, "target={}"),
        ({"target": {1: {1: 0.0}}}, "target holds a 0"),
        ({"target": {1: {1: -1.0}}}, "1: -1.0"),
        ({"target": {1: {1: "x"}}}, "1: 'x'"),
        ({"target": {1: {1: float("nan")}}}, "nan"),
        ({"target": {"a": {1: 1.0}}}, "the key 'a'"),
        ({"target": 3}, "target=3"),
        ({"overhead": {0: {1: 1.0}}}, "a batch of 0"),
        ({"draft_step": {}}, "draft_step={}"),
        ({"padded": [4, 2]}, "padded=(4, 2)"),
        ({"padded": 3}, "padded=3"),
        ({"speed": 3}, "allowed: an object with exactly target"),
    ],
)
def test_broken_costs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Costs.from_dict(linear_costs().to_dict() | change)
    assert message in str(error.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Costs.read(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match="costs: list"):
        Costs.read(tmp_path / "list.json")
    with pytest.raises(UsageError, match="cannot be written"):
        linear_costs().save(tmp_path)


def test_the_roofline_is_bound_by_bandwidth_and_by_compute() -> None:
    machine = Machine(memory_bandwidth=1e12, flops=100e12, launch_ms=0.5, overhead_ms=0.1)
    assert machine.forward_ms(1e9, 1) == pytest.approx(2.0)  # 2 GB at 1 TB/s
    assert machine.forward_ms(1e9, 1000) == pytest.approx(20.0)  # 2 TFLOP at 100 TFLOP/s
    assert machine.forward_ms(1e8, 1) == 0.5  # no forward is faster than the launches of its kernels
    costs = paper_costs(1e9, 1e8, machine, batches=(1, 200), widths=range(1, 6))
    assert costs.forward(1, 5) == costs.forward(1, 1) == pytest.approx(2.0)
    assert costs.forward(200, 5) == pytest.approx(20.0)
    assert costs.plain(1, 5) + costs.drafting(1, 4) == pytest.approx(4 * 0.5 + 2.0 + 0.1)
    assert best_length(costs, 0.8) > 0 == best_length(costs, 0.3, batch=200)
    assert paper_costs(1e9, 0, machine).draft_step[1] == 0


@subcases(
    "build, message",
    [
        (lambda: Machine(memory_bandwidth=0, flops=1), "memory_bandwidth=0; allowed: a finite number > 0"),
        (lambda: Machine(memory_bandwidth=1, flops=1, launch_ms=-1), "launch_ms=-1; allowed: a finite number >= 0"),
        (lambda: paper_costs(0, 0, Machine(memory_bandwidth=1, flops=1)), "target_params=0"),
        (lambda: paper_costs(1e9, -1, Machine(memory_bandwidth=1, flops=1)), "draft_params=-1"),
    ],
)
def test_invalid_machines_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        build()
    assert message in str(error.value)


@pytest.mark.parametrize("drafter", ["ngram", "model", "ngram_table", "none"])
def test_the_probe_measures_the_toy_with_every_kind_of_drafter(drafter: str) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", drafter=drafter, reproducible=False)
    costs = measure_costs(decoder, (1, 3), (1, 4, 8), seconds=0.05)
    assert costs.drafter == drafter and costs.batches == [1, 3] and set(costs.target[3]) == {1, 4, 8}
    assert costs.forward(3, 8) > costs.forward(1, 1) > 0  # the toy computes position by position
    assert costs.padded == ()
    if drafter == "model":  # each draft token is a forward of its own
        assert costs.draft_step[1] > 0.1 * costs.forward(1, 1)
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "rwkv", "llama4_text"])
def test_a_probe_of_recurrent_models_leaves_their_text_unchanged(family: str, drafter: str) -> None:
    decoder = SpeculativeDecoder(tiny_model(family), tiny_model(family), drafter=drafter)
    prompt, params = list(range(3, 30)), SamplingParams(max_tokens=12, ignore_eos=True)
    before = decoder.generate(prompt, params).token_ids
    costs = measure_costs(decoder, (1, 2), (1, 4), seconds=0.01)
    assert costs.forward(2, 4) > 0 and costs.drafter == drafter
    assert decoder.generate(prompt, params).token_ids == before


@pytest.mark.parametrize("drafter", ["model", "cross_vocabulary"])
def test_the_probe_measures_a_draft_model_with_another_vocabulary(drafter: str) -> None:
    decoder = decoder_of(load_toy("toy"), fable_model("bytes"), drafter=drafter, num_draft_tokens=4)
    assert decoder.bridge is not None
    costs = measure_costs(decoder, (1, 2), (1, 4), seconds=0.01)
    assert costs.forward(2, 4) > 0


def test_a_probe_leaves_later_texts_unchanged() -> None:
    target, draft = shared("llama"), perturbed("llama")
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, reproducible=False)
    prompt, params = list(range(3, 40)), SamplingParams(max_tokens=24)
    before = decoder.generate(prompt, params).token_ids
    costs = measure_costs(decoder, (1, 2), (1, 4), seconds=0.05)
    assert costs.draft_step[1] > 0 and costs.forward(2, 4) > 0
    assert decoder.generate(prompt, params).token_ids == before
    assert decoder.generate([prompt, prompt[5:]], params)[0].token_ids == before


def test_the_probe_times_the_reproducible_shapes() -> None:
    decoder = SpeculativeDecoder(shared("llama"), reproducible=True)
    costs = measure_costs(decoder, (1,), range(1, 6), seconds=0.05)
    assert costs.padded == decoder._target_session.shapes.widths != ()
    assert set(costs.target[1]) == {costs.width_for(width, 1) for width in range(1, 6)}


def test_the_probe_runs_the_requested_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder("toy", reproducible=False)
    backend = decoder.target.backend
    shapes, forward = set(), type(backend).forward

    def spy(self: Any, tokens: torch.Tensor, starts: list[int], *, first_slot: int, logits: bool) -> torch.Tensor:
        if logits:
            shapes.add(tuple(tokens.shape))
        return forward(self, tokens, starts, first_slot=first_slot, logits=logits)

    monkeypatch.setattr(type(backend), "forward", spy)
    measure_costs(decoder, (2,), (1, 6), seconds=0.01, drafter=Oracle([[0]] * 2))
    assert {(2, 1), (2, 6)} <= shapes


def test_a_drafter_object_is_measured_when_given() -> None:
    class Mine:
        def propose(self, rows: Any, lengths: Any, sampler: Any) -> Draft:
            return Draft.from_lists([[1] * n for n in lengths], sampler.device)

    decoder = SpeculativeDecoder("toy", drafter=Mine(), reproducible=False)
    with pytest.raises(UsageError, match="drafter 'Mine' was given as an object"):
        measure_costs(decoder, seconds=0.01)
    assert measure_costs(decoder, widths=(1, 2), seconds=0.01, drafter=Mine()).drafter == "Mine"


@subcases(
    "options, message",
    [
        ({"batch_sizes": ()}, "batch_sizes=[]"),
        ({"batch_sizes": (0,)}, "batch_sizes=[0]"),
        ({"widths": ()}, "widths=[]"),
        ({"widths": (66,)}, "widths=[66]; allowed: from 1 to 65"),
        ({"seconds": 0}, "seconds=0"),
    ],
)
def test_the_probe_refuses_invalid_options(options: dict[str, Any], message: str) -> None:
    decoder = SpeculativeDecoder("toy", reproducible=False)
    with pytest.raises(UsageError) as error:
        measure_costs(decoder, **options)
    assert message in str(error.value)
