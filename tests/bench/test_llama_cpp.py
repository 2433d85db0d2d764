"""Arms of llama.cpp: which settings are refused, the loop around its forwards, and how its texts are compared.

The forwards here are simulated; tests/clients/test_llama_cpp.py runs the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.bench import lineup as lineups
from slipstream.bench import llama_cpp
from slipstream.bench.arms import label, parse_arms, reference_of, runs_in_batches
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.llama_cpp import LlamaBaseline, require_llama
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import Header, Run, read_records, start
from slipstream.bench.summary import summarize, wrong_texts
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.command_line import run as command

VOCABULARY = 23
PROMPT = [3, 1, 4, 1, 5]


def following(tokens: Sequence[int]) -> int:
    """The next token of the simulated model, whose texts soon repeat."""
    return (tokens[-1] * 3 + sum(tokens[-2:-1]) + 1) % VOCABULARY


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class MadeUpModel:
    """Stands for `LlamaCppModel`, with tokens from `following`; records the number of tokens of each forward."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.widths: list[int] = []
        self.room = 0

    def reserve(self, tokens: int) -> None:
        self.room = max(self.room, tokens)

    def forward(self, tokens: Sequence[int], start: int, logits: bool = True) -> Any:
        assert start <= len(self.tokens) and start + len(tokens) <= self.room
        self.tokens = [*self.tokens[:start], *tokens]
        self.widths.append(len(tokens))
        choices = [following(self.tokens[: start + i + 1]) for i in range(len(tokens))]
        return np.eye(VOCABULARY, dtype=np.float32)[choices]

    def read(self, prompt: Sequence[int]) -> Any:
        return self.forward(prompt, 0)[-1]


class RepeatedText:
    """Prompt lookup with the binding's interface: the tokens after the previous occurrence of the last one."""

    def __init__(self, max_ngram_size: int, num_pred_tokens: int) -> None:
        self.most = num_pred_tokens

    def __call__(self, tokens: Any) -> Any:
        matches = [place for place in range(len(tokens) - 1) if tokens[place] == tokens[-1]]
        return tokens[matches[0] + 1 :][: self.most] if matches else tokens[:0]


@pytest.fixture(autouse=True)
def binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the binding that has prompt lookup and no function of llama.cpp."""
    package, drafting = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    drafting.LlamaPromptLookupDecoding = RepeatedText  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", drafting)
    monkeypatch.setattr(llama_cpp, "bindings", lambda what: package)


def baseline(name: str, ends: tuple[int, ...] = ()) -> tuple[LlamaBaseline, MadeUpModel]:
    (arm,), model = parse_arms(name), MadeUpModel()
    return LlamaBaseline(arm, model, ends), model  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "llama-lookup@1", "llama-lookup@4", "llama-lookup"])
def test_the_text_is_the_models_choice_whatever_is_drafted(name: str) -> None:
    made, model = baseline(name)
    (text,), parts = made.generate([PROMPT], [SamplingParams(max_tokens=40)])
    assert text == expected(PROMPT, 40)
    assert parts.forwards == len(model.widths) and set(parts.seconds) == {"prefill", "draft", "verify"}
    if name == "llama":
        assert model.widths == [len(PROMPT), *[1] * 39]
    else:
        assert parts.forwards < 40 and max(model.widths[1:]) > 1


@pytest.mark.parametrize("name", ["llama", "llama-lookup@4"])
def test_texts_of_llama_cpp_end_where_ours_do(name: str) -> None:
    text = expected(PROMPT, 12)
    (ended, short), _ = baseline(name, (text[7],))[0].generate([PROMPT, PROMPT], [SamplingParams(max_tokens=40)] * 2)
    assert ended == short == text[: text.index(text[7]) + 1]
    ignored = SamplingParams(max_tokens=12, ignore_eos=True)
    assert baseline(name, (text[7],))[0].generate([PROMPT], [ignored])[0] == [text]
    stopping = SamplingParams(max_tokens=12, stop_token_ids=[text[2]])
    assert baseline(name)[0].generate([PROMPT], [stopping])[0] == [text[: text.index(text[2]) + 1]]
    assert baseline(name)[0].generate([PROMPT], [SamplingParams(max_tokens=1)])[0] == [text[:1]]


class FromTheToy(MadeUpModel):
    """Chooses the toy model's token or, if spoiled, the next higher token id."""

    def __init__(self, decoder: SpeculativeDecoder, spoiled: bool) -> None:
        super().__init__()
        self.decoder, self.spoiled = decoder, spoiled

    def forward(self, tokens: Sequence[int], start: int, logits: bool = True) -> Any:
        self.tokens = [*self.tokens[:start], *tokens]
        rows = [self.decoder.next_logits(self.tokens[: start + i + 1]).numpy() for i in range(len(tokens))]
        return np.stack([np.roll(row, 1) if self.spoiled else row for row in rows])


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, spoiled: bool) -> list[Run]:
    decoder, params = SpeculativeDecoder("toy"), SamplingParams(max_tokens=8)
    alone = SpeculativeDecoder("toy")
    monkeypatch.setattr(lineups, "gguf_file", lambda source, what: Path(source))
    monkeypatch.setattr(lineups, "LlamaCppModel", lambda *_: FromTheToy(alone, spoiled))
    lineup = Lineup(decoder, parse_arms("none,llama,llama-lookup@3"), params)
    prompts = name_prompts([NamedPrompt("The heron looked at"), NamedPrompt("The river")])
    start(folder, Header({}, {}, {}, "now"))
    return list(Runner(lineup, plan(lineup.arms, prompts, [1, 2], 1), folder).run([]))


