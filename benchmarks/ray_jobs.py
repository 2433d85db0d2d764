"""A batch job over a Ray cluster of two nodes on this machine: what Ray costs, and what a node costs that dies.

    python benchmarks/ray_jobs.py --target toy --count 1000        # seconds over Ray beside one process
    python benchmarks/ray_jobs.py --count 100 --kill               # a node dies once a fifth is answered

The lines must be those of one machine, each once. Ends in one line of JSON; the exit code is 1 if a line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batch_jobs import COMMAND, answers, requests
from terminal import in_one_line, positive

CLUSTER = Path(__file__).parents[1] / "tests" / "support" / "ray_cluster.py"


@contextmanager
def two_nodes() -> Iterator[subprocess.Popen[str]]:
    """A cluster, whose address is its first line; a line to it kills the second node."""
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(CLUSTER)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdin is not None
        try:
            yield nodes
        finally:
            nodes.stdin.close()


def count(path: Path) -> int:
    """Lines of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def over_ray(args: argparse.Namespace, source: Path, out: Path, options: Sequence[str]) -> tuple[float, float, int]:
    """The job over two actors: seconds in all, seconds from its first answer on, and answers when a node was killed."""
    with two_nodes() as nodes:
        assert nodes.stdin is not None and nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        ray = ["--ray", address, "--ray-actors", str(args.actors), "--ray-cpus", "1"]
        begun, first, killed = time.perf_counter(), 0.0, 0
        with subprocess.Popen([*COMMAND, str(source), str(out), *options, *ray], stderr=subprocess.DEVNULL) as job:
            while job.poll() is None:
                first = first or (time.perf_counter() if count(out) else 0.0)
                if args.kill and not killed and count(out) >= args.count // 5:
                    nodes.stdin.write("kill\n")
                    nodes.stdin.flush()
                    assert nodes.stdout.readline() == "gone\n"
                    killed = count(out)
                time.sleep(0.01)
        ended = time.perf_counter()
        return ended - begun, ended - first, killed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job both ways."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=positive, default=100)
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--actors", type=positive, default=2)
    parser.add_argument("--kill", action="store_true", help="kill a node once a fifth of the lines is answered")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp())
    source, out, alone = folder / "in.jsonl", folder / "ray.jsonl", folder / "alone.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests(args.count)))
    options = ["--target", args.target, "--max-batch-size", str(args.batch)]
    begun = time.perf_counter()
    subprocess.run([*COMMAND, str(source), str(alone), *options], check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - begun
    whole, from_first, killed = over_ray(args, source, out, options)
    found, wanted = answers(out), answers(alone)
    same = sum(found.get(id) == line for id, line in wanted.items())
    print(
        json.dumps(
            {
                "target": args.target,
                "requests": args.count,
                "actors": args.actors,
                "seconds_alone": round(seconds, 1),
                "seconds_over_ray": round(whole, 1),
                "of_them_from_the_first_answer": round(from_first, 1),
                "answered_when_a_node_was_killed": killed,
                "ids": len(found),
                "identical": same,
            }
        )
    )
    return 0 if same == args.count == len(found) else 1


if __name__ == "__main__":
    in_one_line(main)
