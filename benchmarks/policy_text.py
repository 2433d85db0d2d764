"""The draft length through a model's own text: prose, then a passage of the prompt word for word, then prose again.

python benchmarks/policy_text.py qwen1.5b --plot lengths.png
"""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

import typer
from policy_change import show
from terminal import Count, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import SlipstreamError
from slipstream.models.weights.model_files import quiet

PASSAGE = (
    "The harbour office opens at half past six. Boats longer than twelve metres tie up at the north quay, all others "
    "at the wooden pier behind the fish market. Fuel is sold from seven until noon, water and ice until four in the "
    "afternoon. Whoever stays overnight pays at the blue counter and hangs the yellow card where the watchman can "
    "see it. In a storm the chain across the inner basin is closed, and nobody leaves before the red light goes out. "
    "Lost ropes, buckets and lanterns are kept for a month in the shed next to the crane."
)
REQUEST = (
    f"Passage: {PASSAGE}\n\nAnswer in three parts, each with its heading. Part 1: five sentences about why people keep "
    "bees. Part 2: the passage above, copied word for word. Part 3: five sentences about the moon."
)
FEWEST = 40  # tokens of a quotation


def main(
    target: str, drafter: str = "suffix", max_tokens: Count = 420, plot: Annotated[Path | None, typer.Option()] = None
) -> None:
    """Generate greedily with lengths that pay and say how much was drafted in each round."""
    quiet()
    decoder = SpeculativeDecoder(target, drafter=drafter)
    prompt, passage = decoder.encode(REQUEST), decoder.encode(" " + PASSAGE, chat=False)
    result = decoder.generate(prompt, SamplingParams(max_tokens=max_tokens))
    decoder.forget()
    plain = decoder.using("none").generate(prompt, SamplingParams(max_tokens=max_tokens))
    console.print(result.text, markup=False)
    found = SequenceMatcher(None, result.token_ids, passage, autojunk=False).find_longest_match()
    if found.size < FEWEST:
        raise SlipstreamError(f"{target} quoted {found.size} tokens of the passage; needed: {FEWEST}")
    show(result.rounds, len(prompt), (found.a, found.a + found.size), plot)
    same = "identical to plain decoding" if result.token_ids == plain.token_ids else "DIFFERENT from plain decoding"
    ratio = result.stats.tokens_per_second / plain.stats.tokens_per_second
    console.print(f"{len(result.token_ids)} tokens, {ratio:.2f}x plain decoding, {same}")


if __name__ == "__main__":
    run(main)
