"""What predictions save where they are right and cost where they are wrong: the same texts with and without them.

    python benchmarks/predicted_outputs.py qwen1.5b "right prediction" --arms suffix,suffix.predicted

Prompts are those of some categories of code_edits.jsonl: "right prediction" (the file to be edited), "wrong prediction"
(the file of another prompt) or "whole file" (longer files, small changes); or "changed request", where the prompt does
not hold the old text: it is the target's own answer to an earlier wording of the request (changed_requests.jsonl). Arms
take turns, in the other order every other time; each run begins with an empty KV cache. All arms must give the same
text. What is printed after each prompt is the sum so far.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from terminal import in_one_line, positive

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Round
from slipstream.text.prompts import NamedPrompt, read_prompts
from slipstream.text.stats import Stats

PROMPTS = Path(__file__).with_name("code_edits.jsonl")
CHANGED = Path(__file__).with_name("changed_requests.jsonl")
CATEGORIES = ("right prediction", "wrong prediction", "whole file", "changed request")
WARM_UP = "def f(x):\n    return x\n"


def prompts_of(category: str, decoder: SpeculativeDecoder, max_tokens: int) -> list[NamedPrompt]:
    """The prompts of a category, each with its prediction."""
    if category != "changed request":
        return read_prompts(PROMPTS, categories=[category])
    found = []
    for line in CHANGED.read_text().splitlines():
        earlier, now = json.loads(line)["turns"]
        before = decoder.generate(earlier, SamplingParams(max_tokens=max_tokens)).text
        found.append(NamedPrompt(now, category, before))
    return found


def answer(decoder: SpeculativeDecoder, prompt: NamedPrompt, params: SamplingParams) -> tuple[list[Round], float]:
    """The rounds of one answer and its seconds, prompt included."""
    decoder.forget()
    decoder.forget_learned()
    started = perf_counter()
    result = decoder.generate(prompt.prompt, params)
    return result.rounds, perf_counter() - started


def line(arm: str, rounds: list[Round], seconds: float) -> str:
    """What an arm has done so far."""
    stats = Stats.of(rounds)
    decoding = seconds - stats.prefill_seconds
    return (
        f"{arm:18} {stats.block_efficiency:5.2f} tokens per forward, {seconds:6.2f} s, decoding {decoding:6.2f} s "
        f"({stats.num_output_tokens / decoding:.1f} tok/s), prediction: {stats.accepted_prediction_tokens} accepted, "
        f"{stats.rejected_prediction_tokens} rejected"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("target")
    parser.add_argument("categories", nargs="+", choices=CATEGORIES, metavar="category", help=", ".join(CATEGORIES))
    parser.add_argument("--arms", default="none,none.predicted,suffix,suffix.predicted")
    parser.add_argument("--max-tokens", type=positive, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=positive, default=1)
    given = parser.parse_args(arguments)
    arms, base = given.arms.split(","), SpeculativeDecoder(given.target, drafter="suffix")
    decoders = {arm: base.using(arm.partition(".")[0]) for arm in arms}
    for decoder in decoders.values():
        decoder.generate(WARM_UP, SamplingParams(max_tokens=24, prediction=WARM_UP))
    prompts = [one for category in given.categories for one in prompts_of(category, base, given.max_tokens)]
    rounds: dict[str, list[Round]] = {arm: [] for arm in arms}
    seconds = dict.fromkeys(arms, 0.0)
    for repeat in range(given.repeats):
        for prompt in prompts:
            texts = set()
            for arm in arms[:: 1 if repeat % 2 == 0 else -1]:
                prediction = prompt.prediction if arm.endswith(".predicted") else None
                params = SamplingParams(
                    max_tokens=given.max_tokens, temperature=given.temperature, seed=1, prediction=prediction
                )
                done, took = answer(decoders[arm], prompt, params)
                texts.add(tuple(token for one in done for token in one.tokens))
                rounds[arm] += done
                seconds[arm] += took
            assert len(texts) == 1, f"{prompt.prompt!r}: the texts differ"
            print("\n".join(line(arm, rounds[arm], seconds[arm]) for arm in arms), flush=True)


if __name__ == "__main__":
    in_one_line(main)
