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
CLOSE = 2e-3  # of a log-likelihood: the sum of a few tokens', in float32, by other kernels


def load() -> SpeculativeDecoder:
    return SpeculativeDecoder("smollm2", dtype="float32", acceptance="match", drafter="suffix")


@pytest.fixture(scope="module")
def found() -> Any:
    with running_server(load) as server:
        folder = str(cache_folder() / "smollm2")
        return run_script("lm_eval", "lm_eval_runs.py", server.url, "smollm2", folder, str(TASKS), folder=TASKS)


def test_scores_equal_those_of_lm_evals_own_model(found: Any) -> None:
    own, ours, remote = (found[name]["scores"] for name in ("hf", "server", "remote tokenizer"))
    assert ours == own and {"facts_choice acc,none", "facts_choice acc_norm,none"} < set(own)
    assert remote.items() <= own.items() and 0 < own["facts_choice acc,none"] < 1  # some right, some wrong


def test_texts_equal_those_of_lm_evals_own_model(found: Any) -> None:
    own, ours = (found[name]["answers"]["facts_text"] for name in ("hf", "server"))
    assert ours == own and len({str(one) for one in own}) > 4


@pytest.mark.parametrize("name", ["server", "remote tokenizer"])
def test_log_likelihoods_equal_those_of_lm_evals_own_model_up_to_rounding(found: Any, name: str) -> None:
    own, ours = (found[one]["answers"]["facts_choice"] for one in ("hf", name))
    for one, other in zip(own, ours, strict=True):
        for ((told, greedy),), ((expected, likeliest),) in zip(other, one, strict=True):
            assert float(told) == pytest.approx(float(expected), abs=CLOSE) and greedy == likeliest
