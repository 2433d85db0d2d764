"""Which sources, policy and rule an engine of some settings is made of, and which settings contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.config import DecoderConfig
from slipstream.core.types import Row
from slipstream.models.cpu import compiled_race
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cuda.captured_race import CapturedRace
from slipstream.wiring.engine_choice import EngineChoice, choose_engine, name_of
from slipstream.wiring.model_pair import ModelPair
from tests.support.gguf_files import write_chat_model


class UsersDrafter:
    """A drafter of the user's, which proposes nothing."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        return Draft.empty(len(rows), sampler.device)


def choice_of(draft: str | None = None, drafter: Any = "auto", **settings: Any) -> EngineChoice:
    config = DecoderConfig(drafter=name_of(drafter), **settings)
    return choose_engine(ModelPair.load("toy", draft, config, None), config, drafter, None)


PREDICTIONS, LOOKUP, MODEL = "predictions", "SuffixDrafter", "ModelDrafter"
CASES: list[tuple[dict[str, Any], str, list[str], str, bool]] = [
    # settings, name, sources, policy, coupled
    ({}, "suffix", [PREDICTIONS, LOOKUP], "Planner", True),
    ({"drafter": "none"}, "none", [PREDICTIONS], "Planner", True),
    ({"drafter": "ngram"}, "ngram", [PREDICTIONS, "NgramDrafter"], "Planner", True),
    ({"drafter": "ngram", "num_draft_tokens": "heuristic"}, "ngram", [PREDICTIONS, "NgramDrafter"], "Heuristic", True),
    ({"num_draft_tokens": 3}, "suffix", [PREDICTIONS, LOOKUP], "Fixed", True),
    ({"drafter": "ngram", "num_draft_tokens": 0}, "ngram", ["NgramDrafter"], "Fixed", True),
    ({"draft": "toy"}, "hybrid", [PREDICTIONS, LOOKUP, MODEL], "Planner", True),
    ({"draft": "toy", "num_draft_tokens": 4}, "model", [PREDICTIONS, MODEL], "Fixed", True),
    ({"draft": "toy", "acceptance": "topk:10"}, "hybrid", [PREDICTIONS, LOOKUP, MODEL], "Planner", False),
    ({"drafter": UsersDrafter()}, "UsersDrafter", [PREDICTIONS, "CheckedDrafter"], "Planner", False),
]


@pytest.mark.parametrize(("settings", "name", "sources", "policy", "coupled"), CASES)
def test_settings_choose_sources_policy_and_rule(
    settings: Any, name: str, sources: list[str], policy: str, coupled: bool
) -> None:
    choice = choice_of(**settings)
    engine = choice.engine()
    assert (choice.name, choice.coupled, type(engine.policy).__name__) == (name, coupled, policy)
    assert sources == [
        PREDICTIONS if source.of_predictions else type(source.drafter).__name__ for source in engine.sources
    ]
    assert engine.acceptance == settings.get("acceptance", "auto")
    assert (engine.draft_session is not None) == (MODEL in sources)
    drafts_nothing = settings.get("num_draft_tokens") == 0 or name == "none"
    assert (engine.grammar is None) == drafts_nothing
    assert bool(choice.no_predictions) == (settings.get("num_draft_tokens") == 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "model"}, "drafter='model' needs a draft model; give draft="),
        ({"drafter": 3}, r"^drafter=3; allowed: a name or an object with propose\(rows, lengths, sampler\)$"),
        ({"drafter": "ngram", "num_draft_tokens": "3x2"}, "with drafter='ngram'; allowed: trees with drafters hybrid,"),
        ({"drafter": "ngram", "num_draft_tokens": "confidence:0.4"}, "with drafter='ngram'; allowed: drafters "),
        (
            {"draft": "toy", "drafter": "model:p=40", "num_draft_tokens": "confidence:0.4"},
            "with drafter='model:p=40'; allowed: drafters .* without p=PERCENT",
        ),
        (
            {"draft": "toy", "drafter": "model", "num_draft_tokens": "3x2", "acceptance": "rejection"},
            "with acceptance='rejection'; allowed: trees with acceptance 'match' or 'auto'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choice_of(**settings).engine()


def test_the_planner_asks_the_draft_models_session_what_it_has_read() -> None:
    choice = choice_of("toy")
    planner, reader = choice.engine().policy, choice.models.draft_reader
    row = Row(0, [1, 2, 3], SamplingParams(), seed=0)
    assert reader is not None and not planner.has_cached(row)  # type: ignore[attr-defined]
    reader.reserve(1, 8)
    reader.read_ahead({0: row}, 8)
    assert planner.has_cached(row)  # type: ignore[attr-defined]


def test_draws_on_a_gpu_are_captured_unless_fast_is_off() -> None:
    on_gpu = SimpleNamespace(target=SimpleNamespace(backend=SimpleNamespace(device=torch.device("cuda")), model=None))
    for fast, is_captured in (("auto", True), (True, True), (False, False)):
        choice = choice_of(fast=fast)
        assert choice._race() is not CapturedRace
        assert (replace(choice, models=on_gpu)._race() is CapturedRace) == is_captured  # type: ignore[arg-type]


def test_a_quantized_file_needs_no_kernels_for_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be compiled, for half a minute, for the race alone."""
    pytest.importorskip("gguf")
    monkeypatch.setattr(compiled_race, "FEWEST", 1)
    monkeypatch.setattr(compiled_race, "kernels", lambda: pytest.fail("the kernels for bfloat16 were loaded"))
    write_chat_model(tmp_path / "model.gguf")
    with SpeculativeDecoder(str(tmp_path / "model.gguf")) as decoder:
        assert block_linears(decoder.target.model)
        texts = [decoder.generate("Why?", max_tokens=6, temperature=0.9, seed=seed).token_ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
