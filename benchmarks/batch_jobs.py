"""Batch jobs: do they survive SIGKILL, and how fast are they beside `generate` and Hugging Face's padded batches?

    python benchmarks/batch_jobs.py --kills 10           # every id once, texts equal to those of an uninterrupted run
    python benchmarks/batch_jobs.py --speed --hf 120     # tokens per second; the baseline on the first 120 requests
    python benchmarks/batch_jobs.py --ray 2 --count 100 --kill-node     # two actors on two nodes of this machine

--ray compares a job over a cluster of two nodes on this machine with one process: seconds, and every line once and the
same; exit code 1 if a line is wrong. Requests are the package's prompts in variants, greedy, with 8 to 96 tokens each.
Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terminal import in_one_line, positive

from slipstream.text.prompt_sets import builtin_prompts

COMMAND = [sys.executable, "-c", "from slipstream.apps.cli import main; main()", "batch"]
CLUSTER = Path(__file__).parents[1] / "tests" / "support" / "ray_cluster.py"


def requests(count: int) -> list[dict[str, Any]]:
    """`count` requests of mixed length: a prompt, and in every second the same prompt with a further wish."""
    rng, prompts = random.Random(5), [one.prompt for one in builtin_prompts()]
    wishes = ("", " Be brief.", " Give one example.", " Explain your answer.", " Answer in plain words.")
    made = []
    for at in range(count):
        text = prompts[at % len(prompts)] + wishes[at // len(prompts) % len(wishes)]
        repeated = at // (len(prompts) * len(wishes))
        text += f" (version {repeated + 1})" if repeated else ""
        made.append({"id": f"request-{at}", "prompt": text, "max_tokens": rng.choice([8, 16, 32, 48, 64, 96])})
    return made


def answers(path: Path) -> dict[str, str]:
    """The lines of an output by id; SystemExit if an id is there twice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {json.loads(line)["id"]: line for line in lines}
    if len(found) != len(lines):
        raise SystemExit(f"{len(lines) - len(found)} ids are there twice")
    return found


def survive(args: argparse.Namespace) -> dict[str, Any]:
    """Kill a job at random moments, let it end, and compare with one that was not killed."""
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    lines = requests(args.count)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = ["--target", args.target, "--max-batch-size", str(args.batch)]
    out, kept = folder / "out.jsonl", []
    for _ in range(args.kills):
        before = size(out)
        job = subprocess.Popen([*COMMAND, str(folder / "in.jsonl"), str(out), *options], stderr=subprocess.DEVNULL)
        while size(out) <= before and job.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, args.longest))
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        kept.append(out.read_bytes().count(b"\n"))
        print(f"killed with {kept[-1]} of {len(lines)} answered", flush=True)
    subprocess.run([*COMMAND, str(folder / "in.jsonl"), str(out), *options], check=True)
    subprocess.run([*COMMAND, str(folder / "in.jsonl"), str(folder / "whole.jsonl"), *options], check=True)
    found, whole = answers(out), answers(folder / "whole.jsonl")
    same = sum(found.get(name) == line for name, line in whole.items())
    return {"requests": len(lines), "kills": len(kept), "kept": kept, "ids": len(found), "identical": same}


