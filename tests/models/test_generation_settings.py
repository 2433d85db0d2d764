"""A model's own sampling settings hold where a caller sets none, and what is not applied is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from slipstream import SamplingParams, SpeculativeDecoder, UsageError, custom_generate
from slipstream.models.generation_settings import ModelSettings
from slipstream.models.loaded import Loaded
from tests.support.command_line import run
from tests.support.gguf_files import write_model
from tests.support.running_server import running_server
from tests.support.tiny_models import fresh, shared, tokenizer

PROMPT = [5, 9, 12, 30, 7]
OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
OPTIONS = {name: value for name, value in OWN.items() if name != "do_sample"}


def with_settings(**settings: Any) -> Any:
    model = fresh("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that samples, with a tokenizer."""
    with_settings(**OWN).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "options", "not_applied"),
    [
        (OWN, OPTIONS, {}),
        ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}, {}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}, {}),
        ({"temperature": 0.6, "top_p": 1.0, "top_k": 50}, {}, {"temperature": 0.6}),  # greedy, as in `generate`
        ({"do_sample": True, "top_p": 1.5}, {"temperature": 1.0}, {"top_p": 1.5}),
        ({"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 0}, {}, {"num_beams": 4}),
        ({"new_method": "x", "max_new_tokens": 9, "eos_token_id": [3]}, {}, {"new_method": "x"}),
    ],
)
def test_settings_are_read_as_generate_reads_them(
    settings: dict[str, Any], options: dict[str, float], not_applied: dict[str, Any]
) -> None:
    model = fresh("llama")
    model.generation_config = GenerationConfig.from_dict(settings)
    read = ModelSettings.of(Loaded(None, "m", (), model=model))  # type: ignore[arg-type]
    assert (read.options, read.not_applied) == (options, not_applied)


def test_a_gguf_file_names_its_settings_by_llama_cpps_keys(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)
        writer.add_float32("general.sampling.xtc_probability", 0.0)
        writer.add_int32("general.sampling.mirostat", 2)

    write_model(tmp_path / "own.gguf", more=add)
    decoder = SpeculativeDecoder(str(tmp_path / "own.gguf"), reproducible=False)
    settings = decoder._models.settings
    assert settings.options == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert settings.not_applied == {"mirostat": 2}
    assert decoder.rows([[5, 9]])[0].params.temperature == 0.6  # type: ignore[comparison-overlap]


def test_options_that_a_caller_leaves_out_are_the_models_own() -> None:
    decoder = SpeculativeDecoder(with_settings(**OWN), reproducible=False)
    own = decoder.generate(PROMPT, seed=3, max_tokens=20).token_ids
    assert own == decoder.generate(PROMPT, SamplingParams(seed=3, max_tokens=20, **OPTIONS)).token_ids
    (row,) = decoder.rows([PROMPT], SamplingParams(top_k=3, min_p=0.1, max_tokens=9))
    assert (
        row.params.to_dict()
        == SamplingParams(**OPTIONS | {"top_k": 3, "min_p": 0.1, "max_tokens": 9}).explicit.to_dict()
    )  # type: ignore[attr-defined]
    greedy = SpeculativeDecoder(shared("llama"), reproducible=False).generate(PROMPT, max_tokens=20).token_ids
    assert greedy == decoder.generate(PROMPT, SamplingParams(max_tokens=20).explicit).token_ids != own


def test_several_texts_need_a_temperature_of_the_caller_or_the_model() -> None:
    sampling = SpeculativeDecoder(with_settings(**OWN), reproducible=False)
    assert len(sampling.generate(PROMPT, n=2, max_tokens=4).alternatives) == 1
    with pytest.raises(UsageError, match=r"^n=2; allowed: 1 with temperature=0"):
        SpeculativeDecoder(shared("llama"), reproducible=False).generate(PROMPT, n=2)


def test_generate_of_transformers_keeps_its_own_defaults() -> None:
    model, ids = with_settings(**OWN), torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=custom_generate, **options), expected)


def test_a_line_names_them_once_and_only_where_they_apply(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = with_settings(**OWN | {"temperature": 0.61})
    decoder = SpeculativeDecoder(model, reproducible=False)
    decoder.generate(PROMPT, SamplingParams(max_tokens=2).explicit)
    assert "temperature" not in capsys.readouterr().err
    for _ in range(2):
        decoder.generate(PROMPT, max_tokens=2)
    line = "brings temperature=0.61, top_k=20, top_p=0.95, repetition_penalty=1.1, which apply unless a request sets"
    assert capsys.readouterr().err.count(line) == 1 and not caplog.text
    SpeculativeDecoder(with_settings(no_repeat_ngram_size=7, min_new_tokens=3)).generate(PROMPT, max_tokens=2)
    assert "not applied: min_new_tokens=3, no_repeat_ngram_size=7 (requests can set min_tokens)" in caplog.text


def test_the_command_line_prints_them_and_greedy_turns_them_off(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def texts(*flags: str) -> tuple[list[int], str]:
        command = ("generate", "the heron", "-m", str(folder), "--json", "-", "--max-tokens", "24", *flags)
        caplog.clear()
        code, out, err = run(capsys, monkeypatch, *command)
        assert code == 0, err
        return json.loads(out[out.index("{") :])["results"][0]["token_ids"], caplog.text + err

    own, line = texts("--seed", "4")
    assert "apply unless a request sets something else (--greedy turns them off)" in line and line.endswith("seed 4\n")
    assert own == texts("--seed", "4", "--temperature", "0.6")[0]
    greedy, line = texts("--greedy")
    assert greedy != own and "seed" not in line and "hold where" not in line
    code, _, err = run(capsys, monkeypatch, "generate", "x", "-m", str(folder), "--greedy", "--temperature", "1")
    assert code == 2 and err == "error: --greedy with --temperature 1; allowed: one of them\n"


@pytest.mark.parametrize("greedy", [False, True])
def test_requests_to_a_server_that_say_nothing_get_them(folder: Path, greedy: bool) -> None:
    with running_server(lambda: SpeculativeDecoder(str(folder), acceptance="match"), greedy=greedy) as server:
        answer = server.complete("heron", max_tokens=5, slipstream={"rounds": True}).json()
        params = answer["slipstream"]["receipt"]["params"]
        expected = SamplingParams(**{} if greedy else OPTIONS).explicit.to_dict()
        assert {name: params[name] for name in OPTIONS} == {name: expected[name] for name in OPTIONS}
        assert ("seed" in answer["slipstream"]) is not greedy
        set_by_caller = server.complete("heron", max_tokens=5, temperature=0, top_k=-1, slipstream={"rounds": True})
        params = set_by_caller.json()["slipstream"]["receipt"]["params"]
        assert (params["temperature"], params["top_k"]) == (0, 0)
