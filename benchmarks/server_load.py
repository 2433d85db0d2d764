"""Load on `slipstream serve`, beside `transformers serve` with continuous batching on the same machine and file.

    make clients                                              # once: transformers serve in an environment of its own
    python benchmarks/server_load.py --streams 1,4,8,16 --rate 1.0 --json runs/server_load.json
    python benchmarks/server_load.py --overhead               # HTTP beside the same batch in one call of `generate`

Both servers are up and asked in turn, load by load; ours is started anew for each, since it drafts from answers that it
has given before, and every load asks the same. Times are the client's. Every text of Slipstream's must be the one that
plain decoding has for its prompt; the program ends with code 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx
from load_client import Answer, Load, figures, run_load
from server_soak import PATIENCE_SECONDS, client_program, end_on_signals, last_line, slipstream_serve
from terminal import in_one_line, positive

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder
from slipstream.text.prompt_sets import builtin_prompts, spread

COLUMNS = (
    "tokens_per_second",
    *(f"{name}_ms_{p}" for name in ("first", "between", "per_token") for p in ("p50", "p99")),
)


@contextmanager
def transformers_serve(program: str, folder: str, options: Sequence[str]) -> Iterator[str]:
    """The address of `transformers serve` of a model's folder, with continuous batching."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [program, "serve", folder, "--continuous-batching", "--host", "127.0.0.1", "--port", str(port), *options]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | offline)
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(trust_env=False) as client:
                while not _is_ready(client, url):
                    if process.poll() is not None:
                        output.seek(0)
                        raise SlipstreamError(f"transformers serve ended: {last_line(output.readlines())}")
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def prompts_of(options: argparse.Namespace, count: int) -> list[str]:
    """Of all categories, the long ones cut, so that the load is of answers."""
    return [one.prompt[: options.longest_prompt] for one in spread(builtin_prompts(), count)]


def loads(options: argparse.Namespace) -> list[tuple[Load, int]]:
    """Every load and its number of requests: a few rounds of its streams."""
    found = [(Load(n), max(options.requests, 2 * n)) for n in options.streams]
    return [*found, *((Load(64, rate), options.requests) for rate in options.rate)]


