"""Batch jobs: do they survive SIGKILL, and how fast are they next to `generate` and Hugging Face's padded batches?

    python benchmarks/batch_jobs.py --kills 10           # killed 10 times: every id once, with the text of a whole run
    python benchmarks/batch_jobs.py --speed --hf 120     # tokens per second; Hugging Face on the first 120 requests
    python benchmarks/batch_jobs.py --ray 2 --count 100 --kill-node     # two actors on two nodes of this machine
    python benchmarks/batch_jobs.py --ray-blocks 300     # Ray's own time for a block of requests

--ray runs the job on a Ray cluster of two nodes, both on this machine, and in one process. It compares the seconds
and the lines, and exits with code 1 if a line is missing or differs. Requests are variants of the package's prompts,
decoded greedily, 8 to 96 tokens each. The last line of output is JSON.
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
    """`count` requests of mixed lengths: every prompt as it is, then every prompt with the first wish, and so on."""
    rng, prompts = random.Random(5), [named.prompt for named in builtin_prompts()]
    wishes = ("", " Be brief.", " Give one example.", " Explain your answer.", " Answer in plain words.")
    lines = []
    for number in range(count):
        text = prompts[number % len(prompts)] + wishes[number // len(prompts) % len(wishes)]
        repeats = number // (len(prompts) * len(wishes))
        text += f" (version {repeats + 1})" if repeats else ""
        lines.append({"id": f"request-{number}", "prompt": text, "max_tokens": rng.choice([8, 16, 32, 48, 64, 96])})
    return lines


def answers(path: Path) -> dict[str, str]:
    """The lines of an output file by id; SystemExit if an id appears twice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    by_id = {json.loads(line)["id"]: line for line in lines}
    if len(by_id) != len(lines):
        raise SystemExit(f"{path}: {len(lines) - len(by_id)} lines repeat the id of another")
    return by_id


