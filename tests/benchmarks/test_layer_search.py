"""The search for layers that draft well: its counts, the order of its candidates, its output and its records."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from slipstream import SpeculativeDecoder
from slipstream.bench.speed_model.round_costs import Costs
from tests.support.layer_skip_cases import by_hugging_face, decoder_of
from tests.support.tiny_models import fresh, prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llama() -> Any:
    return fresh("llama", num_hidden_layers=4)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("layer_search")


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (0, 1, 2, 3)])
def test_the_search_counts_the_accepted_drafts_of_every_choice_of_layers(
    search: Any, llama: Any, layers: tuple[int, ...]
) -> None:
    texts, depth, length = [prompts((n,), seed=n)[0] for n in (9, 17)], 3, 12
    truth = search.Truth(decoder_of(llama), texts, length, depth)
    candidate = truth.judge(layers)
    rows = []
    for text, prompt in zip(truth.texts, texts, strict=True):
        assert len(text) == len(prompt) + length
        for at in range(len(prompt), len(text) - depth + 1, depth):
            draft = by_hugging_face(llama, layers, text[:at], depth)
            right = [a == b for a, b in zip(draft, text[at:], strict=False)]
            rows.append(torch.tensor(right).long().cumprod(0).float())
    assert len(rows) == 8 and candidate.accepted == tuple(torch.stack(rows).mean(0).tolist())
    assert truth.judge(layers) == candidate  # a candidate does not change the model
    assert (candidate.agreement == 1) == (len(layers) == 4) and candidate.agreement >= candidate.accepted[-1]


def test_layers_are_removed_one_by_one_the_least_useful_first(search: Any) -> None:
    class Truth:
        def judge(self, layers: Sequence[int]) -> Any:
            worth = sum((0.1, 0.4, 0.2, 0.3)[i] for i in layers)
            return search.Candidate(tuple(layers), worth, (worth,))

    tried = [candidate.layers for candidate in search.candidates(Truth(), 4, 1)]
    assert tried == [(0,), (0, 1), (0, 1, 2), (1, 2, 3), (1, 3), (1,)]
    assert [search.spans(layers) for layers in tried[2:]] == ["3", "1-3", "1,3", "1-1"]
    assert search.spans((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


def test_the_search_predicts_speed_ups_as_slipstream_does(search: Any) -> None:
    costs = Costs({1: {1: 10.0, 2: 11.0, 3: 12.0}}, {1: {1: 1.0, 2: 1.0, 3: 1.0}}, {1: 0.0}, {1: 0.0})
    prices = search.Prices(costs, one=0.1, count=4)
    best = prices.value(search.Candidate((0, 2), 0.7, (0.8, 0.7)))
    assert (best.num_draft_tokens, best.tokens_per_round) == (2, 2.5)
    assert best.step == pytest.approx(4.0 / 11) and best.speed_up == pytest.approx(2.5 * 11 / (13 + 2 * 4.0))


@pytest.mark.parametrize("pays", [True, False])
def test_the_search_prints_saves_and_says_whether_it_pays(
    search: Any, pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    file, app = tmp_path / "prompts.jsonl", typer.Typer()
    file.write_text('{"prompt": "The heron looked at"}\n{"prompt": "A sparrow called out"}\n')
    if not pays:
        monkeypatch.setattr(search, "expected_tokens", lambda *_: 1.0)
        monkeypatch.setattr(search, "predicted_speed_up", lambda *_: 0.9)
    app.command()(search.main)
    arguments = ["toy", str(file), "--seconds", "0.01", "--num-prompts", "2", "--max-tokens", "8", "--save"]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.output
    summary = json.loads(result.output.splitlines()[-1])
    assert (summary["best"]["speed_up"] > 1) == pays
    assert ("Should pay" in result.output) == pays == ("Does not pay" not in result.output)
    decoder = SpeculativeDecoder("toy", drafter="layer_skip", num_draft_tokens=2)
    lengths = {len(context) for context in decoder.drafter.session.backend._counts}
    assert (file.parent / "layers").exists() == pays == ("Not saved" not in result.output)
    assert lengths == (set(summary["best"]["layers"]) if pays else {0, 1, 2, 3})
