"""Multi-token prediction by Slipstream and by transformers, with MTP layers that are right with a set probability.

    python benchmarks/mtp.py --chance 0.7 --layers 1

The target is a random GLM-4 with dense layers, followed by MTP layers with mixtures of experts, as in GLM-4.5. Its
output layer maps each token to one next token, and the other layers add next to nothing, so a text runs once through
the whole vocabulary and look-ups find nothing. An MTP layer's projection passes the newest token on, so it predicts the
same next token, except after "hard" tokens: their embeddings carry a mark that the projection turns into a wrong guess.
A share of 1 - chance of the tokens is hard, in both systems, which read the same files.

Plain decoding, fixed draft lengths, "auto" and transformers' `use_mtp` take turns on the same texts, with new texts in
every turn. Transformers drafts one token per MTP layer and decodes one text after another. It would load the MTP layers
on each call; here it loads them once. Exit code 1 if a text is not the one that the weights were made for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import transformers
import typer
from rich import box
from rich.table import Table
from safetensors.torch import load_file, save_file
from terminal import Count, JsonFile, console, numbers, run, save
from transformers.modeling_layers import MtpModel

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.weights.model_files import quiet

PROMPT = 16  # tokens
GAP = 20.0  # between the next token's logit and the others: wrong guesses are as probable as right ones
MARK = 4.0  # first number of a hard token's embedding
AUTO, PLAIN, THEIRS, THEIR_PLAIN = "auto", "plain", "transformers, use_mtp", "transformers, plain"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target."""

    vocab: int
    hidden: int
    layers: int


@dataclass
class Arm:
    """A way to generate."""

    generate: Callable[[list[list[int]]], list[list[int]]]
    seconds: list[float] = field(default_factory=list)  # per output token, one for each turn
    right: int = 0  # number of correct texts


def main(
    chance: Annotated[float, typer.Option(min=0.0, max=1.0, help="probability that an MTP layer is right")] = 0.7,
    layers: Count = 1,
    lengths: str = "1,2,3,4,5,6,7,8",
    batches: str = "1,8",
    max_tokens: Count = 96,
    repeats: Count = 5,
    vocab: Count = 16384,
    hidden: Count = 768,
    depth: Count = 16,
    json_file: JsonFile = None,
) -> None:
    """Measure and print a table for each batch size."""
    quiet()
    sizes = Sizes(vocab, hidden, depth)
    with TemporaryDirectory() as folder:
        order = write_model(Path(folder), sizes, layers, chance)
        base = SpeculativeDecoder(folder, "mtp", drafter=AUTO)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        use_layers_loaded_once(theirs, layers)
        tables = {
            batch: _batch(base, theirs, order, batch, numbers("--lengths", lengths), max_tokens, repeats)
            for batch in numbers("--batches", batches)
        }
    summary: dict[str, Any] = {"chance": chance, "layers": layers, "torch": torch.__version__}
    for batch, arms in tables.items():
        summary[f"batch {batch}"] = _print(batch, arms, repeats)
    print(json.dumps(summary))
    seconds = {batch: {name: arm.seconds for name, arm in arms.items()} for batch, arms in tables.items()}
    save(json_file, {**summary, "seconds_per_token": seconds})
    if any(arm.right < repeats * batch for batch, arms in tables.items() for arm in arms.values()):
        sys.exit(1)


def write_model(folder: Path, sizes: Sizes, layers: int, chance: float) -> list[int]:
    """Write the target and its MTP layers. Returns the circular order in which its texts run through the vocabulary."""
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers + layers,  # transformers counts the MTP layers, too
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 128 or 1,
        head_dim=64,
        moe_intermediate_size=sizes.hidden,
        num_experts_per_tok=2,
        n_routed_experts=4,
        first_k_dense_replace=sizes.layers,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        initializer_range=0.001,  # the layers add next to nothing
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    order = torch.randperm(sizes.vocab)
    embedded = torch.randn(sizes.vocab, sizes.hidden)
    head = torch.empty_like(embedded)
    head[order.roll(-1)] = embedded[order] * GAP / sizes.hidden
    head[:, 0] = 0  # so that the mark changes no text
    embedded[:, 0] = MARK * (torch.rand(sizes.vocab) >= chance)
    project = torch.zeros(sizes.hidden, 2 * sizes.hidden)
    project[:, : sizes.hidden] = torch.eye(sizes.hidden)
    project[:, 0] = (head[0] + head[1:3].sum(0) / 2) * sizes.hidden / GAP  # makes runners-up wrong, too
    tensors |= {"model.embed_tokens.weight": embedded, "lm_head.weight": head}
    for number in range(sizes.layers, sizes.layers + layers):
        start = f"model.layers.{number}."
        norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
        tensors |= {start + name: torch.ones(sizes.hidden) for name in norms}
        tensors[f"{start}eh_proj.weight"] = project.clone()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, {"format": "pt"})
    config.num_hidden_layers, config.num_mtp_layers, config.dtype = sizes.layers, layers, torch.bfloat16
    config.save_pretrained(folder)
    return order.tolist()


