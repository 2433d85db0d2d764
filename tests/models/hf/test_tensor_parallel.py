"""Tensor parallelism: drafts change no text over the same number of ranks, and a failing rank ends the job.

Sums of floats have another order with another number of ranks, so bits are compared only at equal numbers.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.errors import SlipstreamError
from slipstream.models.hf import tensor_parallel
from slipstream.models.loaded import LoadOptions
from tests.support.processes import PATIENCE, environment, started
from tests.support.tiny_models import fresh

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
TEXTS = """
import json, sys, torch
from slipstream.reproducibility import calibration, shape_trials
torch.set_num_threads(1)
calibration.MOST_TURNS, shape_trials.LONGEST = 3, shape_trials.LENGTH
from slipstream import SamplingParams, SpeculativeDecoder
options = {"dtype": "float32", "load_options": {"tp_plan": "auto"}, "acceptance": "match"} | json.loads(sys.argv[3])
decoder = SpeculativeDecoder(sys.argv[1], sys.argv[4] if len(sys.argv) > 4 else None, **options)
max_tokens = int(sys.argv[2])
prompts = [list(range(3, 3 + n)) for n in (4, 40, 9)]
params = [SamplingParams(max_tokens=max_tokens),
  SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3),
  SamplingParams(max_tokens=max_tokens)]
plain = decoder.using("none")
texts = {"plain": [plain.generate(*request).token_ids for request in zip(prompts, params)]}
for name in ("suffix", "model@4")[:len(sys.argv) - 3]:
    drafter, _, length = name.partition("@")
    results = decoder.using(drafter, num_draft_tokens=int(length or 5)).generate(prompts, params)
    texts[name] = [result.token_ids for result in results]
    texts[name + " accepted"] = sum(result.stats.num_accepted_tokens for result in results)
print(json.dumps(texts))
"""
CLI = "from slipstream.apps.cli import main; main()"
FAILS = """
import os, sys
from slipstream.apps.cli import main
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.tensor_parallel import TensorParallelBackend
if os.environ["RANK"] == sys.argv.pop(1):
    forward, forwards_left = HFBackend.forward, [6]
    def failing(self, *args, **options):
        forwards_left[0] -= isinstance(self, TensorParallelBackend)
        if forwards_left[0] < 0:
            raise RuntimeError("no memory is left")
        return forward(self, *args, **options)
    HFBackend.forward = failing
