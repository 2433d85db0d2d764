"""lm-eval's `local-completions` on SmolLM2 in float32: the scores, texts and log-likelihoods of its own `hf` model."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder
from tests.support.client_runs import ROOT, needs, run_script
from tests.support.running_server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.smollm2, needs("lm_eval")]
TASKS = ROOT / "tests" / "clients" / "tasks"
CLOSE = 2e-3  # tolerance of a log-likelihood: a sum over a few tokens in float32, by other kernels


def load() -> SpeculativeDecoder:
    return SpeculativeDecoder("smollm2", dtype="float32", acceptance="match", drafter="suffix")


@pytest.fixture(scope="module")
def results() -> Any:
    with running_server(load) as server:
        folder = str(cache_folder() / "smollm2")
        return run_script("lm_eval", "lm_eval_runs.py", server.url, "smollm2", folder, str(TASKS), folder=TASKS)


def test_scores_equal_those_of_lm_evals_own_model(results: Any) -> None:
    expected, ours, remote = (results[name]["scores"] for name in ("hf", "server", "remote tokenizer"))
    assert ours == expected and {"facts_choice acc,none", "facts_choice acc_norm,none"} < set(expected)
    # not all right, not all wrong
    assert remote.items() <= expected.items() and 0 < expected["facts_choice acc,none"] < 1


def test_texts_equal_those_of_lm_evals_own_model(results: Any) -> None:
    expected, ours = (results[name]["answers"]["facts_text"] for name in ("hf", "server"))
    assert ours == expected and len({str(text) for text in expected}) > 4


@pytest.mark.parametrize("name", ["server", "remote tokenizer"])
def test_log_likelihoods_equal_those_of_lm_evals_own_model_up_to_rounding(results: Any, name: str) -> None:
    by_hf, by_server = (results[expected_responses]["answers"]["facts_choice"] for expected_responses in ("hf", name))
    for expected_responses, responses in zip(by_hf, by_server, strict=True):
        for ((log_likelihood, greedy),), ((expected, likeliest),) in zip(responses, expected_responses, strict=True):
            assert float(log_likelihood) == pytest.approx(float(expected), abs=CLOSE) and greedy == likeliest
