"""The process of one engine for `beside_llama_cpp.py`: it computes the forwards that standard input asks for.

    python benchmarks/forward_worker.py ENGINE MODEL CONTEXT

ENGINE is slipstream or llama.cpp. Lines of standard input (JSON strings), and their answers:

- `tokens N`: milliseconds of a forward of N tokens after CONTEXT others, including the likeliest token after each. The
  forward is computed twice and the second one timed, since the first meets caches and threads that another process has
  just used.
- `prompt N`: milliseconds to read a prompt of N tokens up to its first new token.
- `memory`: bytes that are resident, and how many of them are anonymous, that is, not pages of files.

With `first MESSAGE` in place of CONTEXT the process loads the model, answers the chat message up to the first token
through the engine's public interface, prints a line and ends.
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

LONGEST = 1024  # tokens of a forward after the context, or of a prompt
CHUNK = 256  # tokens of the context that a forward reads
SAFE = 1000  # token ids below this are in every vocabulary
Read = Callable[[list[int], int], Any]  # tokens, start -> the likeliest token after each
Prompt = Callable[[list[int]], Any]


def slipstream(target: str, room: int) -> tuple[Read, Prompt]:
    """Forwards of our own kernels, and prompts through a decoder."""
    import torch

    from slipstream import SamplingParams, SpeculativeDecoder
    from slipstream.core.interfaces import Checkpoints
    from slipstream.models.weights.model_files import quiet

    quiet()
    decoder = SpeculativeDecoder(target, drafter="none", max_batch_size=1)
    backend, one_token = decoder.target.backend, SamplingParams(max_tokens=1, ignore_eos=True)
    backend.attended_unit = 1
    backend.reserve(1, room)

    def read(tokens: list[int], start: int) -> Any:
        if isinstance(backend, Checkpoints):
            backend.mark_final(0, start)  # else a recurrent state would be computed again
        return backend.forward(torch.tensor([tokens]), [start], first_slot=0, logits=True)[0].argmax(-1).tolist()

    def prompt(tokens: list[int]) -> Any:
        decoder.forget()
        return decoder.generate(tokens, one_token).token_ids

    return read, prompt


def llama_cpp(target: str, room: int) -> tuple[Read, Prompt]:
    """Forwards and prompts by llama.cpp."""
    import torch

    from slipstream.bench.llama_cpp import LlamaCppModel

    model = LlamaCppModel(Path(target), torch.get_num_threads())
    model.reserve(room)
    return (
        lambda tokens, start: model.forward(tokens, start).argmax(-1).tolist(),
        lambda tokens: int(model.read(tokens).argmax()),
    )


def first_of_slipstream(target: str, message: str) -> None:
    """Load a decoder and stream an answer up to its first chunk."""
    from slipstream import SamplingParams, SpeculativeDecoder

    decoder = SpeculativeDecoder(target, drafter="none")
    next(iter(decoder.stream([{"role": "user", "content": message}], SamplingParams(max_tokens=8))))


def first_of_llama_cpp(target: str, message: str) -> None:
    """Load the model by llama-cpp-python and stream an answer up to the first piece with text."""
    from llama_cpp import Llama

    model = Llama(target, n_ctx=LONGEST, verbose=False)
    pieces = model.create_chat_completion(
        [{"role": "user", "content": message}], max_tokens=8, temperature=0, stream=True
    )
    next(piece for piece in pieces if piece["choices"][0]["delta"].get("content"))


def memory() -> dict[str, int]:
    """Resident and anonymous bytes of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB", status, re.M)}
    return {"resident": sizes["VmRSS"], "anonymous": sizes["RssAnon"]}


def serve(read: Read, prompt: Prompt, context: int) -> None:
    """Answer lines until the input ends."""
    generator = random.Random(1)
    tokens = [generator.randrange(1, SAFE) for _ in range(context + LONGEST)]
    context_is_cached = False
    for line in sys.stdin:
        kind, _, number = json.loads(line).partition(" ")
        if kind == "tokens":
            if not context_is_cached:
                for start in range(0, context, CHUNK):
                    read(tokens[start : min(start + CHUNK, context)], start)
            read(tokens[context : context + int(number)], context)
            context_is_cached = True
        started = perf_counter()
        if kind == "tokens":
            read(tokens[context : context + int(number)], context)
        elif kind == "prompt":
            prompt(tokens[: int(number)])
            context_is_cached = False
        answer = memory() if kind == "memory" else 1e3 * (perf_counter() - started)
        print(json.dumps(answer), flush=True)


def main(engine: str, target: str, task: str) -> None:
    """Run one engine. task: the number of context tokens, or `first MESSAGE`."""
    ours = engine == "slipstream"
    if task.startswith("first "):
        (first_of_slipstream if ours else first_of_llama_cpp)(target, task.removeprefix("first "))
        print("done", flush=True)
        return
    context = int(task)
    read, prompt = (slipstream if ours else llama_cpp)(target, context + LONGEST)
    serve(read, prompt, context)


if __name__ == "__main__":
    main(*sys.argv[1:])