def size(path: Path) -> int:
    """Bytes of a file that may not be there yet."""
    return path.stat().st_size if path.exists() else 0


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of the job, of `generate` over the list, and of the baseline."""
    from slipstream import SamplingParams, SpeculativeDecoder

    lines, folder = requests(args.count), Path(tempfile.mkdtemp())
    prompts = [line["prompt"] for line in lines]
    params = [SamplingParams(max_tokens=line["max_tokens"]) for line in lines]
    found: dict[str, Any] = {"requests": len(lines)}
    decoder = SpeculativeDecoder(args.target, acceptance="match", max_batch_size=args.batch)
    decoder.generate(prompts[: args.batch], SamplingParams(max_tokens=16))  # warm

    def fresh() -> None:
        decoder.forget()
        decoder.forget_learned()

    def job() -> int:
        return decoder.batch(lines, folder / "out.jsonl").work.output_tokens

    def together() -> int:
        return sum(len(result.token_ids) for result in decoder.generate(prompts, params))

    def plain() -> int:
        report = decoder.using("none").batch(lines, folder / "plain.jsonl")
        return report.work.output_tokens

    for name, work in (("batch", job), ("generate", together), ("batch without drafts", plain)):
        fresh()
        found[name] = timed(name, work)
    found["identical"] = sum(
        answers(folder / "plain.jsonl").get(k) == v for k, v in answers(folder / "out.jsonl").items()
    )
    if args.hf:
        found["hf"] = timed("Hugging Face", lambda: baseline(args, decoder, prompts[: args.hf], params[: args.hf]))
    return found


def timed(name: str, work: Callable[[], int]) -> dict[str, float]:
    """How long some work takes, and how many tokens it makes."""
    begun = time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - begun
    print(f"{name}: {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s", flush=True)
    return {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds, 1)}


def baseline(args: argparse.Namespace, decoder: Any, prompts: list[str], params: list[Any]) -> int:
    """Transformers' `generate`, batch after batch, each as long as its longest; a request's own tokens count."""
    from dataclasses import replace

    from slipstream.bench.arms import Arm
    from slipstream.bench.baselines import Baseline, plain_model
    from slipstream.models.loaded import LoadOptions

    hf = Baseline(Arm("hf"), plain_model(decoder.target, LoadOptions()), None, decoder.target.end_ids, args.batch)
    total = 0
    for at in range(0, len(prompts), args.batch):
        own = params[at : at + args.batch]
        longest = max(one.max_tokens for one in own)
        ids = [decoder.encode(prompt, chat=True) for prompt in prompts[at : at + args.batch]]
        texts, _ = hf.generate(ids, [replace(one, max_tokens=longest) for one in own])
        total += sum(min(len(text), one.max_tokens) for text, one in zip(texts, own, strict=True))
    return total


@contextmanager
def two_nodes() -> Iterator[subprocess.Popen[str]]:
    """A cluster, whose address is its first line; a line to it kills the second node."""
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(CLUSTER)]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as nodes:
        assert nodes.stdin is not None
        try:
            yield nodes
        finally:
            nodes.stdin.close()


def num_lines(path: Path) -> int:
    """Lines of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def over_ray(args: argparse.Namespace) -> dict[str, Any]:
    """The job in one process, then over actors; a node may be killed once a fifth of the lines is answered."""
    folder = Path(tempfile.mkdtemp())
    source, out, alone = folder / "in.jsonl", folder / "ray.jsonl", folder / "alone.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests(args.count)), encoding="utf-8")
    options = ["--target", args.target, "--max-batch-size", str(args.batch)]
    begun, first, killed = time.perf_counter(), 0.0, 0
    subprocess.run([*COMMAND, str(source), str(alone), *options], check=True, stderr=subprocess.DEVNULL)
    alone_seconds = time.perf_counter() - begun
    with two_nodes() as nodes:
        assert nodes.stdin is not None and nodes.stdout is not None
        ray = ["--ray", nodes.stdout.readline().strip(), "--ray-actors", str(args.ray), "--ray-cpus", "1"]
        begun = time.perf_counter()
        with subprocess.Popen([*COMMAND, str(source), str(out), *options, *ray], stderr=subprocess.DEVNULL) as job:
            while job.poll() is None:
                first = first or (time.perf_counter() if num_lines(out) else 0.0)
                if args.kill_node and not killed and num_lines(out) >= args.count // 5:
                    nodes.stdin.write("kill\n")
                    nodes.stdin.flush()
                    assert nodes.stdout.readline() == "gone\n"
                    killed = num_lines(out)
                time.sleep(0.01)
        ended = time.perf_counter()
    found, expected = answers(out), answers(alone)
    return {
        "requests": args.count,
        "actors": args.ray,
        "seconds_alone": round(alone_seconds, 1),
        "seconds_over_ray": round(ended - begun, 1),
        "of_them_from_the_first_answer": round(ended - first, 1),
        "answered_when_a_node_was_killed": killed,
        "ids": len(found),
        "identical": sum(found.get(name) == line for name, line in expected.items()),
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=positive, default=500)
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds from a run's first answer to its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--hf", type=int, default=0, help="requests for the baseline")
    parser.add_argument("--ray", type=int, default=0, help="actors of a job over Ray")
    parser.add_argument("--kill-node", action="store_true", help="with --ray: kill a node during the job")
    args = parser.parse_args()
    found: dict[str, Any] = {"target": args.target, "batch": args.batch}
    if args.speed:
        found |= speed(args)
    if args.kills:
        found |= survive(args)
    if args.ray:
        found |= {"ray": over_ray(args)}
    print(json.dumps(found))
    if args.ray and not found["ray"]["identical"] == found["ray"]["ids"] == args.count:
        raise SystemExit(1)


if __name__ == "__main__":
    in_one_line(main)
