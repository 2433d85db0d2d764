"""A job on a Ray cluster writes the lines of one machine, even if a node or the driver dies.

Run in an environment that has Ray: pip install 'slipstream-lm[ray]'. Without Ray these tests are skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slipstream import UsageError
from slipstream.integrations.ray.ray_options import RayOptions
from tests.support.job_cases import by_id, chat, requests, toy, write
from tests.support.markers import subcases
from tests.support.processes import PATIENCE

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the extra 'ray')")
BAD = {"id": "bad", "prompt": "x", "top_p": 7}
LINES = [*requests(300, most=90), *(chat(f"c{at}", "The heron", temperature=0.5) for at in range(20)), BAD]
COMMAND = [sys.executable, "-c", "from slipstream.apps.cli import main; main()", "batch"]
TOY = ["--target", "toy", "--max-batch-size", "4"]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    places = os.pathsep.join(filter(None, sys.path))
    return os.environ | {"PYTHONPATH": places, "RAY_USAGE_STATS_ENABLED": "0", "SLIPSTREAM_MODELS": "/nonexistent"}


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[Any]:
    script = Path(__file__).parents[1] / "support" / "ray_cluster.py"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], env=environment, **pipes) as process:
        yield process, process.stdout.readline().strip()  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The lines of the same job on one machine."""
    out = tmp_path_factory.mktemp("alone") / "out.jsonl"
    toy().batch(LINES, out)
    return by_id(out)


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(path: Path, lines: int, job: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while count(path) < lines and job.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.005)


@needs_ray
@pytest.mark.slow
def test_a_killed_driver_and_a_killed_node_lose_and_duplicate_no_line(
    cluster: Any, alone: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    nodes, address = cluster
    source, out = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    command = [*COMMAND, str(source), str(out), *TOY, "--ray", address, "--ray-actors", "2", "--ray-cpus", "1"]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as driver:
        wait_for(out, 8, driver)
        os.kill(driver.pid, signal.SIGKILL)
    kept = out.read_bytes()
    assert 8 <= kept.count(b"\n") < len(LINES) - 1
    with subprocess.Popen(command, env=environment, **pipes) as driver:
        wait_for(out, kept.count(b"\n") + 8, driver)
        nodes.stdin.write("kill\n")
        nodes.stdin.flush()
        assert nodes.stdout.readline() == "gone\n" and driver.poll() is None and count(out) < len(LINES) - 1
        errors = driver.communicate(timeout=PATIENCE)[1]
    assert driver.returncode == 1, errors  # one line is bad
    why = f"{source}, line {len(LINES)}: top_p=7; allowed: a number above 0, up to 1"
    assert why in errors.splitlines()  # among Ray's own output
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert by_id(out) == alone
    write(source, LINES[:-1])  # a job that a cluster began can be resumed on one machine
    process = subprocess.run([*COMMAND, str(source), str(out), *TOY], env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and process.stderr.startswith("0 of 320 answered now, 320 earlier")


@needs_ray
@pytest.mark.slow
def test_a_missing_cluster_is_reported_in_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", LINES[:2])
    command = [*COMMAND, str(source), str(tmp_path / "out.jsonl"), *TOY, "--ray", "127.0.0.1:1"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 1 and "there is no cluster to connect to: [Errno 111]" in process.stderr, (
        process.stderr
    )
    assert len(process.stderr.splitlines()) == 1


@subcases(
    "options, why",
    [
        ({"ray": "auto", "ray_actors": "0"}, "ray_actors='0'; allowed: a number, or MIN-MAX, e.g. 2 or 1-8"),
        ({"ray": "auto", "ray_actors": "4-2"}, "ray_actors='4-2'; allowed"),
        ({"ray": "auto", "ray_cpus": 0.0}, "ray_cpus=0.0; allowed: 0.01 to 10000"),
        ({"ray": "auto", "ray_gpus": -1.0}, "ray_gpus=-1.0; allowed: 0 to 10000"),
        ({"ray_actors": "2"}, "ray_actors, ray_cpus or ray_gpus without ray; allowed: with --ray ADDRESS"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refusal:
        RayOptions(**options)
    assert str(refusal.value).startswith(why)


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from tests.support.command_line import run

    monkeypatch.setitem(sys.modules, "ray", None)
    source = write(tmp_path / "in.jsonl", LINES[:2])
    code, _, errors = run(capsys, monkeypatch, "batch", str(source), str(tmp_path / "o.jsonl"), *TOY, "--ray", "auto")
    assert code == 1 and errors == "error: --ray needs ray; run: pip install 'ray[data,serve]'\n"


def test_an_engine_keeps_its_batch_full_across_blocks() -> None:
    """Blocks of several callers share rounds, and each caller gets its own lines."""
    import json
    from concurrent.futures import ThreadPoolExecutor

    from slipstream.config import DecoderConfig
    from slipstream.integrations.ray.ray_engine import EngineSpec, RayEngine
    from slipstream.jobs.line_formats import JobOptions

    engine = RayEngine(EngineSpec("toy", None, DecoderConfig(acceptance="match", max_batch_size=4), JobOptions(), 1))
    widths: list[int] = []
    step = engine._pool._scheduler.step
    engine._pool._scheduler.step = lambda: [widths.append(answered.num_rows) or answered for answered in step()]  # type: ignore[method-assign]
    lines = [{"id": at, "prompt": "The heron", "max_tokens": 40} for at in range(8)]
    blocks = [
        {"number": [2 * at + 1, 2 * at + 2], "line": [json.dumps(line) for line in lines[2 * at : 2 * at + 2]]}
        for at in range(4)
    ]
    with ThreadPoolExecutor(4) as callers:
        answered_blocks = list(callers.map(engine, blocks))
    assert [answered["number"] for answered in answered_blocks] == [block["number"] for block in blocks]
    # a block by itself has two rows
    assert all(all(answered["answered"]) for answered in answered_blocks) and max(widths) == 4
    texts = {json.loads(line)["text"] for answered in answered_blocks for line in answered["line"]}
    assert len(texts) == 1