def compare(options: argparse.Namespace, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """All loads on both servers; texts beside plain decoding's."""
    fields: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": 0.0}
    folder = str(cache_folder() / options.target)
    begun = ["--target", options.target, "--max-batch-size", str(options.max_batch_size)]
    begun += ["--draft", options.draft] if options.draft else []
    rows, said = [], dict[str, dict[str, set[str]]]()
    with ExitStack() as stack:
        arms = {}
        if not options.alone:
            program = str(client_program("transformers_serve", "transformers"))
            theirs = stack.enter_context(transformers_serve(program, folder, options.theirs.split()))
            arms["transformers"] = (theirs, folder)
        for number, (load, count) in enumerate(loads(options)):
            with slipstream_serve(begun) as ours:
                arms["slipstream"] = (ours, options.target)
                for url, model in arms.values():
                    warm = [f"Warm up. {prompt}" for prompt in prompts_of(options, 2)]
                    asyncio.run(run_load(url, model, warm, Load(2), fields))
                for arm in sorted(arms, reverse=bool(number % 2)):
                    url, model = arms[arm]
                    answers = asyncio.run(run_load(url, model, prompts_of(options, count), load, fields))
                    count_tokens(answers, decoder)
                    rows.append({"load": str(load), "arm": arm, "requests": count} | figures(answers))
                    print(line_of(rows[-1]), flush=True)
                    for one in answers:
                        said.setdefault(arm, {}).setdefault(one.prompt, set()).add(one.text)
    return {"rows": rows, "texts": {arm: same_as_plain(texts, decoder, options) for arm, texts in said.items()}}


def count_tokens(answers: Sequence[Answer], decoder: SpeculativeDecoder) -> None:
    """By the tokenizer, for both servers alike: what they report of their own is not compared."""
    assert decoder.tokenizer is not None
    for one in answers:
        one.tokens = len(decoder.tokenizer.bare(one.text)) + (one.reason == "stop")


def same_as_plain(texts: dict[str, set[str]], decoder: SpeculativeDecoder, options: argparse.Namespace) -> str:
    """How many prompts always had the text of plain decoding, of how many."""
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    results = decoder.using("none").generate([[{"role": "user", "content": p}] for p in texts], params)
    same = sum(seen == {one.text} for seen, one in zip(texts.values(), results, strict=True))
    return f"{same}/{len(texts)}"


def overhead(options: argparse.Namespace, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The time of a batch over HTTP beside one call of `generate`, in turn, with and without drafting.

    Whole answers are what `generate` gives. Streamed ones come in a chunk of each text per round; what that takes
    besides is mostly the client's, which wakes for every chunk on the cores that compute.
    """
    found: dict[str, Any] = {}
    arguments = ["--target", options.target, "--max-batch-size", str(options.max_batch_size)]
    with slipstream_serve([*arguments, "--drafter", options.drafter]) as url:
        for name, drafts in (("plain", 0), ("speculative", None)):
            here = decoder.using("none" if drafts == 0 else options.drafter)
            own = {} if drafts is None else {"num_draft_tokens": drafts}
            seconds: dict[str, list[tuple[float, float]]] = {"whole": [], "streamed": []}
            for at in range(options.repeats + 1):
                for way, taken in seconds.items():
                    asked = [f"{name} {way} {at}: {prompt}" for prompt in prompts_of(options, options.max_batch_size)]
                    both = _both(url, here, asked, options, own | {"stream": way == "streamed"})
                    if at:  # the first warms
                        taken.append(both)
            for way, taken in seconds.items():
                by = median(served / direct for direct, served in taken) - 1
                found[f"{name}, {way}"] = {"overhead": by, "seconds": taken}
                direct, served = (median(one) for one in zip(*taken, strict=True))
                print(
                    f"{name}, {way} answers: HTTP takes {by:+.1%} of the time of generate, {direct:.3f} and "
                    f"{served:.3f} s; {len(taken)} batches of {len(asked)}, all texts identical",
                    flush=True,
                )
    return found


def _both(
    url: str, decoder: SpeculativeDecoder, asked: list[str], options: argparse.Namespace, own: dict[str, Any]
) -> tuple[float, float]:
    """Seconds of a batch in one call and over HTTP; its prompts must be new to both, as cached ones are not read."""
    fields = {"max_tokens": options.max_tokens, "temperature": 0.0, "ignore_eos": True}
    begun = perf_counter()
    results = decoder.generate([[{"role": "user", "content": prompt}] for prompt in asked], SamplingParams(**fields))
    direct = perf_counter() - begun
    begun = perf_counter()
    answers = asyncio.run(run_load(url, options.target, asked, Load(len(asked)), fields | own))
    served = perf_counter() - begun
    if [one.text for one in answers] != [one.text for one in results]:
        raise SlipstreamError("a text over HTTP is not the one that generate gives")
    return direct, served


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    return f"| {row['load']} | {row['arm']} | " + " | ".join(f"{row[name]:.1f}" for name in COLUMNS) + " |"


def several(text: str) -> list[int]:
    """A type of argparse."""
    return [positive(number) for number in text.split(",") if number]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit with 1 if a text of Slipstream's is not that of plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="a name of `slipstream models`")
    parser.add_argument("--draft")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--streams", type=several, default="1,4,8,16", help="numbers, joined by commas")
    parser.add_argument("--rate", type=float, action="append", default=[], help="arrivals per second; again for more")
    parser.add_argument("--requests", type=positive, default=16, help="of each load, but at least two per stream")
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--max-batch-size", type=positive, default=8)
    parser.add_argument("--longest-prompt", type=positive, default=600, help="characters")
    parser.add_argument(
        "--theirs",
        default="--cb-max-memory-percent 0.1",
        help="options of transformers serve; its cache takes most of memory",
    )
    parser.add_argument("--alone", action="store_true", help="without transformers serve")
    parser.add_argument("--overhead", action="store_true", help="HTTP beside generate instead")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    end_on_signals()
    decoder = SpeculativeDecoder(options.target, acceptance="match", max_batch_size=options.max_batch_size)
    if options.overhead:
        found = overhead(options, decoder)
    else:
        print(f"| load | server | {' | '.join(name.replace('_', ' ') for name in COLUMNS)} |")
        print("|" + "---|" * (2 + len(COLUMNS)), flush=True)
        found = compare(options, decoder)
        for arm, same in found["texts"].items():
            print(f"{arm}: {same} prompts have the text of plain decoding")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(vars(options) | found, indent=2, default=str) + "\n", encoding="utf-8")
    exact = options.overhead or len(set(found["texts"]["slipstream"].split("/"))) == 1
    return 0 if exact else 1


if __name__ == "__main__":
    in_one_line(main)
