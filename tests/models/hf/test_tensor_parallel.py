"""Tensor parallelism under torchrun: the texts of plain decoding over the same ranks; a failing rank ends the job.

Sums of floats are made in another order over several ranks, so bits are compared within one number of ranks.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.errors import SlipstreamError
from slipstream.models.hf import tensor_parallel
from slipstream.models.loaded import LoadOptions
from tests.support.processes import PATIENCE, environment
from tests.support.tiny_models import fresh

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
TEXTS = """
import json, sys, torch
torch.set_num_threads(1)
from slipstream import SamplingParams, SpeculativeDecoder
options = {"dtype": "float32", "load_options": {"tp_plan": "auto"}, "acceptance": "match"} | json.loads(sys.argv[3])
decoder = SpeculativeDecoder(sys.argv[1], sys.argv[4] if len(sys.argv) > 4 else None, **options)
most = int(sys.argv[2])
prompts = [list(range(3, 3 + n)) for n in (4, 40, 9)]
params = [SamplingParams(max_tokens=most),
  SamplingParams(max_tokens=most, temperature=1.0, seed=3),
  SamplingParams(max_tokens=most)]
plain = decoder.using("none")
found = {"plain": [plain.generate(*one).token_ids for one in zip(prompts, params)]}
for name in ("suffix", "model@4")[:len(sys.argv) - 3]:
    drafter, _, length = name.partition("@")
    other = decoder.using(drafter, num_draft_tokens=int(length or 5))
    results = other.generate(prompts, params)
    found[name] = [one.token_ids for one in results]
    found[name + " accepted"] = sum(one.stats.num_accepted_tokens for one in results)
print(json.dumps(found))
"""
CLI = "from slipstream.apps.cli import main; main()"
FAILS = """
import os, sys
from slipstream.apps.cli import main
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.tensor_parallel import TensorParallelBackend
if os.environ["RANK"] == sys.argv.pop(1):
    forward, left = HFBackend.forward, [6]
    def failing(self, *args, **options):
        left[0] -= isinstance(self, TensorParallelBackend)
        if left[0] < 0:
            raise RuntimeError("no memory is left")
        return forward(self, *args, **options)
    HFBackend.forward = failing
main()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"llama{seed}")
        fresh("llama", seed).save_pretrained(folder)
        found.append(folder)
    return found[0], found[1]


def torchrun(tmp_path: Path, script: str, *arguments: Any, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [*TORCHRUN, str(ranks), "--log-dir", str(tmp_path), str(tmp_path / "script.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


def two_ranks(tmp_path: Path, script: str, *arguments: Any) -> list[tuple[int, str]]:
    """Exit code and messages of each rank; without torchrun, which ends the others as soon as one has failed."""
    (tmp_path / "script.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, str(tmp_path / "script.py"), *map(str, arguments)]
    started = [
        subprocess.Popen(
            command, env=environment() | place | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    told = [process.communicate(timeout=PATIENCE)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, told, strict=True)]


def texts_over(ranks: int, tmp_path: Path, target: Any, most: int, *draft: Path, **options: Any) -> dict[str, Any]:
    """What a decoder with these options says plainly and drafting over so many ranks, `most` tokens a text."""
    done = torchrun(tmp_path, TEXTS, target, most, json.dumps(options), *draft, ranks=ranks)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "target", ["three heads", pytest.param("smollm2", marks=[pytest.mark.smollm2, pytest.mark.exhaustive])]
)
def test_three_ranks_give_the_texts_of_one_process(target: str, tmp_path: Path) -> None:
    """In float32 neither orders of sums nor shapes of forwards change these short texts: shapes, which two ranks
    calibrate in another test, take a minute to calibrate on three.
    """
    drafter, draft = "suffix", list[Path]()
    if target == "three heads":
        drafter, draft = "model@4", [tmp_path / "model"]
        target = str(tmp_path / "model")
        fresh("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8).save_pretrained(target)
    found = texts_over(3, tmp_path, target, 5, *draft, reproducible=False)
    decoder = SpeculativeDecoder(target, drafter="none", dtype="float32", reproducible=False)
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1.0, seed=3)]
    alone = [decoder.generate(list(range(3, 3 + n)), one).token_ids for n, one in zip((4, 40), params, strict=True)]
    assert found["plain"][:2] == alone
    assert found[drafter] == found["plain"] and found[f"{drafter} accepted"]


def test_heads_that_cannot_be_spread_are_refused_at_load(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "join_ranks", lambda: SimpleNamespace(size=lambda: 3))
    monkeypatch.setattr(tensor_parallel, "loading_options", lambda options: LoadOptions())
    with pytest.raises(UsageError, match=r"3 processes, but model .* has 4 and 2 heads .*; allowed: 1, 2$"):
        SpeculativeDecoder(str(folders[0]), load_options={"tp_plan": "auto"})


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_each_of_two_processes_says_so_in_one_line(tmp_path: Path) -> None:
    options = ["--target", "smollm2", "-p", "hi", "--load-options", '{"tp_plan": "auto"}']
    for code, told in two_ranks(tmp_path, CLI, "generate", *options):
        assert code == 2 and "2 processes, but model 'smollm2' has 9 and 3 heads" in told and "allowed: 1, 3" in told
        assert "Traceback" not in told


def test_two_ranks_give_the_texts_of_plain_decoding_over_two_ranks(folders: Any, tmp_path: Path) -> None:
    target, draft = folders
    found = texts_over(2, tmp_path, target, 20, draft)
    assert [len(text) for text in found["plain"]] == [20, 20, 20]
    for name in ("suffix", "model@4"):
        assert found[name] == found["plain"], name
    assert found["suffix accepted"] + found["model@4 accepted"] > 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_rank_that_fails_ends_the_job_with_a_line_of_each(folders: Any, rank: int, tmp_path: Path) -> None:
    line = {"id": "a", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    options = ["--target", folders[0], "--drafter", "none", "--load-options", '{"tp_plan": "auto"}']
    ended = two_ranks(tmp_path, FAILS, rank, "batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options)
    for own, (code, told) in enumerate(ended):
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        assert code != 0 and len(errors) == 1 and errors[0].startswith(f"error: rank {own}: "), told
    assert "forward failed: no memory is left" in ended[rank][1]


def test_what_does_not_go_with_ranks_is_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="load_options 'tp_plan' needs several processes; allowed: torchrun"):
        SpeculativeDecoder(str(folders[0]), load_options={"tp_plan": "auto"})
    for options, why in (
        (LoadOptions(fast=True, extra={"tp_plan": "auto"}), "fast=True with load_options 'tp_plan'"),
        (LoadOptions(extra={"tp_plan": "auto", "device_map": "auto"}), "device_map beside 'tp_plan'; allowed: one"),
    ):
        with pytest.raises(SlipstreamError, match=why):
            tensor_parallel.loading_options(options)
