"""Are a quantized model's texts the same as with the file's weights in float32?

    python benchmarks/quantized_texts.py MODEL.gguf --prompt-file FILE
    python benchmarks/quantized_texts.py FOLDER --activations int8 --num-prompts 4 --max-tokens 32

The kernels generate greedy texts. Transformers' model of the same file, unpacked to float32 (4 bytes a weight), reads
each text once and checks every token: would it have chosen the same one? If not, the gap is how much more likely its
own choice is, in nats. Gaps up to --tie count as ties, since float32 sums in another order differ by as much. Prompts
are the package's own, or those of a file, one of each family before the second of any. Exit code 1 if a text of int15
differs by more than a tie.
"""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import torch
import typer
from terminal import Count, JsonFile, console, run, save
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import NamedPrompt, builtin_prompts, read_prompts


def main(
    target: str,
    activations: str = "int15",
    prompt_file: Annotated[Path | None, typer.Option(help="text or JSON lines", show_default="the package's")] = None,
    num_prompts: Count = 13,
    max_tokens: Count = 64,
    tie: Annotated[float, typer.Option(min=0, help="largest gap of a tie, in nats")] = 0.01,
    json_file: JsonFile = None,
) -> None:
    """Print each gap, and how many texts are the same, tied or different."""
    quiet()
    prompts = _of_all_families(builtin_prompts() if prompt_file is None else read_prompts(prompt_file))[:num_prompts]
    with SpeculativeDecoder(target, drafter="none", activations=activations) as decoder:
        encoded = [decoder.encode(prompt.prompt, chat=True) for prompt in prompts]
        texts = [decoder.generate(ids, SamplingParams(max_tokens=max_tokens).explicit).token_ids for ids in encoded]
    reference = load_unpacked(target, LoadOptions("float32", "cpu"))
    gaps = list[float]()
    for prompt, ids, text in zip(prompts, encoded, texts, strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([ids + text]), use_cache=False).logits[0, len(ids) - 1 : -1]
        if (difference := first_gap(logits, text)) is not None:
            position, gap = difference
            gaps.append(gap)
            console.print(f"{prompt.category}: another token is likelier at {position} of {len(text)}, gap {gap:.2g}")
    differing = sum(gap > tie for gap in gaps)
    console.print(
        f"{activations}: {len(texts)} texts, {len(texts) - len(gaps)} the same, {len(gaps) - differing} tied, "
        f"{differing} different"
    )
    save(json_file, {"target": target, "activations": activations, "gaps": gaps})
    if differing and activations == "int15":
        sys.exit(1)


def first_gap(logits: Tensor, text: list[int]) -> tuple[int, float] | None:
    """The first position at which another token is likelier than the text's, and by how many nats; None if none.

    logits: [T, V], from which each token of the text was chosen.
    """
    choices = logits.argmax(-1)
    differs = (i for i, (choice, token) in enumerate(zip(choices.tolist(), text, strict=True)) if choice != token)
    i = next(differs, None)
    return None if i is None else (i, float(logits[i, choices[i]] - logits[i, text[i]]))


def _of_all_families(prompts: list[NamedPrompt]) -> list[NamedPrompt]:
    """The first prompt of each family, then the second of each, and so on."""
    families: dict[str, list[NamedPrompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.category, []).append(prompt)
    return [prompt for ranked in zip_longest(*families.values()) for prompt in ranked if prompt is not None]


if __name__ == "__main__":
    run(main)