main()
"""

# Imports what ranks need once, then forks the ranks of each job: [environment per rank, folder, script, arguments].
FORKS = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import torch.distributed.tensor.parallel, transformers.models.llama.modeling_llama
import slipstream.apps.cli, slipstream.models.hf.tensor_parallel, slipstream.models.plain_models
from tests.support.processes import PATIENCE
for line in sys.stdin:
    environments, folder, script, arguments = json.loads(line)
    ranks = []
    for rank, environment in enumerate(environments):
        if (child := os.fork()) == 0:
            signal.alarm(int(PATIENCE))  # a last resort against hanging
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
            os.environ |= environment
            sys.argv = ["script.py", *arguments]
            exec(script)
            sys.exit()
        ranks.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]), flush=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    paths = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"llama{seed}")
        fresh("llama", seed).save_pretrained(folder)
        paths.append(folder)
    return paths[0], paths[1]


@dataclass
class Rank:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with started("-c", FORKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def run_on_ranks(forks: subprocess.Popen[str], tmp_path: Path) -> Callable[..., list[Rank]]:
    """Runs a script on a number of ranks without torchrun, which would end the others as soon as one fails."""

    def run(ranks: int, script: str, *arguments: Any) -> list[Rank]:
        assert forks.stdin is not None and forks.stdout is not None
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            common = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_socket.getsockname()[1]),
                "WORLD_SIZE": str(ranks),
            }
        environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        print(
            json.dumps([environments, str(tmp_path), script, list(map(str, arguments))]), file=forks.stdin, flush=True
        )
        codes = json.loads(forks.stdout.readline())
        assert -signal.SIGALRM not in codes, f"ranks did not end: {codes}"
        return [
            Rank(code, *((tmp_path / f"{name}{rank}").read_text() for name in ("out", "err")))
            for rank, code in enumerate(codes)
        ]

    return run


def by_torchrun(tmp_path: Path, ranks: int, script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [*TORCHRUN, str(ranks), "--log-dir", str(tmp_path), str(tmp_path / "script.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


def texts_of(out: str) -> dict[str, Any]:
    """The texts that rank 0 printed: plain ones, and those of each drafter."""
    texts: dict[str, Any] = json.loads(out.splitlines()[-1])
    return texts


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["three heads", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def test_three_ranks_give_the_texts_of_one_process(target: str, run_on_ranks: Any, tmp_path: Path) -> None:
    """In float32 neither the order of sums nor the shapes of forwards change these short texts, so three ranks skip
    the calibration, which would take a minute; another test calibrates on two.
    """
    drafter, draft = "suffix", list[Path]()
    if target == "three heads":
        drafter, draft = "model@4", [tmp_path / "model"]
        target = str(tmp_path / "model")
        fresh("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8).save_pretrained(target)
    ranks = run_on_ranks(3, TEXTS, target, 5, json.dumps({"reproducible": False}), *draft)
    assert [rank.code for rank in ranks] == [0, 0, 0], ranks[0].err
    texts = texts_of(ranks[0].out)
    decoder = SpeculativeDecoder(target, drafter="none", dtype="float32", reproducible=False)
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1.0, seed=3)]
    alone = [
        decoder.generate(list(range(3, 3 + n)), options).token_ids for n, options in zip((4, 40), params, strict=True)
    ]
    assert texts["plain"][:2] == alone
    assert texts[drafter] == texts["plain"] and texts[f"{drafter} accepted"]


def test_heads_that_ranks_cannot_share_evenly_are_refused_at_load(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "join_ranks", lambda: SimpleNamespace(size=lambda: 3))
    monkeypatch.setattr(tensor_parallel, "loading_options", lambda options: LoadOptions())
    with pytest.raises(UsageError, match=r"3 processes, but model .* has 4 and 2 heads .*; allowed: 1, 2$"):
        SpeculativeDecoder(str(folders[0]), load_options={"tp_plan": "auto"})


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_each_rank_refuses_uneven_heads_in_one_line(run_on_ranks: Any) -> None:
    options = ["--target", "smollm2", "-p", "hi", "--load-options", '{"tp_plan": "auto"}']
    for rank in run_on_ranks(2, CLI, "generate", *options):
        assert rank.code == 2 and "2 processes, but model 'smollm2' has 9 and 3 heads" in rank.err
        assert "allowed: 1, 3" in rank.err and "Traceback" not in rank.err


@pytest.mark.parametrize("launcher", ["forks", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_two_ranks_give_the_texts_of_one_process_with_and_without_drafts(
    folders: Any, run_on_ranks: Any, launcher: str, tmp_path: Path
) -> None:
    arguments = (TEXTS, folders[0], 12, "{}", folders[1])
    if launcher == "torchrun":
        finished = by_torchrun(tmp_path, 2, *arguments)
        assert finished.returncode == 0, finished.stderr
        texts = texts_of(finished.stdout)
    else:
        ranks = run_on_ranks(2, *arguments)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
        texts = texts_of(ranks[0].out)
    decoder = SpeculativeDecoder(str(folders[0]), drafter="none", dtype="float32", acceptance="match")
    params = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 1.0, 0.0)]
    alone = [decoder.generate(list(range(3, 3 + n)), each) for n, each in zip((4, 40, 9), params, strict=True)]
    assert texts["plain"] == [result.token_ids for result in alone]
    for name in ("suffix", "model@4"):
        assert texts[name] == texts["plain"], name
    assert texts["suffix accepted"] + texts["model@4 accepted"] > 0


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_failing_rank_ends_the_job_with_one_error_line_per_rank(
    folders: Any, run_on_ranks: Any, rank: int, tmp_path: Path
) -> None:
    line = {"id": "a", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    options = ["--target", folders[0], "--drafter", "none", "--load-options", '{"tp_plan": "auto"}']
    ended_ranks = run_on_ranks(2, FAILS, rank, "batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options)
    for number, ended_rank in enumerate(ended_ranks):
        errors = [line for line in ended_rank.err.splitlines() if line.startswith("error: ")]
        assert ended_rank.code != 0 and len(errors) == 1 and errors[0].startswith(f"error: rank {number}: "), (
            ended_rank.err
        )
    assert "forward failed: no memory is left" in ended_ranks[rank].err


def test_options_that_exclude_tensor_parallelism_are_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="load_options 'tp_plan' needs several processes; allowed: torchrun"):
        SpeculativeDecoder(str(folders[0]), load_options={"tp_plan": "auto"})
    for options, why in (
        (LoadOptions(fast=True, extra={"tp_plan": "auto"}), "fast=True with load_options 'tp_plan'"),
        (
            LoadOptions(extra={"tp_plan": "auto", "device_map": "auto"}),
            "device_map together with 'tp_plan'; allowed: one",
        ),
    ):
        with pytest.raises(SlipstreamError, match=why):
            tensor_parallel.loading_options(options)
