"""`speculators` computes the same logits with a head of `slipstream train`, and the recorded ones with its own."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SpeculativeDecoder
from slipstream.training import training_job
from slipstream.training.training_job import TrainingJob, TrainingSettings
from tests.models.heads.test_recorded_heads import RECORDED
from tests.support.client_runs import needs, run_script
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.tiny_models import prompts
from tests.support.training_cases import TOKENS, small, write_target

pytestmark = [pytest.mark.slow, needs("speculators")]


def test_speculators_loads_a_trained_head_and_computes_the_same(tmp_path: Path) -> None:
    target, head, steps = write_target(tmp_path / "target"), tmp_path / "head", tmp_path / "steps.safetensors"
    with small(), patch.object(training_job, "SIZES", (40,)):
        job = TrainingJob(TrainingSettings(str(target), head, num_tokens=TOKENS, num_steps=5))
        job.run(SpeculativeDecoder(str(target), acceptance="match"))
    text = prompts([20])[0]
    save_file({"text": torch.tensor(text)}, steps)
    report = run_script("speculators", "speculators_load.py", str(head), str(steps))
    assert report.pop("class") == "Eagle3DraftModel"
    assert report.pop("unknown settings") == ["torch_dtype", "trained"]  # fields of transformers, and for readers
    assert report.pop("unknown settings of the layer") == ["rope_theta"]  # for readers older than transformers 5
    assert not any(report.values())
    pair, logits = pair_of(str(target), head), load_file(steps)["logits"]
    offsets = load_file(head / "model.safetensors")["d2t"]
    token_ids = offsets + torch.arange(len(offsets))
    assert logits.shape == (15, 4, 40)
    for end, expected in enumerate(logits, 2):
        drafted = step_logits(pair, text[:end], len(expected), text[end:])
        assert all(same_logits([x[token_ids] for x in drafted], list(expected)))
        assert not any(same_logits([x[token_ids] for x in drafted], list(expected.roll(1, -1))))


def test_recorded_heads_equal_what_speculators_computes(tmp_path: Path) -> None:
    kinds = run_script("speculators", "speculators_record.py", str(tmp_path))
    assert set(kinds) == {path.parent.name for path in RECORDED.glob("*/steps.safetensors")}
    assert set(kinds.values()) == {"eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp"}
    for name in [*kinds, "target"]:
        for file in (path.name for path in (RECORDED / name).iterdir()):
            if file.endswith(".json"):
                assert (tmp_path / name / file).read_text() == (RECORDED / name / file).read_text()
                continue
            new, recorded = (load_file(folder / name / file) for folder in (tmp_path, RECORDED))
            assert new.keys() == recorded.keys()
            for key, part in recorded.items():
                torch.testing.assert_close(new[key], part, rtol=1e-5, atol=1e-5)
