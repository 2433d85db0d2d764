"""Pairs of random weights: both models follow the tour, the draft model with the requested probability."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError


@pytest.fixture
def random_pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("random_pair")


def test_a_tour_visits_every_token_but_the_end_once(random_pair: Any) -> None:
    following = random_pair.tour(1000, 1.0).tolist()
    seen, token = [], 0
    for _ in range(999):
        token = following[token]
        seen.append(token)
    assert sorted(seen) == list(range(999)) and following[seen[-1]] == seen[0]


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_the_draft_model_is_right_with_the_requested_probability(random_pair: Any, acceptance: float) -> None:
    right = random_pair.tour(50000, 1.0) == random_pair.tour(50000, acceptance)
    assert right[:-1].float().mean().item() == pytest.approx(acceptance, abs=0.01)


@pytest.mark.exhaustive
def test_models_follow_the_tour_from_different_tokens(random_pair: Any, tmp_path: Path) -> None:
    random_pair.write_pair("tiny", tmp_path, acceptance=0.8)
    prompts = [json.loads(line)["turns"][0] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    following, params = random_pair.tour(512, 1.0).tolist(), SamplingParams(max_tokens=16)
    with SpeculativeDecoder(str(tmp_path / "target"), str(tmp_path / "draft"), num_draft_tokens=3) as decoder:
        results = [decoder.generate(prompt, params) for prompt in prompts]
        before = [decoder.encode(prompt)[-1] for prompt in prompts]
    assert len(set(before)) == len(prompts)
    for token, result in zip(before, results, strict=True):
        for generated in result.token_ids:
            token = following[token]
            assert generated == token
    accepted = sum(result.stats.num_accepted_tokens for result in results)
    assert 0.4 < accepted / sum(result.stats.num_draft_tokens for result in results) < 0.9


def test_an_unknown_shape_is_refused(random_pair: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^shape '9b'; allowed: tiny, 135m, 1.5b, 7b$"):
        random_pair.main("9b", tmp_path)
