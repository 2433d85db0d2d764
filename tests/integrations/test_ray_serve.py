"""The server behind Ray Serve: texts, streams and session affinity; skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.apps.server.ray_serve import ServeSpec
from tests.support.markers import subcases
from tests.support.processes import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, ray
from ray import serve
from slipstream.integrations.ray import app
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": 0 or int(sys.argv[1])})
serve.run(app({"target": "toy", "replicas": 2, "session_affinity": True, "decoder": {"drafter": "suffix"}}))
print("ready", flush=True)
def replicas():
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one for one in named if one["name"].startswith("SERVE_REPLICA::") and "Slipstream" in one["name"]]
for line in sys.stdin:
    if line.strip() == "kill":
        ray.kill(ray.get_actor(**replicas()[0]))
    print(len(replicas()), flush=True)
serve.shutdown()
"""


@dataclass
class Cluster:
    """Two replicas behind one address."""

    url: str
    process: subprocess.Popen[str]

    def ask(self, what: str) -> int:
        """Send the cluster a command; return its number of replicas afterwards."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return int(next(line for line in self.process.stdout if line.strip().isdigit()))


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (the extra 'ray')")
    port = free_port()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(port)], env=env, **pipes) as process:
        assert any(line.strip() == "ready" for line in process.stdout)  # type: ignore[union-attr]
        yield Cluster(f"http://127.0.0.1:{port}", process)
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.url


@pytest.mark.slow
def test_replicas_give_the_texts_of_one_decoder(url: str) -> None:
    wanted = SpeculativeDecoder("toy").generate("The heron", SamplingParams(max_tokens=30)).text
    body = {"prompt": "The heron", "max_tokens": 30, "temperature": 0}
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
        answers = [client.post("/v1/completions", json=body).json() for _ in range(8)]
        assert {answer["choices"][0]["text"] for answer in answers} == {wanted}
        assert len({answer["system_fingerprint"] for answer in answers}) == 1
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and len(events) > 2
        assert "".join(json.loads(answer)["choices"][0]["text"] for answer in events[:-1]) == wanted
        refused = client.post("/v1/completions", json=body | {"temperature": -1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"


@pytest.mark.slow
def test_a_session_stays_with_the_replica_that_has_its_prompt(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as client:
        for at in range(8):
            body = {"prompt": f"Session {at}: the heron and the sparrow", "max_tokens": 2, "temperature": 0}
            cached = []
            for _ in range(3):
                answer = client.post("/v1/completions", json=body, headers={"x-session-id": f"session-{at}"}).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert min(cached[1:]) >= len(body["prompt"]) - 1, cached  # type: ignore[arg-type]


def read(lines: Iterator[str]) -> tuple[str, bool]:
    """The rest of a stream's text, and whether the stream was complete."""
    text = ""
    try:
        for line in lines:
            if line == "data: [DONE]":
                return text, True
            if line.startswith("data: ") and "error" not in (chunk := json.loads(line[6:])):
                text += "".join(choice["text"] for choice in chunk["choices"])
    except httpx.HTTPError:
        pass  # broken off, as it may be
    return text, False


@pytest.mark.slow
def test_a_killed_replica_breaks_off_its_own_streams_only(cluster: Cluster) -> None:
    """Later requests are answered, and in the end there are as many replicas as before."""
    body = {"prompt": "The heron", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "num_draft_tokens": 0}
    wanted = SpeculativeDecoder("toy", drafter="suffix").generate(
        "The heron", SamplingParams(max_tokens=3000, ignore_eos=True)
    )
    with httpx.Client(base_url=cluster.url, trust_env=False, timeout=PATIENCE) as client, ExitStack() as stack:
        streams = []
        for at in range(8):
            headers = {"x-session-id": f"stream-{at}"}
            opened = client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers)
            lines = stack.enter_context(opened).iter_lines()
            streams.append((next(line for line in lines if line.startswith("data: ")), lines))
        cluster.ask("kill")
        with ThreadPoolExecutor(8) as readers:
            endings = list(readers.map(lambda stream_: read(chain([stream_[0]], stream_[1])), streams))
        assert {whole for _, whole in endings} == {True, False}
        for text, whole in endings:
            assert text == wanted.text if whole else wanted.text.startswith(text) and len(text) < len(wanted.text)
        short, answered, until = body | {"max_tokens": 30, "ignore_eos": False}, 0, time.monotonic() + PATIENCE
        while (answered < 20 or cluster.ask("count") < 2) and time.monotonic() < until:
            answer = client.post("/v1/completions", json=short)
            if answer.status_code == 200:
                assert wanted.text.startswith(answer.json()["choices"][0]["text"])
                answered += 1
        assert answered >= 20 and cluster.ask("count") == 2


@subcases(
    "args, why",
    [
        ({}, "target=None; allowed: the name of a model"),
        ({"target": "toy", "model": "x"}, "unknown argument 'model'; allowed: target, draft, decoder, server,"),
        ({"target": "toy", "decoder": {"temperature": 1}}, "decoder: unknown setting 'temperature'; allowed: drafter"),
        ({"target": "toy", "server": {"port": -1}}, "port=-1; allowed: a whole number from 0 to 65535"),
        ({"target": "toy", "replicas": 0}, "replicas=0; allowed: a whole number, 1 or more, or"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refusal:
        ServeSpec.from_args(args)
    assert str(refusal.value).startswith(why)


def test_the_example_configuration_is_valid() -> None:
    yaml = pytest.importorskip("yaml")
    (application,) = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text())["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("slipstream.integrations.ray", "app")
    spec = ServeSpec.from_args(application["args"])
    assert spec.config.acceptance == "match" and spec.scale()["autoscaling_config"]["max_replicas"] == 4
