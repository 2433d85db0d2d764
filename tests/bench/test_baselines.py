"""Transformers' own generation as an arm: the same weights, the same text, and the settings it reports."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.arms import parse_arms
from slipstream.bench.baselines import Baseline, assistant_settings
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import Header, Run, start
from slipstream.bench.summary import summarize
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.tiny_models import fresh, perturbed, reference, shared, tokenizer

pytestmark = pytest.mark.slow

PROMPTS = name_prompts([NamedPrompt(text) for text in ("the heron, the heron", "a fish and a stone, a fish", "ab")])
PARAMS = SamplingParams(max_tokens=16)
ALL = "none,ngram@3,model@3,hf,hf-assisted,hf-assisted-tuned@3,hf-lookup@3"


def pair(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        shared("llama"), perturbed("llama"), tokenizer=tokenizer(), **{"reproducible": False} | options
    )


def measured(
    folder: Path, lineup: Lineup, params: SamplingParams = PARAMS, batches: Sequence[int] = (1,), repeats: int = 1
) -> list[Run]:
    start(folder, Header({}, {}, {}, "now"))
    return list(Runner(lineup, plan(lineup.arms, PROMPTS, batches, repeats), folder).run([]))


def test_every_baseline_gives_the_text_of_plain_decoding(tmp_path: Path) -> None:
    decoder = pair()
    runs = measured(tmp_path, Lineup(decoder, parse_arms(ALL), PARAMS), batches=(1, 2))
    assert [run.error for run in runs if run.error] == []
    all_verdicts = {verdict for run in runs for verdict in run.verdicts}
    assert all_verdicts <= {"reference", "identical", "tie"} and "identical" in all_verdicts
    alone = [run for run in runs if run.batch == 1]
    expected = {p.id: reference(shared("llama"), decoder.encode(p.text, chat=True), 16) for p in PROMPTS}
    assert [run.texts[0] for run in alone if run.arm == "hf"] == list(expected.values())
    assert {run.arm for run in runs if run.batch == 2} == {"none", "ngram@3", "model@3", "hf"}
    assert all((run.stats is None) == run.arm.startswith("hf") for run in runs)


def test_more_prompts_than_a_batch_are_decoded_in_batches(tmp_path: Path) -> None:
    decoder = pair(max_batch_size=2)
    lineup = Lineup(decoder, parse_arms("none,hf"), PARAMS)
    start(tmp_path, Header({}, {}, {}, "now"))
    plain, baseline = Runner(lineup, plan(lineup.arms, PROMPTS, [2], 1, at_once=3), tmp_path).run([])
    assert [len(run.texts) for run in (plain, baseline)] == [3, 3] and plain.verdicts == ["identical"] * 3
    assert set(baseline.verdicts) <= {"identical", "tie"}
    assert plain.rounds is not None
    together = [
        sum(round["step"] == step for round in plain.rounds) for step in {round["step"] for round in plain.rounds}
    ]
    assert max(together) == 2  # never three rows at once
    assert baseline.num_forwards == 2 * max(map(len, baseline.texts))


def test_each_row_of_a_padded_batch_has_its_own_end(tmp_path: Path) -> None:
    decoder = pair()
    texts = [reference(shared("llama"), decoder.encode(p.text, chat=True), 16) for p in PROMPTS]
    end = texts[0][4]
    params = replace(PARAMS, stop_token_ids=[end])
    (baseline,) = Lineup(decoder, parse_arms("hf"), params)._baselines.values()
    generated, _ = baseline.generate([decoder.encode(p.text, chat=True) for p in PROMPTS], [params] * 3)
    assert generated == [text[: text.index(end) + 1] if end in text else text for text in texts]
    assert len(generated[0]) <= 5 and len({len(text) for text in generated}) > 1


def test_arms_share_models() -> None:
    decoder = pair()
    lineup = Lineup(decoder, parse_arms("none,none.plain,hf,hf-assisted"), PARAMS)
    baselines = lineup._baselines
    assert baselines["hf"].model is baselines["hf-assisted"].model is decoder.target.model is shared("llama")
    assert baselines["hf-assisted"].assistant is perturbed("llama")
    assert lineup.decoders["none.plain"].target is decoder.target


def test_baselines_of_a_packed_model_use_an_unpacked_copy(tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    decoder = SpeculativeDecoder(str(tmp_path / "model"), reproducible=False, fast=True)
    assert decoder.target.packed
    lineup = Lineup(decoder, parse_arms("none,ngram,none.plain,hf,hf-lookup"), PARAMS)
    plain, baselines = lineup.decoders["none.plain"], lineup._baselines
    assert baselines["hf"].model is baselines["hf-lookup"].model is plain.target.model is not decoder.target.model
    assert not plain.target.packed and lineup.decoders["ngram"].target is decoder.target
    runs = measured(tmp_path / "runs", lineup)
    assert {v for run in runs for v in run.verdicts} <= {"reference", "identical", "tie"}


def test_the_tuned_assistant_drafts_the_requested_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    drafted: list[int] = []
    whole = AssistedCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Any, **options: Any) -> Any:
        ids, logits = whole(self, input_ids, **options)
        drafted.append(ids.shape[1] - input_ids.shape[1])
        return ids, logits

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", spy)
    decoder = pair()
    lineup = Lineup(decoder, parse_arms("hf-assisted-tuned@3,hf-assisted"), PARAMS)
    ids = decoder.encode(PROMPTS[0].text, chat=True)
    lineup.generate(lineup.arms[0], [ids], [PARAMS])
    # the last round has fewer tokens left to generate
    assert max(drafted) == 3 and drafted == sorted(drafted, reverse=True) and drafted.count(3) > len(drafted) / 2
    tuned = drafted.copy()
    drafted.clear()
    lineup.generate(lineup.arms[1], [ids], [PARAMS])
    assert drafted != tuned  # by default it drafts up to 20 and stops where it is not sure


def test_forwards_of_baselines_are_counted(tmp_path: Path) -> None:
    lineup = Lineup(pair(), parse_arms("none,hf,hf-lookup@5,hf-assisted-tuned@3"), PARAMS)
    runs = measured(tmp_path, lineup, batches=(1, 2))
    by_arm = {summary.arm: summary for summary in summarize(runs, "none") if summary.batch == 1}
    assert all((run.num_forwards is None) == (run.arm == "none") for run in runs)
    assert by_arm["hf"].block_efficiency == 1.0 == by_arm["none"].block_efficiency
    assert by_arm["hf-assisted-tuned@3"].block_efficiency > 1.2
    assert by_arm["hf-lookup@5"].block_efficiency > 1.0
    assert all(
        summary.block_efficiency is None
        for summary in summarize(runs, "none")
        if summary.batch == 2 and summary.stats is None
    )
    model = lineup._baselines["hf"].model
    assert not model._forward_pre_hooks


def test_a_call_does_not_change_the_assistants_generation_config() -> None:
    assistant = fresh("llama")
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.num_assistant_tokens = 2
    before = assistant.generation_config
    (arm,) = parse_arms("hf-assisted")
    baseline = Baseline(arm, shared("llama"), assistant, ())
    first = baseline.generate([[5, 6, 7, 5, 6, 7]], [PARAMS])
    assert assistant.generation_config is before and before.num_assistant_tokens == 2
    assert baseline.generate([[5, 6, 7, 5, 6, 7]], [PARAMS]) == first
    with pytest.raises(KeyError), assistant_settings(parse_arms("hf-assisted-tuned@9")[0], assistant):
        assert assistant.generation_config.num_assistant_tokens == 9
        raise KeyError
    assert assistant.generation_config is before


def test_baselines_ignore_the_models_generation_defaults() -> None:
    model = fresh("llama")
    expected = reference(model, [5, 6, 7, 5, 6, 7], 16)
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    model.generation_config.eos_token_id = expected[2]
    (arm,) = parse_arms("hf")
    baseline = Baseline(arm, model, None, (expected[2],))
    assert baseline.generate([[5, 6, 7, 5, 6, 7]], [replace(PARAMS, ignore_eos=True)])[0] == [expected]
    (ended,), _ = baseline.generate([[5, 6, 7, 5, 6, 7]], [PARAMS])
    assert ended == expected[: expected.index(expected[2]) + 1]


def test_sampled_baselines_are_seeded_but_not_compared(tmp_path: Path) -> None:
    params = replace(PARAMS, temperature=1.0, seed=4)
    lineup = Lineup(pair(), parse_arms("none,hf,hf-assisted,hf-lookup"), params)
    runs = measured(tmp_path, lineup, params, repeats=2)
    baselines = [run for run in runs if run.arm != "none"]
    assert {v for run in baselines for v in run.verdicts} == {"not compared"}
    assert not any(run.error for run in baselines)
    texts = {(run.arm, run.prompts[0], run.repeat): run.texts for run in baselines}
    assert all(texts[arm, prompt, 0] == texts[arm, prompt, 1] for arm, prompt, _ in texts)


def test_an_assistant_needs_a_draft_model() -> None:
    alone = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(), reproducible=False)
    with pytest.raises(UsageError, match="arm 'hf-assisted' needs a draft model"):
        Lineup(alone, parse_arms("none,hf-assisted"), PARAMS)
