"""Reads recorded prompts and outputs, as token ids, for benchmarks that replay them.

Inputs may be

- `runs.jsonl` of a benchmark: the texts of its first arm, on the package's prompts or those of a prompt file;
- other .jsonl files: in each line {"prompt": [ids], "output": [ids], "family": name}, and perhaps "rankings";
- text files, whose first part is the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from slipstream import UsageError
from slipstream.bench.plan import name_prompts
from slipstream.bench.records import FILE, read_records
from slipstream.models.toy import ToyTokenizer
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.text.prompt_sets import builtin_prompts, read_prompts
from slipstream.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Recorded:
    """A prompt and its output. rankings: for each output token, the target's likeliest ids at its position."""

    family: str
    prompt: list[int]
    output: list[int]
    rankings: list[list[int]] | None = None

    def token_ids(self) -> Iterator[int]:
        """Every id of the prompt, the output and the rankings."""
        return chain(self.prompt, self.output, *(self.rankings or ()))


def tokenizer_of(source: str) -> Tokenizer:
    """The tokenizer of a model; "toy" for bytes."""
    tokenizer = ToyTokenizer() if source == "toy" else load_tokenizer(source, resolve(source))
    if tokenizer is None:
        raise UsageError(f"model {source!r} has no tokenizer; allowed: a model with one, or toy")
    return tokenizer


def read_texts(
    inputs: Sequence[Path], tokenizer: Tokenizer, prompt_file: Path | None, share: float, max_tokens: int
) -> list[Recorded]:
    """Read all inputs, without texts that lack a prompt or an output. share: of a text file that is its prompt."""
    recorded: list[Recorded] = []
    for path in inputs:
        if path.name == FILE:
            recorded += _of_runs(path, tokenizer, prompt_file)
        elif path.suffix == ".jsonl":
            recorded += _of_ids(path)
        else:
            ids = tokenizer.encode(read_prompts(path)[0].prompt)
            cut = int(len(ids) * share)
            recorded.append(Recorded(path.suffix.lstrip(".") or "text", ids[:cut], ids[cut:]))
    texts = [Recorded(t.family, t.prompt, t.output[:max_tokens], t.rankings) for t in recorded if t.prompt and t.output]
    if not texts:
        raise UsageError(f"{', '.join(map(str, inputs))}: no texts; allowed: inputs with a prompt and an output")
    return texts


def _of_runs(path: Path, tokenizer: Tokenizer, prompt_file: Path | None) -> Iterator[Recorded]:
    """The first arm's text for each prompt."""
    header, runs = read_records(path.parent)
    named = name_prompts(builtin_prompts() if prompt_file is None else read_prompts(prompt_file))
    prompts = {prompt.digest: prompt for prompt in named}
    first, digests, seen = header.settings["arms"][0], header.settings["prompts"], set[str]()
    for run in runs:
        for name, text in zip(run.prompts, run.texts, strict=run.error is None):
            if run.arm != first or name in seen:
                continue
            seen.add(name)
            if digests[name] not in prompts:
                raise UsageError(f"{str(path)!r}: prompt {name!r} is not known; allowed: its file as --prompt-file")
            prompt = prompts[digests[name]].text
            chat = tokenizer.has_chat_template and header.settings["chat"]
            ids = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
            yield Recorded(name.partition("/")[0], ids, text)


def _of_ids(path: Path) -> Iterator[Recorded]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            item = json.loads(line)
            prompt, output, rankings = list(item["prompt"]), list(item["output"]), item.get("rankings")
            if rankings is not None and len(rankings) != len(output):
                raise KeyError(f"{len(rankings)} rankings for {len(output)} output tokens")
            yield Recorded(str(item.get("family", path.stem)), prompt, output, rankings)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{str(path)!r}, line {number}: {error!r}; allowed: an object with prompt and output as lists of ids, "
                "and a ranking per output token, if any"
            ) from error