def survive(args: argparse.Namespace) -> dict[str, Any]:
    """Kill a job at random moments, run it to its end, and compare its output with that of a job never killed."""
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    lines = requests(args.count)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = ["--target", args.target, "--max-batch-size", str(args.batch)]
    out, answered = folder / "out.jsonl", []
    for _ in range(args.kills):
        before = num_lines(out)
        job = subprocess.Popen([*COMMAND, str(folder / "in.jsonl"), str(out), *options], stderr=subprocess.DEVNULL)
        while num_lines(out) <= before and job.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, args.longest))
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        answered.append(num_lines(out))
        print(f"killed with {answered[-1]} of {len(lines)} answered", flush=True)
    subprocess.run([*COMMAND, str(folder / "in.jsonl"), str(out), *options], check=True)
    subprocess.run([*COMMAND, str(folder / "in.jsonl"), str(folder / "whole.jsonl"), *options], check=True)
    resumed, whole = answers(out), answers(folder / "whole.jsonl")
    same = sum(resumed.get(request_id) == line for request_id, line in whole.items())
    return {"requests": len(lines), "kills": len(answered), "kept": answered, "ids": len(resumed), "identical": same}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of a batch job with and without drafts, of `generate` over the list, and of Hugging Face."""
    from slipstream import SamplingParams, SpeculativeDecoder

    lines, folder = requests(args.count), Path(tempfile.mkdtemp())
    prompts = [line["prompt"] for line in lines]
    params = [SamplingParams(max_tokens=line["max_tokens"]).explicit for line in lines]
    figures: dict[str, Any] = {"requests": len(lines)}
    decoder = SpeculativeDecoder(args.target, acceptance="match", max_batch_size=args.batch)
    decoder.generate(prompts[: args.batch], SamplingParams(max_tokens=16).explicit)  # warm

    def forget_everything() -> None:
        decoder.forget()
        decoder.forget_learned()

    def job() -> int:
        return decoder.batch(lines, folder / "out.jsonl").work.output_tokens

    def generate() -> int:
        return sum(len(result.token_ids) for result in decoder.generate(prompts, params))

    def plain_job() -> int:
        return decoder.using("none").batch(lines, folder / "plain.jsonl").work.output_tokens

    for name, work in (("batch", job), ("generate", generate), ("batch without drafts", plain_job)):
        forget_everything()
        figures[name] = timed(name, work)
    figures["identical"] = sum(
        answers(folder / "plain.jsonl").get(request_id) == line
        for request_id, line in answers(folder / "out.jsonl").items()
    )
    if args.hf:
        figures["hf"] = timed("Hugging Face", lambda: baseline(args, decoder, prompts[: args.hf], params[: args.hf]))
    return figures


def timed(name: str, work: Callable[[], int]) -> dict[str, float]:
    """Do the work, which returns how many tokens it made; print and return tokens, seconds and tokens per second."""
    begun = time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - begun
    print(f"{name}: {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s", flush=True)
    return {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds, 1)}


def baseline(args: argparse.Namespace, decoder: Any, prompts: list[str], params: list[Any]) -> int:
    """Tokens from transformers' `generate` in padded batches.

    A batch runs until its longest request ends; of every text only the tokens that its request asked for count.
    """
    from dataclasses import replace

    from slipstream.bench.arms import Arm
    from slipstream.bench.baselines import Baseline
    from slipstream.certificate.parity import plain_model
    from slipstream.models.loaded import LoadOptions

    hf = Baseline(Arm("hf"), plain_model(decoder.target, LoadOptions()), None, decoder.target.end_ids, args.batch)
    total = 0
    for first in range(0, len(prompts), args.batch):
        limits = [row.max_tokens for row in params[first : first + args.batch]]
        ids = [decoder.encode(prompt, chat=True) for prompt in prompts[first : first + args.batch]]
        texts, _ = hf.generate(ids, [replace(params[first], max_tokens=max(limits))] * len(ids))
        total += sum(min(len(text), limit) for text, limit in zip(texts, limits, strict=True))
    return total


@contextmanager
def two_nodes() -> Iterator[subprocess.Popen[str]]:
    """A Ray cluster of two nodes: it prints its address, and any line written to it kills the second node."""
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
    """Number of lines of a file, 0 if it does not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def over_ray(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job in one process, then on Ray actors; --kill-node kills a node after a fifth of the lines."""
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
    over_actors, expected = answers(out), answers(alone)
    return {
        "requests": args.count,
        "actors": args.ray,
        "seconds_alone": round(alone_seconds, 1),
        "seconds_over_ray": round(ended - begun, 1),
        "of_them_from_the_first_answer": round(ended - first, 1),
        "answered_when_a_node_was_killed": killed,
        "ids": len(over_actors),
        "identical": sum(over_actors.get(request_id) == line for request_id, line in expected.items()),
    }


class _Echo:
    """An engine that answers at once."""

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        return block


def ray_costs(args: argparse.Namespace) -> dict[str, float]:
    """Time a job whose engine answers at once: its first block, and each further one. Blocks are synced to disk."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from slipstream.integrations.ray.ray_job import BLOCKS_AT_ONCE
    from slipstream.integrations.ray.ray_options import ray_module

    ray: Any = ray_module()
    begun = time.perf_counter()
    ray.init(log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = requests(args.ray_blocks * args.batch)
    items = [{"number": number, "line": json.dumps(line)} for number, line in enumerate(lines)]
    in_flight = {"max_tasks_in_flight_per_actor": 2 * BLOCKS_AT_ONCE, "max_concurrent_calls_per_actor": BLOCKS_AT_ONCE}
    pool = ray.data.ActorPoolStrategy(size=1, enable_true_multi_threading=True, **in_flight)
    answered = ray.data.from_items(items, override_num_blocks=args.ray_blocks).map_batches(
        _Echo, batch_size=None, compute=pool, num_cpus=1
    )
    ended = []
    with tempfile.TemporaryFile() as out:
        for block in answered.iter_batches(batch_size=None, prefetch_batches=0):
            out.write("\n".join(map(str, block["line"])).encode())
            out.flush()
            os.fsync(out.fileno())
            ended.append(time.perf_counter())
    ray.shutdown()
    milliseconds = 1e3 * (ended[-1] - ended[0]) / max(1, len(ended) - 1)
    return {"first_block_seconds": round(ended[0] - begun, 2), "block_milliseconds": round(milliseconds, 2)}


def main() -> None:
    """Run the measurements that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=positive, default=500, help="number of requests")
    parser.add_argument("--batch", type=positive, default=8, help="rows decoded together")
    parser.add_argument("--kills", type=int, default=0, help="how often the job is killed")
    parser.add_argument("--longest", type=float, default=6.0, help="kill at most this many seconds after an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="measure tokens per second")
    parser.add_argument("--hf", type=int, default=0, help="with --speed: requests for Hugging Face")
    parser.add_argument("--ray", type=int, default=0, help="run the job on this many Ray actors")
    parser.add_argument("--ray-blocks", type=int, default=0, help="time Ray on this many blocks of --batch requests")
    parser.add_argument("--kill-node", action="store_true", help="with --ray: kill a node during the job")
    args = parser.parse_args()
    report: dict[str, Any] = {"target": args.target, "batch_size": args.batch}
    if args.speed:
        report |= speed(args)
    if args.kills:
        report |= survive(args)
    if args.ray:
        report |= {"ray": over_ray(args)}
    if args.ray_blocks:
        report |= ray_costs(args)
    print(json.dumps(report))
    if args.ray and not report["ray"]["identical"] == report["ray"]["ids"] == args.count:
        raise SystemExit(1)


if __name__ == "__main__":
    in_one_line(main)