def use_layers_loaded_once(model: Any, layers: int) -> None:
    """Make transformers' generator use these MTP layers, loaded once. layers: how many there are."""
    first = model.config.num_hidden_layers
    names = "|".join(str(first + number) for number in range(layers))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({names})\."]  # knows only published models'
    loaded = MtpModel.from_pretrained(model)
    MtpModel.from_pretrained = lambda *_, **__: loaded


def _batch(
    base: SpeculativeDecoder,
    theirs: Any,
    order: Sequence[int],
    batch: int,
    lengths: Sequence[int],
    max_tokens: int,
    repeats: int,
) -> dict[str, Arm]:
    """Run all arms at one batch size in turns, whose order alternates."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True).explicit

    def ours(decoder: SpeculativeDecoder) -> Arm:
        def generate(prompts: list[list[int]]) -> list[list[int]]:
            decoder.forget()
            decoder.forget_learned()  # the texts of other arms, which look-ups would find
            return [result.token_ids for result in decoder.generate(prompts, params)]

        return Arm(generate)

    def of_transformers(**options: Any) -> Arm:
        def generate(prompts: list[list[int]]) -> list[list[int]]:
            groups = [[prompt] for prompt in prompts] if options else [prompts]
            settings = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            texts = [theirs.generate(torch.tensor(group), **settings, **options) for group in groups]
            return [text[PROMPT:].tolist() for group in texts for text in group]

        return Arm(generate)

    arms = {PLAIN: ours(base.using("none", num_draft_tokens="auto"))}
    arms |= {str(length): ours(base.using("model", num_draft_tokens=length)) for length in lengths}
    arms |= {AUTO: ours(base), THEIR_PLAIN: of_transformers(), THEIRS: of_transformers(use_mtp=True)}
    length = PROMPT + max_tokens
    for turn in range(repeats + 1):  # the first turn warms up
        starts = [(turn * batch + row) * length for row in range(batch)]
        prompts = [[order[(start + i) % len(order)] for i in range(PROMPT)] for start in starts]
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            started = perf_counter()
            texts = arms[name].generate(prompts)
            seconds = perf_counter() - started
            if turn:
                arms[name].seconds.append(seconds / (batch * max_tokens))
                arms[name].right += sum(map(_is_walk(order, max_tokens), prompts, texts))
    return arms


def _is_walk(order: Sequence[int], count: int) -> Callable[[list[int], list[int]], bool]:
    """Returns a check that a text continues its prompt in the vocabulary's order."""
    next_token = dict(pairwise([*order, order[0]]))
    return lambda prompt, text: len(text) == count and all(next_token[a] == b for a, b in pairwise([prompt[-1], *text]))


def _print(batch: int, arms: dict[str, Arm], repeats: int) -> dict[str, Any]:
    """Print a batch size's table and return its main figures."""
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"batch {batch}", title_justify="left")
    table.add_column("draft tokens", no_wrap=True)
    for heading in ("tokens/s", "of plain", "of use_mtp", "texts right"):
        table.add_column(heading, justify="right")
    speeds = {name: 1 / median(arm.seconds) for name, arm in arms.items()}
    for name, arm in arms.items():
        ratios = (f"{speeds[name] / speeds[reference]:.2f}x" for reference in (PLAIN, THEIRS))
        table.add_row(name, f"{speeds[name]:.1f}", *ratios, f"{arm.right} of {repeats * batch}")
    console.print(table)
    best = max((name for name in arms if name.isdecimal()), key=lambda name: speeds[name])
    shares = [
        best_seconds / auto_seconds
        for best_seconds, auto_seconds in zip(arms[best].seconds, arms[AUTO].seconds, strict=True)
    ]
    console.print(
        f"auto: {speeds[AUTO] / speeds[best]:.3f} of the best fixed length, {best}; turn by turn {median(shares):.3f}"
    )
    return {"tokens_per_second": speeds, "best_length": int(best), "auto_of_best": speeds[AUTO] / speeds[best]}


if __name__ == "__main__":
    run(main)
