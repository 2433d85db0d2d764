"""Heads that `speculators` wrote draft what it recorded for them, and change no text.

tests/clients/scripts/speculators_record.py made the files in recorded/: tiny random heads, a text, and logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import BINS
from slipstream.drafters.model.model_drafter import ModelDrafter
from slipstream.drafters.model.parallel_scorer import ParallelScorer
from slipstream.models.heads.head_files import HeadFiles
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.plain_texts import alone_and_together
from tests.support.tiny_models import prompts, tokenizer

RECORDED = Path(__file__).parent / "recorded"
TARGET = str(RECORDED / "target")
HEADS = sorted(path.parent.name for path in RECORDED.glob("*/steps.safetensors"))
CHAINED = [name for name in HEADS if name.startswith(("dspark", "dflash2"))]
FAVORED = {7: 60.0, 9: 60.0}
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 5}}


@dataclass(frozen=True)
class Steps:
    """A record: logits [texts, steps, drafted] of drafts after the first ends[i] tokens of a text."""

    text: list[int]
    ends: list[int]
    logits: Tensor
    token_ids: Tensor

    @classmethod
    def of(cls, name: str) -> Steps:
        steps, tensors = (load_file(RECORDED / name / f"{file}.safetensors") for file in ("steps", "model"))
        drafted = steps["logits"].shape[-1]
        token_ids = torch.arange(drafted) + tensors.get("d2t", torch.zeros(drafted, dtype=torch.int64))
        return cls(steps["text"].tolist(), steps["ends"].tolist(), steps["logits"], token_ids)


def agreeing(folder: Path, steps: Steps, window: int = 1 << 20) -> list[bool]:
    """For each text, whether all steps of a draft of the text's own tokens have the recorded logits.

    window: in training all tokens of a draft see the window of its first token; here it moves on, as in vLLM.
    """
    pair, agreements = pair_of(TARGET, folder), []
    for end, expected in zip(steps.ends, steps.logits, strict=True):
        count = len(expected) if end + len(expected) <= window else 1
        logits = step_logits(pair, steps.text[:end], count, steps.text[end : end + count])
        finite = torch.full_like(logits[0], float("-inf")).index_fill(0, steps.token_ids, 0.0)
        agrees = all(bool(((x == float("-inf")) | (finite == 0)).all()) for x in logits)
        for x, y in zip((x[steps.token_ids] for x in logits), expected, strict=False):
            is_scored = y.isfinite()
            agrees = (
                agrees and torch.equal(x.isfinite(), is_scored) and all(same_logits([x[is_scored]], [y[is_scored]]))
            )
        agreements.append(agrees)
    return agreements


@pytest.mark.parametrize("name", HEADS)
def test_every_step_has_the_logits_that_speculators_recorded(name: str) -> None:
    settings = json.loads((RECORDED / name / "config.json").read_text())
    has_moving_window = name == "eagle3_of_trainer"
    window = settings["transformer_layer_config"]["sliding_window"] if has_moving_window else 1 << 20
    assert all(agreeing(RECORDED / name, Steps.of(name), window))


def test_mtp_layers_of_the_targets_checkpoint_have_the_recorded_logits() -> None:
    assert all(agreeing(Path("mtp"), Steps.of("mtp")))


def changed(folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """A copy of a recorded head with other settings."""
    copytree(RECORDED / name, folder)
    settings = json.loads((folder / "config.json").read_text())
    layer = settings["transformer_layer_config"]
    for key, value in changes.items():
        (layer if key in layer and key not in settings else settings)[key] = value
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"norm_output": True}),
        ("eagle3_of_trainer", {"norm_before_residual": False}),
        ("eagle3_of_trainer", {"sliding_window": 4}),
        ("eagle3_of_trainer", {"layer_types": ["full_attention"]}),
        ("peagle", {"mask_token_id": 3}),
        ("dflash", {"aux_hidden_state_layer_ids": [0, 1]}),
        ("dflash", {"sliding_window": 4}),
        ("dflash", {"sliding_window_non_causal": True}),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("dflash", {"mask_token_id": 3}),
        ("dspark", {"sample_from_anchor": False}),
        ("dspark_rnn", {"sample_from_anchor": True}),
        ("dflash2", {"selector_top_k": 6}),
        ("dflash2", {"sliding_window_non_causal": False}),
    ],
    ids=str,
)
def test_other_settings_are_noticed(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    steps = Steps.of(name)
    longest = min(len(x) for x in steps.logits) - 1  # the anchor may have no scores
    shorter = Steps(steps.text, steps.ends, steps.logits[:, :longest], steps.token_ids)
    assert not all(agreeing(changed(tmp_path / name, name, changes), shorter))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", mostly_slow(HEADS, "eagle3", "dflash"))
def test_a_text_shifted_by_one_is_noticed(name: str) -> None:
    steps = Steps.of(name)
    shifted = Steps(steps.text, [end + 1 for end in steps.ends], steps.logits[:, :1], steps.token_ids)
    assert not any(agreeing(RECORDED / name, shifted))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHAINED)
def test_each_step_depends_on_the_token_drafted_before(name: str) -> None:
    steps = Steps.of(name)
    changed_steps = Steps([*steps.text[:-1], 3], steps.ends, steps.logits, steps.token_ids)
    for end in steps.ends:
        changed_steps.text[end] = (steps.text[end] + 1) % 60
    assert not any(agreeing(RECORDED / name, changed_steps))


WITH_CONFIDENCE = [name for name in HEADS if "confidence" in load_file(RECORDED / name / "steps.safetensors")]


def estimates(folder: Path, name: str, *, shift: int = 0) -> list[bool]:
    """For each recorded text, whether the estimates of acceptance at each step are the recorded ones."""
    steps, recorded = Steps.of(name), load_file(RECORDED / name / "steps.safetensors")["confidence"].sigmoid()
    pair, agreements = pair_of(TARGET, folder), []
    scorer = pair.draft_scorer()
    assert isinstance(scorer, ParallelScorer)
    for end, expected in zip(steps.ends, recorded, strict=True):
        drafted = steps.text[end : end + len(expected)]
        step_logits(pair, steps.text[:end], 1)  # reads the text and scores its block
        row = Row(0, steps.text[:end], SamplingParams(temperature=0.0), seed=0)
        computed = [
            scorer.acceptance([row], torch.tensor([drafted[: i + shift]])[:, : i + shift].long())
            for i in range(len(expected) - shift)
        ]
        assert all(x is not None for x in computed)
        agreements.append(torch.allclose(torch.cat(computed), expected[: len(computed)], atol=1e-5))
    return agreements


@pytest.mark.slow
def test_confidences_are_those_that_speculators_recorded() -> None:
    assert WITH_CONFIDENCE == ["dspark", "dspark_gated"]
    for name in WITH_CONFIDENCE:
        assert all(estimates(RECORDED / name, name))
        assert not any(estimates(RECORDED / name, name, shift=1))


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "kind"), [(-30.0, 0), (30.0, BINS - 1)])
def test_a_heads_confidence_decides_how_far_it_drafts(tmp_path: Path, bias: float, kind: int) -> None:
    folder = changed(tmp_path / "dspark", "dspark", {})
    tensors = load_file(folder / "model.safetensors")
    tensors["confidence_head.proj.bias"] = torch.tensor([bias])
    save_file(tensors, folder / "model.safetensors")
    settings: dict[str, Any] = {"tokenizer": tokenizer(), "num_draft_tokens": "auto", "fast": False}
    decoder = SpeculativeDecoder(TARGET, str(folder), drafter="model", **settings)
    result = decoder.generate(prompts([17])[0], max_tokens=12, ignore_eos=True)
    drafted = [round.origin.kinds for round in result.rounds if round.origin.kinds]
    assert drafted and {kind_of_token for kinds in drafted for kind_of_token in kinds} == {kind}
    assert kind or all(len(kinds) == 1 for kinds in drafted)  # a token that is sure to be rejected ends the draft
    assert result.token_ids == plain().generate(prompts([17])[0], max_tokens=12, ignore_eos=True).token_ids


@pytest.mark.parametrize(
    ("verifier", "target", "is_another"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", True),
        ("Qwen/Qwen3-8B", "unsloth/qwen3-8b", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", False),
        ("/models/there", "Qwen/Qwen3-8B", False),
        ("Qwen/Qwen3-8B", "models/mine.gguf", True),
        (None, "Qwen/Qwen3-8B", False),
    ],
)
def test_a_head_trained_for_another_model_is_recognized_by_names(
    verifier: str | None, target: str, is_another: bool
) -> None:
    files = HeadFiles("head", "", {"speculators_config": {"verifier": {"name_or_path": verifier}}})
    assert files.trained_for(target) == (verifier if is_another else None)


def test_a_head_trained_for_another_target_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(tmp_path / "eagle3", "eagle3", {})
    pair_of(TARGET, folder)
    assert not caplog.messages  # the name of a folder says nothing
    monkeypatch.setattr(HeadFiles, "trained_for", lambda files, target: "maker/tiny" if target == TARGET else None)
    pair_of(TARGET, folder)
    assert caplog.messages == [f"draft head {str(folder)!r} was trained for 'maker/tiny', not for {TARGET!r}"]


def decoder_of(name: str, **settings: Any) -> SpeculativeDecoder:
    options: dict[str, Any] = {"drafter": "model", "num_draft_tokens": 4, "max_batch_size": 3, "fast": False} | settings
    return SpeculativeDecoder(TARGET, str(RECORDED / name), tokenizer=tokenizer(), **options)


@cache
def plain() -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, drafter="none", tokenizer=tokenizer(), max_batch_size=3, fast=False)


PROMPTS = prompts([3, 17, 9, 40, 5])
ALONE = [(name, "model") for name in [*CHAINED, "dflash", "peagle", "eagle3", "eagle3_of_trainer", "mtp"]]
WAYS = [*ALONE, ("dspark", "auto"), ("peagle", "auto")]


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("name", "drafter"), mostly_exhaustive(WAYS, ("dspark", "model"), ("eagle3", "model"), ("peagle", "auto"))
)
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(name: str, drafter: str, options: str) -> None:
    decoder = decoder_of(name, drafter=drafter, num_draft_tokens=4 if drafter == "model" else "auto")
    params = SamplingParams(max_tokens=12, ignore_eos=True, **OPTIONS[options])
    results = alone_and_together(decoder, PROMPTS, params)
    assert drafter == "auto" or all(result.stats.num_draft_tokens for result in results)


@pytest.mark.parametrize("name", mostly_exhaustive([*CHAINED, "peagle"], "dspark"))
def test_heads_of_another_dtype_than_the_target_draft(tmp_path: Path, name: str) -> None:
    folder = changed(tmp_path / name, name, {})
    tensors = load_file(folder / "model.safetensors")
    halved = {key: part.bfloat16() if part.is_floating_point() else part for key, part in tensors.items()}
    save_file(halved, folder / "model.safetensors")
    settings: dict[str, Any] = {"tokenizer": tokenizer(), "num_draft_tokens": 4, "fast": False}
    decoder = SpeculativeDecoder(TARGET, str(folder), drafter="model", **settings)
    for options in ({}, {"temperature": 0.8, "seed": 2}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **options)
        result = decoder.generate(prompts([17])[0], params)
        assert result.token_ids == plain().generate(prompts([17])[0], params).token_ids
        assert result.stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mostly_exhaustive(
        [*CHAINED, "dflash", "peagle", "eagle3", "eagle3_of_trainer", "eagle3_qwen3"], "dspark", "eagle3"
    ),
)
def test_drafts_of_a_batch_are_those_after_each_text_alone(name: str) -> None:
    """Two tokens are favored, so that some drafts are accepted."""
    texts, bias, pair = prompts([3, 17, 9]), torch.zeros(61), pair_of(TARGET, RECORDED / name)
    bias[list(FAVORED)] = torch.tensor(list(FAVORED.values()))
    params = SamplingParams(max_tokens=16, ignore_eos=True, logit_bias=FAVORED)
    count = 0
    for prompt, result in zip(texts, decoder_of(name).generate(texts, params), strict=True):
        text = [*prompt, *result.token_ids]
        for round in (round for round in result.rounds if round.draft):
            draft = list(round.draft)
            logits = step_logits(pair, text[: round.start], len(draft), draft)
            assert draft == [int((x + bias).argmax()) for x in logits]
            count += 1
    assert count > 8


@pytest.mark.parametrize(
    ("name", "acceptance"),
    mostly_exhaustive(
        [*((name, "block") for name in [*CHAINED, "peagle"]), ("dspark", "rejection")], ("dspark", "block")
    ),
)
def test_sampled_drafts_carry_the_distributions_they_were_drawn_from(
    monkeypatch: pytest.MonkeyPatch, name: str, acceptance: str
) -> None:
    differences, original, pair = list[float](), ModelDrafter.propose, pair_of(TARGET, RECORDED / name)

    def propose(drafter: ModelDrafter, rows: Any, lengths: Any, sampler: Any) -> Any:
        draft = original(drafter, rows, lengths, sampler)
        if draft.probs is not None:
            count = draft.probs.shape[1]
            logits = step_logits(pair, list(rows[0].tokens), count, draft.tokens[0].tolist())
            differences.append(float((draft.probs[0] - torch.stack(logits).div(0.8).softmax(-1)).abs().max()))
        return draft

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    decoder_of(name, acceptance=acceptance).generate(prompts([17])[0], params)
    assert len(differences) > 4 and max(differences) < 1e-5


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle3_of_trainer", {"norm_before_fc": False}, "does not account for tensor 'input_norm.weight'"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "2,3"}, "reads layers '2,3'; allowed: a list of layer numbers"),
        ("eagle3", {"eagle_config": {"use_last_layernorm": False}}, "has use_last_layernorm=False; allowed: True"),
        ("eagle3", {"eagle_config": {"norm_after_fc": True}}, "has norm_after_fc=True, which is unknown and"),
        ("eagle3", {"eagle_config": [1]}, "config.json has eagle_config=[1]; allowed: an object"),
        ("eagle3", {"head_dim": "x"}, "has head_dim='x'; allowed: a whole number from 1 to"),
        ("eagle3", {"num_hidden_layers": 0}, "has num_hidden_layers=0; allowed: a whole number from 1 to 1000"),
        ("eagle3", {"rms_norm_eps": "small"}, "has rms_norm_eps='small'; allowed: a number above 0"),
        ("eagle3_of_trainer", {"layer_types": None}, "has sliding_window=5 without layer_types; allowed: both"),
        ("eagle3_of_trainer", {"sliding_window": 0}, "has sliding_window=0; allowed: 1 or more"),
        ("eagle3_of_trainer", {"layer_types": ["chunked"]}, "layer_types=['chunked']; allowed: 'sliding_attention' or"),
        ("dspark", {"markov_head_type": "new"}, "markov_head_type='new'; allowed: 'vanilla', 'gated', 'rnn'"),
        ("dspark", {"markov_head_type": "gated"}, "tensor 'markov_head.gate_proj.weight' is missing; allowed: [6, 14]"),
        ("dspark", {"markov_rank": 0}, "has confidence_head_with_markov=True and markov_rank=0; allowed: False, or a"),
        ("dspark_rnn", {"markov_rank": 0}, "does not account for tensor 'markov_head.joint_proj.bias'"),
        ("dspark", {"confidence_head_with_markov": False}, "'confidence_head.proj.weight' is [1, 14]; allowed: [1, 8]"),
        ("dspark_rnn", {"enable_confidence_head": True}, "'confidence_head.proj.weight' is missing; allowed: [1, 14]"),
        ("dspark", {"markov_rank": -1}, "has markov_rank=-1; allowed: 0 to 65536"),
        ("dspark", {"sample_from_anchor": None}, "has no sample_from_anchor; allowed: true or false"),
        (
            "dflash2",
            {"speculators_model_type": "xpress"},
            "is of type 'xpress'; allowed: 'assistant', 'dflash', 'dflash2', 'dspark',",
        ),
        ("dflash2", {"conv_group_size": 5}, "has conv_group_size=5; allowed: divisors of 8"),
        ("dflash2", {"conv_kernel_size": 2}, "base_kernel' is [2, 3, 8]; allowed: [2, 2, 8]"),
        ("dflash2", {"selector_top_k": 62}, "has selector_top_k=62; allowed: 1 to 61"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SlipstreamError) as raised:
        pair_of(TARGET, changed(tmp_path / name, name, changes))
    assert message in str(raised.value) and "\n" not in str(raised.value)
