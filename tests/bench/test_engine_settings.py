"""The settings files that `tune` writes for this and other engines can be parsed and have the documented keys."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from slipstream.bench.summary import Estimate
from slipstream.bench.tuning.advice import CandidateResult
from slipstream.bench.tuning.engine_settings import config_of, engine_settings, files_for
from slipstream.bench.tuning.search import Candidate
from slipstream.config import DecoderConfig
from tests.models.heads.test_recorded_heads import RECORDED
from tests.support.eagle1_cases import write_eagle1
from tests.support.head_cases import write_head
from tests.support.markers import subcases
from tests.support.tiny_models import fresh

VLLM = {
    *("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
}
SGLANG = {
    *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps"),
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens"),
    *("--speculative-ngram-max-bfs-breadth", "--speculative-ngram-match-type"),
}
LLAMACPP = {
    *("--spec-type", "--spec-draft-model", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"),
    *("--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"),
}
MODEL = Candidate("model", 4, "my models/d")
HYBRID = Candidate("hybrid", None, "d")
AUTO = Candidate("auto", None, "d.gguf")
EVERY = [MODEL, HYBRID, AUTO, Candidate("auto"), Candidate("ngram", 3), Candidate("suffix", 5)]


def options(text: str) -> tuple[list[str], dict[str, str]]:
    """The comment lines of a file of flags, and its flags with their values."""
    lines = text.splitlines()
    words = shlex.split(" ".join(line for line in lines if not line.startswith("#")))
    return [line for line in lines if line.startswith("#")], dict(zip(words[::2], words[1::2], strict=True))


def parsed(
    candidate: Candidate | None, *, stops_early: bool = False
) -> tuple[Any, dict[str, str], dict[str, str], str]:
    """vLLM's object, SGLang's flags, llama.cpp's flags, and all comments."""
    files = files_for(candidate, DecoderConfig(), stops_early=stops_early)
    read = {name: options(files[f"{name}.txt"]) for name in ("vllm", "sglang", "llamacpp")}
    value = json.loads(files["vllm.json"])
    flags = read["vllm"][1]
    assert flags == {} if value is None else json.loads(flags["--speculative-config"]) == value
    return (
        value,
        read["sglang"][1],
        read["llamacpp"][1],
        "\n".join(line for notes, _ in read.values() for line in notes),
    )


@subcases("candidate", EVERY)
def test_engine_settings_have_only_documented_keys(candidate: Candidate) -> None:
    value, sglang, llamacpp, _ = parsed(candidate, stops_early=candidate is AUTO)
    assert set(value) <= VLLM and set(sglang) <= SGLANG and set(llamacpp) <= LLAMACPP
    assert {"method", "num_speculative_tokens"} <= set(value)


def test_a_draft_model_is_named_as_the_user_named_it() -> None:
    value, sglang, llamacpp, notes = parsed(MODEL)
    assert value == {"method": "draft_model", "model": "my models/d", "num_speculative_tokens": 4}
    assert sglang["--speculative-algorithm"] == "STANDALONE" and sglang["--speculative-eagle-topk"] == "1"
    assert sglang["--speculative-draft-model-path"] == "my models/d" == llamacpp["--spec-draft-model"]
    assert (sglang["--speculative-num-steps"], sglang["--speculative-num-draft-tokens"]) == ("4", "5")
    assert llamacpp["--spec-type"] == "draft-simple" and llamacpp["--spec-draft-n-max"] == "4"
    assert llamacpp["--spec-draft-p-min"] == "0" and "GGUF" in notes and "counterpart" not in notes


def test_look_ups_keep_their_lengths_and_bounds() -> None:
    value, sglang, llamacpp, notes = parsed(Candidate("ngram", 3))
    assert value == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert sglang["--speculative-algorithm"] == "NGRAM" and sglang["--speculative-ngram-match-type"] == "BFS"
    assert llamacpp["--spec-type"] == "ngram-simple" and llamacpp["--spec-ngram-simple-size-m"] == "3"
    assert notes.count("no exact counterpart") == 2
    value, sglang, _, _ = parsed(Candidate("suffix", 5))
    assert value["method"] == "suffix" and value["suffix_decoding_min_token_prob"] == 0.05
    assert sglang["--speculative-ngram-match-type"] == "PROB"
    assert parsed(Candidate("auto"))[0]["method"] == "suffix"
    assert parsed(Candidate("auto"))[0]["num_speculative_tokens"] == 7


def test_settings_without_a_counterpart_are_named_in_a_comment() -> None:
    value, sglang, llamacpp, notes = parsed(HYBRID)
    assert value["method"] == "draft_model" and sglang["--speculative-algorithm"] == "STANDALONE"
    assert llamacpp["--spec-type"] == "ngram-simple,draft-simple" and llamacpp["--spec-ngram-simple-size-m"] == "6"
    assert value["num_speculative_tokens"] == 6 and llamacpp["--spec-draft-n-max"] == "6"
    assert "hybrid has no counterpart: vLLM" in notes and "hybrid has no counterpart: SGLang" in notes
    _, _, llamacpp, notes = parsed(AUTO, stops_early=True)
    assert llamacpp["--spec-draft-p-min"] == "0.4" and "would not pay" in notes and "GGUF" not in notes