def test_texts_of_llama_cpp_are_compared_and_its_prompts_timed_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = measured(tmp_path, monkeypatch, spoiled=False)
    assert not any(run.error for run in runs)
    llama_runs = [run for run in runs if run.arm != "none"]
    assert {run.batch for run in llama_runs} == {1} and {v for run in llama_runs for v in run.verdicts} == {"identical"}
    by_arm = {summary.arm: summary for summary in summarize(runs, "llama") if summary.batch == 1}
    split = by_arm["llama"].time_split
    assert split is not None and split["prefill"] > 0 and split["verify"] > 0
    assert sum(split.values()) == pytest.approx(1)
    assert by_arm["llama"].block_efficiency == 1.0 and by_arm["llama"].stats is None
    assert read_records(tmp_path)[1] == runs


def test_different_texts_of_llama_cpp_are_reported_but_not_counted_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = measured(tmp_path, monkeypatch, spoiled=True)
    summaries = summarize(runs, "none")
    assert {summary.verdicts["different"] for summary in summaries if summary.arm.startswith("llama")} == {2}
    assert wrong_texts(summaries) == [] and not any(run.error for run in runs)


def test_names_of_llama_arms_are_parsed_and_labeled() -> None:
    arms = parse_arms("none,llama,llama-lookup,llama-lookup@2")
    assert [arm.num_draft_tokens for arm in arms] == [None, None, 7, 2] and reference_of(arms, "llama") == "llama"
    assert [runs_in_batches(arm) for arm in arms] == [True, False, False, False]
    assert [label(arm.name) for arm in arms[1:3]] == ["llama.cpp", "llama.cpp prompt lookup, 7 tokens"]
    for wrong in ("llama@3", "llama/rejection", "llama-lookup@3x2", "llama.plain"):
        with pytest.raises(UsageError, match=r"allowed: .*llama-lookup\[@LENGTH\]"):
            parse_arms(wrong)


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.8), ("repetition_penalty", 1.2), ("stop", ["a"])])
def test_options_that_llama_arms_do_not_apply_are_refused(field: str, value: Any) -> None:
    params: dict[str, Any] = {field: value}
    with pytest.raises(
        UsageError, match=rf"arm 'llama', which is greedy, with {field}=.*; allowed: ignore_eos, max_tok"
    ):
        Lineup(SpeculativeDecoder("toy"), parse_arms("none,llama"), SamplingParams(**params))


def test_llama_arms_need_a_gguf_file_and_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms, file = parse_arms("none,llama-lookup"), tmp_path / "a.gguf"
    with pytest.raises(UsageError, match=r"^arm 'llama-lookup' needs a \.gguf file; target 'toy' is not one$"):
        require_llama(arms, "toy")
    with pytest.raises(UsageError, match=r"a\.gguf' is not a file; allowed: a \.gguf file$"):
        require_llama(arms, str(file))
    file.touch()
    require_llama(arms, str(file))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(
        SlipstreamError, match=r"^arm 'llama-lookup' needs llama-cpp-python; run: pip install llama-cpp-python$"
    ):
        require_llama(arms, str(file))
    require_llama(parse_arms("none,hf"), "toy")


def test_bench_refuses_a_llama_arm_for_the_toy_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = command(capsys, monkeypatch, "bench", "--target", "toy", "--arms", "none,llama")
    assert code == 2 and errors.strip() == "error: arm 'llama' needs a .gguf file; target 'toy' is not one"
