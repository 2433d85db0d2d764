"""Retrieval drafters compared: tokens per forward and speed of `ngram`, `suffix` and transformers' prompt lookup.

    python benchmarks/retrieval_drafts.py smollm2
    python benchmarks/retrieval_drafts.py TARGET --limit 3 --max-tokens 64

Code edits and summaries of the package's prompts; second turns of conversations, whose first turn the model has
answered; and series of similar requests, where `suffix, warm` knows the outputs of the requests before. Every other arm
forgets after each request. All arms take turns at each prompt; texts are compared with plain decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table
from terminal import Count, JsonFile, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.arms import parse_arms
from slipstream.bench.baselines import Baseline, plain_model
from slipstream.errors import UsageError
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts, read_prompts

SIMILAR = Path(__file__).with_name("similar.jsonl")
LEARNED_FROM = 2  # requests of a series that come before the measured ones
FOLLOW_UPS = {
    "chat": "Shorten your answer to about half its length, and keep your own words where you can.",
    "code": "Write it again with a comment above every step.",
}
WARM = "suffix, warm"
Answer = tuple[list[int], int]  # token ids, forwards of the target


@dataclass
class Total:
    """What an arm did on one kind of text."""

    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    same: int = 0
    texts: int = 0


@dataclass
class Comparison:
    """All arms over one model. A decoder's KV cache of the prompt is dropped before each request."""

    base: SpeculativeDecoder
    params: SamplingParams
    length: int
    suffix: str = "suffix"
    totals: dict[tuple[str, str], Total] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = {"none": "none", "ngram": "ngram", "suffix": self.suffix, WARM: self.suffix}
        self.decoders = {
            name: self.base.using(drafter, num_draft_tokens=0 if drafter == "none" else self.length)
            for name, drafter in settings.items()
        }
        target = self.base.target
        (arm,) = parse_arms(f"hf-lookup@{self.length}")
        model = plain_model(target, LoadOptions(fast=False))
        self.baseline = Baseline(arm, model, None, target.end_ids)
        self.arms: dict[str, Callable[[list[int]], Answer]] = {
            **{name: self._ours(decoder) for name, decoder in self.decoders.items()},
            "HF prompt lookup": lambda ids: self._theirs(ids),
        }

    def run(self, kind: str, series: Sequence[list[int]], skipped: int) -> None:
        """A series of requests; the first `skipped` are only learned from."""
        self.decoders[WARM].forget_learned()
        for ids in series[:skipped]:
            self.arms[WARM](ids)
        for number, ids in enumerate(series[skipped:]):
            expected, names = None, list(self.arms)
            turn = number % (len(names) - 1)
            for name in (names[0], *names[1 + turn :], *names[1 : 1 + turn]):
                begun = perf_counter()
                tokens, forwards = self.arms[name](ids)
                seconds = perf_counter() - begun
                if name != WARM and name in self.decoders:
                    self.decoders[name].forget_learned()
                expected = tokens if expected is None else expected
                total = self.totals.setdefault((kind, name), Total())
                total.tokens, total.forwards = total.tokens + len(tokens), total.forwards + forwards
                total.seconds, total.texts = total.seconds + seconds, total.texts + 1
                total.same += tokens == expected

    def _ours(self, decoder: SpeculativeDecoder) -> Callable[[list[int]], Answer]:
        def answer(ids: list[int]) -> Answer:
            decoder.forget()
            result = decoder.generate(list(ids), self.params)
            return result.token_ids, result.stats.num_rounds

        return answer

    def _theirs(self, ids: list[int]) -> Answer:
        (tokens,), forwards = self.baseline.generate([ids], [self.params])
        return tokens, forwards


def main(
    target: str,
    max_tokens: Count = 96,
    limit: Annotated[int, typer.Option(min=1, max=5)] = 5,
    length: Count = 10,
    suffix: str = "suffix",
    json_file: JsonFile = None,
) -> None:
    """limit: prompts per family and requests measured per series. length: most tokens drafted at once.

    suffix: how it drafts, "suffix:p=0" for all the tokens it may, whatever their chances, as prompt lookup does.
    """
    quiet()
    base = SpeculativeDecoder(target, dtype="auto")
    if base.target.model is None:
        raise UsageError(f"target {target!r}; allowed: a Hugging Face model, which transformers can run too")
    compared = Comparison(base, SamplingParams(max_tokens=max_tokens), length, suffix)
    for kind, series, skipped in kinds(base, compared.params, limit):
        compared.run(kind, series, skipped)
        print(kind, len(series), file=sys.stderr, flush=True)
    found = compared.totals
    table = Table("text", "arm", "tokens per forward", "over HF's", "speed over plain", "texts identical")
    for (kind, name), one in found.items():
        theirs, plain = found[kind, "HF prompt lookup"], found[kind, "none"]
        efficiency = one.tokens / one.forwards
        speed = one.tokens / one.seconds / (plain.tokens / plain.seconds)
        ratio = efficiency / (theirs.tokens / theirs.forwards)
        table.add_row(
            kind, name, f"{efficiency:.2f}", f"{ratio:.2f}", f"{speed:.2f}x", f"{one.same} of {one.texts}",
            end_section=name == "HF prompt lookup",
        )  # fmt: skip
    console.print(table)
    if json_file is not None:
        json_file.write_text(
            json.dumps([{"kind": k, "arm": a, **vars(one)} for (k, a), one in found.items()], indent=1)
        )
    wrong = sum(one.texts - one.same for (_, name), one in found.items() if name in compared.decoders)
    sys.exit(1 if wrong and base.reproducible else 0)


def kinds(base: SpeculativeDecoder, params: SamplingParams, limit: int) -> Iterator[tuple[str, list[list[int]], int]]:
    """Kind of text, token ids of the requests of a series, how many of them are only learned from."""
    for family in ("code edit", "summary"):
        for prompt in builtin_prompts(categories=[family], limit=limit):
            yield family, [base.encode(prompt.prompt)], 0
    plain = base.using("none")
    for family, request in FOLLOW_UPS.items():
        for prompt in builtin_prompts(categories=[family], limit=(limit + 1) // 2):
            answer = plain.generate(prompt.prompt, params).text
            said: list[dict[str, Any]] = [
                {"role": "user", "content": prompt.prompt},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": request},
            ]
            yield "second turn", [base.encode(said)], 0
    for _, requests in groupby(read_prompts(SIMILAR, limit=LEARNED_FROM + limit), key=lambda one: one.category):
        yield "similar requests", [base.encode(one.prompt) for one in requests], LEARNED_FROM


if __name__ == "__main__":
    run(main)
