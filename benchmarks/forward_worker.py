"""A process that computes forwards of one model in one engine, as `beside_llama_cpp.py` asks it to on standard input.

    python benchmarks/forward_worker.py ENGINE MODEL CONTEXT

ENGINE is slipstream or llama.cpp. `tokens N`: a forward of N tokens after CONTEXT others, and the likeliest token after
each, the second of two, as the first meets caches and threads that another process has just used; `prompt N`: a prompt
of N tokens read up to its first new token; both are answered by milliseconds. `memory`: by bytes that are resident, and
those of them that are no pages of files. `first PROMPT` is asked of a new process alone: a chat message answered up to
its first token, from the model's name on, by the engine's own public interface.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

LONGEST = 1024  # tokens of a context and a forward, or of a prompt
SAFE = 1000  # token ids below this are in every vocabulary
Read = Callable[[list[int], int], Any]  # tokens, start -> the likeliest token after each
Prompt = Callable[[list[int]], Any]


def slipstream(target: str) -> tuple[Read, Prompt]:
    """Forwards of our own kernels, and prompts through a decoder."""
    import torch

    from slipstream import SamplingParams, SpeculativeDecoder
    from slipstream.models.weights.model_files import quiet

    quiet()
    decoder = SpeculativeDecoder(target, drafter="none", max_batch_size=1)
    backend, one = decoder.target.backend, SamplingParams(max_tokens=1, ignore_eos=True)
    backend.attended_unit = 1
    backend.reserve(1, LONGEST)

    def read(tokens: list[int], start: int) -> Any:
        return backend.forward(torch.tensor([tokens]), [start], first_slot=0, logits=True)[0].argmax(-1).tolist()

    def prompt(tokens: list[int]) -> Any:
        decoder.forget()
        return decoder.generate(tokens, one).token_ids

    return read, prompt


def llama_cpp(target: str) -> tuple[Read, Prompt]:
    """The same by llama.cpp."""
    import torch

    from slipstream.bench.llama_cpp import LlamaCppModel

    model = LlamaCppModel(Path(target), torch.get_num_threads())
    return (
        lambda tokens, start: model.forward(tokens, start).argmax(-1).tolist(),
        lambda tokens: int(model.read(tokens).argmax()),
    )


def first_of_slipstream(target: str, message: str) -> None:
    """A decoder and the first chunk of an answer."""
    from slipstream import SamplingParams, SpeculativeDecoder

    decoder = SpeculativeDecoder(target, drafter="none")
    next(iter(decoder.stream([{"role": "user", "content": message}], SamplingParams(max_tokens=8))))


def first_of_llama_cpp(target: str, message: str) -> None:
    """The binding's class and the first piece of an answer that has text."""
    from llama_cpp import Llama

    model = Llama(target, n_ctx=LONGEST, verbose=False)
    said = model.create_chat_completion(
        [{"role": "user", "content": message}], max_tokens=8, temperature=0, stream=True
    )
    next(piece for piece in said if piece["choices"][0]["delta"].get("content"))


def memory() -> dict[str, int]:
    """Bytes of this process that are resident, and of them those that the system cannot take back."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB", status, re.M)}
    return {"resident": found["VmRSS"], "anonymous": found["RssAnon"]}


def serve(read: Read, prompt: Prompt, context: int) -> None:
    """Answer lines until the input ends."""
    tokens = [random.Random(1).randrange(1, SAFE) for _ in range(LONGEST)]
    stands = False  # whether the cache holds the context
    for line in sys.stdin:
        what, _, number = line.strip().partition(" ")
        if what == "tokens":
            if not stands:
                read(tokens[:context], 0)
            read(tokens[context : context + int(number)], context)
            stands = True
        started = perf_counter()
        if what == "tokens":
            read(tokens[context : context + int(number)], context)
        elif what == "prompt":
            prompt(tokens[: int(number)])
            stands = False
        answer = memory() if what == "memory" else 1e3 * (perf_counter() - started)
        print(json.dumps(answer), flush=True)


def main(engine: str, target: str, asked: str) -> None:
    """Begin. asked: how many tokens of context, or `first MESSAGE`."""
    ours = engine == "slipstream"
    if asked.startswith("first "):
        (first_of_slipstream if ours else first_of_llama_cpp)(target, asked.removeprefix("first "))
        print("done", flush=True)
        return
    read, prompt = (slipstream if ours else llama_cpp)(target)
    print("ready", flush=True)
    serve(read, prompt, int(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