def result_of(drafter: str, length: int | None, draft: str | None, speed_up: float | None) -> CandidateResult:
    candidate = Candidate(drafter, length, draft)
    return CandidateResult(candidate.setting, candidate, None if speed_up is None else Estimate(speed_up))


OTHERS = (
    result_of("suffix", 3, None, 1.2),
    result_of("ngram", 2, None, 1.9),
    result_of("model", 4, "d", 1.53),
    result_of("model", 2, "d", 1.4),
    result_of("model", 3, "e", 1.6),
    result_of("model", 1, "d", None),
    replace(result_of("model", 5, "d", 1.8), failed=True),
)


@pytest.mark.parametrize(
    ("candidate", "others", "tokens", "note"),
    [
        (Candidate("model", None, "d"), OTHERS, 4, "4 is the fastest fixed length measured (model@4: 1.53x)"),
        (Candidate("auto", None, "d"), OTHERS, 4, "4 is the fastest fixed length measured (model@4: 1.53x)"),
        (Candidate("auto"), OTHERS, 3, "3 is the fastest fixed length measured (suffix@3: 1.20x)"),
        (Candidate("model", None, "d"), (), 4, "no fixed length was measured, 4 is a guess"),
        (Candidate("auto"), (), 4, "no fixed length was measured, 4 is a guess"),
        (Candidate("model", 2, "d"), OTHERS, 2, None),
    ],
)
def test_engines_with_one_length_get_the_fastest_that_was_measured(candidate, others, tokens: int, note) -> None:
    files = files_for(candidate, DecoderConfig(), stops_early=False, others=others, longest=4)
    assert json.loads(files["vllm.json"])["num_speculative_tokens"] == tokens
    assert options(files["sglang.txt"])[1]["--speculative-num-draft-tokens"] == str(tokens + 1)
    notes, llamacpp = options(files["llamacpp.txt"])
    lengths = {llamacpp.get(flag) for flag in ("--spec-draft-n-max", "--spec-ngram-simple-size-m")} - {None}
    assert lengths == {str(tokens)}
    assert note in "\n".join(notes) if note else not any("fixed length" in line for line in notes)
    config = json.loads(files["slipstream.json"])
    assert config["num_draft_tokens"] == ("auto" if candidate.length is None else candidate.length)


@pytest.mark.parametrize(
    ("kind", "method", "algorithm", "spec_type"),
    [
        ("eagle3", "eagle3", "EAGLE3", "draft-eagle3"),
        ("eagle1", "eagle", "EAGLE", None),
        ("dflash", "dflash", "DFLASH", "draft-dflash"),
        ("dflash2", "dflash", "DFLASH", "draft-dflash"),
        ("dspark", "dspark", "DSPARK", "draft-dspark"),
        ("peagle", "eagle3", None, None),
        ("mtp", "mtp", None, None),
        ("pard", "draft_model", "STANDALONE", "draft-simple"),
        ("plain", "draft_model", "STANDALONE", "draft-simple"),
    ],
)
def test_a_draft_head_gets_the_name_that_the_engine_uses(
    tmp_path: Path, kind: str, method: str, algorithm: str | None, spec_type: str | None
) -> None:
    model, folder = fresh("llama", num_hidden_layers=5), str(tmp_path / "draft")
    if kind in ("pard", "plain"):
        if kind == "pard":
            model.config.pard_token = 5
        model.save_pretrained(folder)
    elif kind in ("dflash", "dflash2", "dspark", "mtp", "peagle"):
        copytree(RECORDED / kind, folder)
    else:
        {"eagle3": write_head, "eagle1": write_eagle1}[kind](Path(folder), model)
    value, sglang, llamacpp, notes = parsed(Candidate("model", 4, folder))
    parallel = {"parallel_drafting": True} if kind in ("pard", "peagle") else {}
    assert value == {"method": method, "model": folder, "num_speculative_tokens": 4, **parallel}
    assert set(sglang) <= SGLANG and sglang.get("--speculative-algorithm") == algorithm
    assert ("SGLang runs no draft heads" in notes) == (algorithm is None) == (not sglang)
    if algorithm is not None:
        assert sglang["--speculative-draft-model-path"] == folder and sglang["--speculative-num-draft-tokens"] == "5"
        assert ("--speculative-num-steps" in sglang) == (kind not in ("dflash", "dflash2", "dspark"))
    assert llamacpp.get("--spec-type") == spec_type
    assert ("llama.cpp runs no draft heads" in notes) == (spec_type is None)
    assert ("drafts token by token" in notes) == (kind == "pard")


def test_advice_not_to_speculate_is_a_comment_without_flags() -> None:
    value, sglang, llamacpp, notes = parsed(None)
    assert value is None and sglang == {} == llamacpp and notes.count("do not speculate") == 3
    assert [settings.flags for settings in engine_settings(None)] == [()] * 3


@subcases("candidate", [None, *EVERY])
def test_the_written_settings_can_be_read_by_config(candidate: Candidate | None, tmp_path: Path) -> None:
    file = tmp_path / "slipstream.json"
    file.write_text(files_for(candidate, DecoderConfig(max_batch_size=4), stops_early=False)["slipstream.json"])
    config = DecoderConfig.from_json(file)
    assert config == config_of(candidate, DecoderConfig(max_batch_size=4)) and config.max_batch_size == 4
    assert config.drafter == ("none" if candidate is None else candidate.drafter)
    assert config.num_draft_tokens == ("auto" if candidate is None or candidate.length is None else candidate.length)
