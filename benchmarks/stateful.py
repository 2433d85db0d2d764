"""What speculation is worth on a model with recurrent state: a random one of Qwen3.5's shape.

    python benchmarks/stateful.py --layers 24 --hidden 1024 --vocab 32000
    python benchmarks/stateful.py --layers 4 --hidden 128 --vocab 1000 --tokens 16     # seconds

Arms take turns on each prompt: Hugging Face's `generate`, plain decoding, and a drafter that knows the plain text and
makes one of five draft tokens wrong (`copies`) or all of them (`wrong`). Prints medians, ratios, whether texts are
identical to plain decoding's, and the memory of a row's states. Exit code 1 if a drafted text differs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_PROC_BIND", "true")  # computing threads stay on cores of their own
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import Draft, SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.models.hf.backend import HFBackend
from slipstream.sampling.sampler import Sampler

DRAFTED, RIGHT_OF_FIVE = 5, 4
SCALE = 2.0  # of the initial weights, so that greedy texts vary


@dataclass
class Copies:
    """Proposes the plain text with one token of five wrong, or all."""

    texts: dict[tuple[int, ...], list[int]]
    vocab: int
    right: int

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """See `Drafter.propose`."""
        drafts = []
        for row, length in zip(rows, lengths, strict=True):
            at = row.num_output_tokens
            told = self.texts[tuple(row.tokens[: row.prompt_length])][at : at + length]
            drafts.append([t if (at + i) % 5 < self.right else (t + 1) % self.vocab for i, t in enumerate(told)])
        return Draft.from_lists(drafts, sampler.device)


def make_model(layers: int, hidden: int, vocab: int, dtype: torch.dtype) -> Any:
    """Three layers of the gated delta rule, one of attention, and so on."""
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3584 * hidden // 1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=hidden // 8,
        linear_value_head_dim=hidden // 8,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SCALE)
    return model


def main(
    layers: Annotated[int, typer.Option(min=4)] = 24,
    hidden: Annotated[int, typer.Option(min=64)] = 1024,
    vocab: Annotated[int, typer.Option(min=100)] = 32000,
    tokens: Annotated[int, typer.Option(min=2, help="of each text")] = 40,
    prompts: Annotated[int, typer.Option(min=1)] = 4,
    dtype: str = "bfloat16",
    reproducible: Annotated[bool, typer.Option(help="calibrate forward shapes, so that texts agree to the bit")] = True,
) -> None:
    """Measure and print."""
    model = make_model(layers, hidden, vocab, getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    asked = [torch.randint(1, vocab, (32,), generator=generator).tolist() for _ in range(prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    theirs = deepcopy(model)  # packing changes the layers of ours

    def hugging_face(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return [int(token) for token in out[0, len(prompt) :]]

    plain = SpeculativeDecoder(model, drafter="none", fast=True, reproducible=reproducible)
    texts = {tuple(prompt): plain.generate(prompt, params).token_ids for prompt in asked}
    arms = {"none": plain}
    for name, right in (("copies", RIGHT_OF_FIVE), ("wrong", 0)):
        arms[name] = plain.using(Copies(texts, vocab, right), num_draft_tokens=DRAFTED)
    times: dict[str, list[float]] = {name: [] for name in ("generate", *arms)}
    rounds: dict[str, list[float]] = {name: [] for name in arms}
    same = dict.fromkeys(times, 0)
    for prompt in asked:
        begun = perf_counter()
        same["generate"] += hugging_face(prompt) == texts[tuple(prompt)]
        times["generate"].append(perf_counter() - begun)
        for name, decoder in arms.items():
            decoder.forget()
            begun = perf_counter()
            result = decoder.generate(prompt, params)
            times[name].append(perf_counter() - begun)
            rounds[name] += [one.seconds.total for one in result.rounds[1:]]  # the first reads the prompt
            same[name] += result.token_ids == texts[tuple(prompt)]
    table = Table("arm", "seconds a text", "speed against none", "ms a round", "identical to none")
    base = median(times["none"])
    for name, taken in times.items():
        step = f"{1e3 * median(rounds[name]):.0f}" if name in rounds else "-"
        ratio = f"{base / median(taken):.2f}x"
        table.add_row(name, f"{median(taken):.2f}", ratio, step, f"{same[name]} of {prompts}")
    Console(highlight=False).print(table)
    backend = plain.target.backend
    assert isinstance(backend, HFBackend) and backend.cache.states is not None
    print(f"states of a row: {backend.cache.states.bytes_per_slot / 1e6:.1f} MB, besides its keys and values")
    raise typer.Exit(int(any(same[name] < prompts for name in arms)))


if __name__ == "__main__":
    typer.run(main)
