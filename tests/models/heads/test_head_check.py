"""A head whose files declare wrong layers or flags is noticed at load; a right one passes."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SpeculativeDecoder
from slipstream.models.heads import head_check
from slipstream.models.heads.head_check import HeadAgreement, agreement
from slipstream.models.heads.head_files import head_files
from slipstream.models.heads.load import load_head
from slipstream.models.heads.network import HeadNetwork
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from tests.support.command_line import run
from tests.support.head_cases import write_head
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import VOCAB, fresh, tokenizer

pytestmark = pytest.mark.slow

OPTIONS = LoadOptions()


@cache
def target() -> Loaded:
    return load(fresh("llama", num_hidden_layers=7, hidden_size=96, num_attention_heads=12), OPTIONS, tokenizer())


def loaded(folder: Path) -> Loaded:
    files = head_files(str(folder), OPTIONS)
    assert files is not None
    return load_head(files, target(), OPTIONS)


def trained_head(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str = "speculators", **flags: Any) -> Path:
    """A random head whose output layer is fitted to the text of the check by least squares."""
    model = target().backend.model  # type: ignore[attr-defined]
    write_head(folder, model, layout=layout, layers=(2, 3, 5), tokens=range(VOCAB), **flags)
    outputs, draft_logits = list[torch.Tensor](), HeadNetwork.draft_logits

    def spy(network: HeadNetwork, states: torch.Tensor) -> torch.Tensor:
        outputs.append(network._norm(states[0], network.weights.final_norm))
        return draft_logits(network, states)

    with monkeypatch.context() as patched:
        patched.setattr(HeadNetwork, "draft_logits", spy)
        agreement(loaded(folder), target())
    question = tokenizer().apply_chat_template([{"role": "user", "content": head_check.QUESTION}])["input_ids"]
    text = torch.tensor([*question, *tokenizer()(head_check.FABLE)["input_ids"]][: head_check.LENGTH])
    likeliest = model(input_ids=text[None]).logits[0].argmax(-1)
    next_tokens = torch.nn.functional.one_hot(torch.cat([likeliest[1:], likeliest[2:]]), VOCAB).float()
    file = folder / "model.safetensors"
    weights = torch.linalg.lstsq(torch.cat(outputs[:2]), next_tokens).solution.T.contiguous()
    save_file(load_file(file) | {"lm_head.weight": weights}, file)
    return folder


def declared_as(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    for name, value in changes.items():
        section = settings.get("eagle_config", settings)
        if value is None:
            section.pop(name)
        else:
            section[name] = value
    file.write_text(json.dumps(settings))
    return folder


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, ""),
    ({}, {"eagle_aux_hidden_state_layer_ids": 1}, "layers [2, 3, 5] (inputs of layers, from 0)"),
    ({}, {"eagle_aux_hidden_state_layer_ids": -1}, "layers [2, 3, 5] (inputs of layers, from 0)"),
    ({"norm_before_residual": True}, {}, ""),
    ({"norm_before_residual": True}, {"norm_before_residual": None}, "norm_before_residual=True"),
]
OUTPUT: tuple[dict[str, Any], dict[str, Any], str] = ({"norm_output": True}, {"norm_output": None}, "norm_output=True")


@pytest.mark.parametrize(
    ("layout", "flags", "changes", "meant"),
    [
        ("speculators", *OUTPUT),
        *(("official", *case) for case in CASES),
        *mostly_exhaustive(("speculators", *case) for case in CASES),
    ],
)
def test_a_declaration_that_agrees_clearly_better_is_suggested(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    flags: dict[str, Any],
    changes: dict[str, Any],
    meant: str,
) -> None:
    folder = trained_head(tmp_path, monkeypatch, layout, **flags)
    right = agreement(loaded(folder), target())
    assert right is not None and right.best is None
    for name, value in changes.items():
        first = 2 if layout == "speculators" else 1
        shifted = isinstance(value, int) and [i + value for i in (first, first + 1, first + 3)]
        declared_as(folder, **{name: shifted or value})
    tried = agreement(loaded(folder), target())
    assert tried is not None and tried.meant == meant
    if meant:
        assert tried.best == pytest.approx(right.declared) and tried.declared < right.declared - 0.1


def test_a_list_of_layers_that_is_not_ascending_is_tried_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers, which trainers take hidden states from, ignore the order of the list; others might not."""
    folder = trained_head(tmp_path, monkeypatch)
    declared_as(folder, eagle_aux_hidden_state_layer_ids=[5, 2, 3])
    ascending = agreement(loaded(folder), target())
    assert ascending is not None and ascending.best is None
    assert " of 'target' with layers [2, 3, 5] in ascending order" in ascending.line("head", "target")
    tensors = load_file(folder / "model.safetensors")
    second, third, fifth = tensors["fc.weight"].chunk(3, 1)
    save_file(tensors | {"fc.weight": torch.cat([fifth, second, third], 1)}, folder / "model.safetensors")
    listed = agreement(loaded(folder), target())
    assert listed is not None and listed.meant == "layers [5, 2, 3] (inputs of layers, from 0)"
    assert listed.best == pytest.approx(ascending.declared, abs=0.02) and listed.is_warning


