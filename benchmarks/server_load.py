"""How do `slipstream serve` and `transformers serve` with continuous batching bear the same loads of requests?

    make clients                                              # once: transformers serve in an environment of its own
    python benchmarks/server_load.py --streams 1,4,8,16 --rate 1.0 --json runs/server_load.json
    python benchmarks/server_load.py --overhead               # HTTP against one call of `generate`

Both servers run on this machine with the same model and take turns, load by load. Slipstream's is restarted for each
load: every load sends the same prompts, and the server drafts from its earlier answers. Times are the client's. Exit
code 1 if one of Slipstream's texts is not that of plain decoding.
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
    """Run `transformers serve` on a model's folder with continuous batching; yields its address."""
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
    """Prompts of all categories, cut to --longest-prompt, so that answers dominate the load."""
    return [named.prompt[: options.longest_prompt] for named in spread(builtin_prompts(), count)]


def loads(options: argparse.Namespace) -> list[tuple[Load, int]]:
    """Every load and its number of requests, at least two for each of its streams."""
    concurrent = [(Load(n), max(options.requests, 2 * n)) for n in options.streams]
    return [*concurrent, *((Load(64, rate), options.requests) for rate in options.rate)]


def compare(options: argparse.Namespace, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Send all loads to both servers, and compare their texts with plain decoding's."""
    fields: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": 0.0}
    folder = str(cache_folder() / options.target)
    arguments = ["--target", options.target, "--max-batch-size", str(options.max_batch_size)]
    arguments += ["--draft", options.draft] if options.draft else []
    rows, texts = [], dict[str, dict[str, set[str]]]()  # texts: by arm and prompt
    with ExitStack() as stack:
        arms = {}
        if not options.alone:
            program = str(client_program("transformers_serve", "transformers"))
            theirs = stack.enter_context(transformers_serve(program, folder, options.theirs.split()))
            arms["transformers"] = (theirs, folder)
        for number, (load, count) in enumerate(loads(options)):
            with slipstream_serve(arguments) as ours:
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
                    for answer in answers:
                        texts.setdefault(arm, {}).setdefault(answer.prompt, set()).add(answer.text)
    return {"rows": rows, "texts": {arm: same_as_plain(texts[arm], decoder, options) for arm in texts}}


def count_tokens(answers: Sequence[Answer], decoder: SpeculativeDecoder) -> None:
    """Set the number of tokens by the tokenizer, since the servers may count theirs differently."""
    assert decoder.tokenizer is not None
    for answer in answers:
        answer.tokens = len(decoder.tokenizer.bare(answer.text)) + (answer.reason == "stop")


def same_as_plain(texts: dict[str, set[str]], decoder: SpeculativeDecoder, options: argparse.Namespace) -> str:
    """Number of prompts that always got the text of plain decoding, as "SAME/ALL"."""
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0).explicit
    results = decoder.using("none").generate([[{"role": "user", "content": p}] for p in texts], params)
    same = sum(seen == {result.text} for seen, result in zip(texts.values(), results, strict=True))
    return f"{same}/{len(texts)}"


def overhead(options: argparse.Namespace, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """Time a batch over HTTP and in one call of `generate`, in turns, with and without drafting.

    Whole answers do the same work as `generate`. Streamed ones come in a chunk of each text per round; their additional
    time is mostly the client's, which wakes for every chunk on the cores that compute.
    """
    figures_of: dict[str, Any] = {}
    arguments = ["--target", options.target, "--max-batch-size", str(options.max_batch_size)]
    with slipstream_serve([*arguments, "--drafter", options.drafter]) as url:
        for name, drafts in (("plain", 0), ("speculative", None)):
            local = decoder.using("none" if drafts == 0 else options.drafter)
            fields = {} if drafts is None else {"num_draft_tokens": drafts}
            seconds: dict[str, list[tuple[float, float]]] = {"whole": [], "streamed": []}
            for repeat in range(options.repeats + 1):
                for way, pairs in seconds.items():
                    prompts = [f"{name} {way} {repeat}: {p}" for p in prompts_of(options, options.max_batch_size)]
                    pair = _direct_and_served(url, local, prompts, options, fields | {"stream": way == "streamed"})
                    if repeat:  # the first one warms up
                        pairs.append(pair)
            for way, pairs in seconds.items():
                excess = median(served / direct for direct, served in pairs) - 1
                figures_of[f"{name}, {way}"] = {"overhead": excess, "seconds": pairs}
                direct, served = (median(times) for times in zip(*pairs, strict=True))
                print(
                    f"{name}, {way} answers: {direct:.3f} s by generate, {served:.3f} s over HTTP ({excess:+.1%}); "
                    f"{len(pairs)} batches of {len(prompts)}, all texts identical",
                    flush=True,
                )
    return figures_of


def _direct_and_served(
    url: str, decoder: SpeculativeDecoder, prompts: list[str], options: argparse.Namespace, fields: dict[str, Any]
) -> tuple[float, float]:
    """Seconds of a batch in one call and over HTTP. Its prompts must be new to both, since cached ones are not read."""
    shared = {"max_tokens": options.max_tokens, "temperature": 0.0, "ignore_eos": True}
    started = perf_counter()
    results = decoder.generate(
        [[{"role": "user", "content": prompt}] for prompt in prompts], SamplingParams(**shared).explicit
    )
    direct = perf_counter() - started
    started = perf_counter()
    answers = asyncio.run(run_load(url, options.target, prompts, Load(len(prompts)), shared | fields))
    served = perf_counter() - started
    if [answer.text for answer in answers] != [result.text for result in results]:
        raise SlipstreamError("a text over HTTP is not the one that generate gives")
    return direct, served


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    return f"| {row['load']} | {row['arm']} | " + " | ".join(f"{row[name]:.1f}" for name in COLUMNS) + " |"


def several(text: str) -> list[int]:
    """Whole numbers joined by commas, as an argparse type."""
    return [positive(number) for number in text.split(",") if number]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit with 1 if a text of Slipstream's is not that of plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="a name of `slipstream models`")
    parser.add_argument("--draft")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument(
        "--streams", type=several, default="1,4,8,16", help="numbers of concurrent requests, separated by commas"
    )
    parser.add_argument(
        "--rate", type=float, action="append", default=[], help="random arrivals per second; repeatable"
    )
    parser.add_argument(
        "--requests", type=positive, default=16, help="requests of each load, but at least two per stream"
    )
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--max-batch-size", type=positive, default=8)
    parser.add_argument("--longest-prompt", type=positive, default=600, help="characters after which prompts are cut")
    parser.add_argument(
        "--theirs",
        default="--cb-max-memory-percent 0.1",
        help="options of transformers serve, whose cache takes most of the memory by default",
    )
    parser.add_argument("--alone", action="store_true", help="without transformers serve")
    parser.add_argument("--overhead", action="store_true", help="instead, compare HTTP with generate")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    end_on_signals()
    decoder = SpeculativeDecoder(options.target, acceptance="match", max_batch_size=options.max_batch_size)
    if options.overhead:
        report = overhead(options, decoder)
    else:
        print(f"| load | server | {' | '.join(name.replace('_', ' ') for name in COLUMNS)} |")
        print("|" + "---|" * (2 + len(COLUMNS)), flush=True)
        report = compare(options, decoder)
        for arm, same in report["texts"].items():
            print(f"{arm}: {same} prompts got the text of plain decoding")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(vars(options) | report, indent=2, default=str) + "\n", encoding="utf-8")
    exact = options.overhead or len(set(report["texts"]["slipstream"].split("/"))) == 1
    return 0 if exact else 1


if __name__ == "__main__":
    in_one_line(main)
