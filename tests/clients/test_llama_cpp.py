"""llama.cpp itself, on a file that both engines read: its logits, and its arms beside ours."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.arms import parse_arms
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.llama_cpp import LlamaCppModel, versions
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import Header, start
from slipstream.bench.summary import summarize, wrong_texts
from slipstream.errors import SlipstreamError
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.client_runs import ROOT, needs
from tests.support.gguf_files import write_model

pytestmark = [
    pytest.mark.slow,
    needs("llama_cpp"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
IDS = [5, 9, 5, 9, 5, 9, 70, 71, 33, 100]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Append the binding's environment to the import path; its other requirements are installed here."""
    (packages,) = (ROOT / ".clients" / "llama_cpp" / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    write_model(path, "llama", "Q8_0")
    return path


def test_logits_of_llama_cpp_equal_ours_up_to_rounding(file: Path) -> None:
    llama, ours = LlamaCppModel(file, 1), SpeculativeDecoder(str(file))
    expected = torch.stack([ours.next_logits(IDS[: n + 1]) for n in range(len(IDS))]).float()
    logits = torch.from_numpy(llama.forward(IDS, 0).copy())
    assert llama.vocab_size == expected.shape[1]
    scale = float(expected.std())
    assert float((logits - expected).abs().max()) < 0.1 * scale
    assert float((logits.flip(0) - expected).abs().max()) > scale  # logits of other positions are far away
    again = torch.from_numpy(llama.forward(IDS[4:], 4).copy())  # the cache drops everything from that position on
    assert float((again - expected[4:]).abs().max()) < 0.1 * scale
    assert int(llama.read(IDS).argmax()) == int(logits[-1].argmax())
    llama.close()


def test_a_prompt_of_several_batches_gives_the_same_logits_after_the_cache_grew(file: Path) -> None:
    model, long = LlamaCppModel(file, 1), (IDS * 120)[:1100]
    whole = torch.from_numpy(model.read(long).copy())
    model.reserve(6000)
    assert torch.allclose(torch.from_numpy(model.read(long).copy()), whole, atol=1e-3)
    model.close()


def test_llama_arms_run_beside_ours(file: Path, tmp_path: Path) -> None:
    lineup = Lineup(
        SpeculativeDecoder(str(file)), parse_arms("none,ngram@3,llama,llama-lookup@3"), SamplingParams(max_tokens=16)
    )
    prompts = name_prompts([NamedPrompt("ababab"), NamedPrompt("cdcd cdcd")])
    start(tmp_path, Header({}, {}, {}, "now"))
    runs = list(Runner(lineup, plan(lineup.arms, prompts, [1], 1), tmp_path).run([]))
    assert not any(run.error for run in runs)
    by_arm = {summary.arm: summary for summary in summarize(runs, "llama")}
    assert by_arm["ngram@3"].verdicts["identical"] == 2 and wrong_texts(list(by_arm.values())) == []
    assert by_arm["llama"].block_efficiency == 1.0 and by_arm["llama"].time_split is not None
    assert "llama.cpp" in versions("a test")


def test_a_file_that_llama_cpp_cannot_read_is_one_line(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SlipstreamError, match=r"^llama\.cpp cannot read '.*damaged\.gguf': .*GGUF.*$"):
        LlamaCppModel(damaged, 1)