def test_norm_output_is_tried_in_both_of_its_meanings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that was trained on normed outputs, in a layout where `norm_output` means something else."""
    folder = trained_head(tmp_path / "a", monkeypatch, norm_output=True)
    model = target().backend.model  # type: ignore[attr-defined]
    write_head(tmp_path / "b", model, layout="official", layers=(2, 3, 5), norm_output=True)
    tensors = load_file(folder / "model.safetensors").items()
    named = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors}
    save_file(named, tmp_path / "b" / "model.safetensors")
    tried = agreement(loaded(tmp_path / "b"), target())
    assert tried is not None and tried.meant == "norm_output=True"


def test_a_wrong_declaration_causes_one_warning_with_both_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained_head(tmp_path, monkeypatch)

    def decode() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "slipstream"):
            SpeculativeDecoder(target().model, str(folder), tokenizer=tokenizer(), drafter="model")
        return [record.getMessage() for record in caplog.records if "draft head" in record.getMessage()]

    assert decode() == []
    declared_as(folder, eagle_aux_hidden_state_layer_ids=[3, 4, 6])
    (line,) = decode()
    assert line.count("%") == 2 and "\n" not in line and "with layers [2, 3, 5]" in line and repr(str(folder)) in line


def test_a_head_that_guesses_nothing_is_warned_of() -> None:
    useless, useful = HeadAgreement(0.004), HeadAgreement(0.4)
    assert useless.line("head", "target") == (
        "draft head 'head' guesses 0% of the tokens of 'target', too few to save time"
    )
    assert useless.is_warning and not useful.is_warning
    assert useful.line("head", "target") == "draft head 'head' guesses 40% of the tokens of 'target'"


def test_the_check_is_remembered_for_models_in_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    model, target_folder = target().backend.model, str(tmp_path / "model")  # type: ignore[attr-defined]
    model.save_pretrained(target_folder)
    tokenizer().save_pretrained(target_folder)
    folder = trained_head(tmp_path / "head", monkeypatch)
    calls, original = [], head_check.agreement
    monkeypatch.setattr(head_check, "agreement", lambda *pair: calls.append(pair) or original(*pair))
    for number, changes in enumerate([{}, {}, {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}]):
        declared_as(folder, **changes)
        SpeculativeDecoder(target_folder, str(folder), dtype="float32", reproducible=False, drafter="model")
        assert len(calls) == (1, 1, 2)[number]
    code, out, _ = run(
        capsys, monkeypatch, "models", "check", target_folder, str(folder), "--json", str(tmp_path / "out.json")
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert code == 0 and out.startswith("Works badly: ") and report["meant"].startswith("layers [2, 3, 5]")
    declared_as(folder, eagle_aux_hidden_state_layer_ids=[2, 3, 5])
    code, out, _ = run(capsys, monkeypatch, "models", "check", target_folder, str(folder))
    assert code == 0 and out.startswith("Works: draft head") and len(out.splitlines()) == 1
    code, _, err = run(capsys, monkeypatch, "models", "check", target_folder, str(folder), "--text", "x")
    assert code == 2 and "--text 'x' with the draft head" in err
