"""What speculation is worth on a model with recurrent state: a random one of Qwen3.5's shape.

    python benchmarks/stateful.py --layers 24 --hidden 1024 --vocab 32000
    python benchmarks/stateful.py --layers 4 --hidden 128 --vocab 1000 --tokens 16     # seconds

Arms take turns on each prompt: Hugging Face's `generate`, plain decoding, and a drafter that knows the plain text and
makes one of five draft tokens wrong (`copies`) or all of them (`wrong`). Prints medians, ratios, whether texts are
identical, and the memory of one kept state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import Draft, SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.models.hf.own_caches import OwnCacheBackend
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


def state_bytes(backend: OwnCacheBackend) -> int:
    """Of the recurrent and convolutional part of one row's newest state."""
    state = backend.caches.at(0, backend.checkpoint(0, 1 << 30))
    assert state is not None
    tensors = [
        t
        for layer in state.cache.layers
        for kind in ("conv_states", "recurrent_states")
        for t in getattr(layer, kind, {}).values()
        if t is not None
    ]
    return sum(t.numel() * t.element_size() for t in tensors)


def main(
    layers: Annotated[int, typer.Option(min=4)] = 24,
    hidden: Annotated[int, typer.Option(min=64)] = 1024,
    vocab: Annotated[int, typer.Option(min=100)] = 32000,
    tokens: Annotated[int, typer.Option(min=2, help="of each text")] = 40,
    prompts: Annotated[int, typer.Option(min=1)] = 4,
    dtype: str = "bfloat16",
) -> None:
    """Measure and print."""
    model = make_model(layers, hidden, vocab, getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    asked = [torch.randint(1, vocab, (32,), generator=generator).tolist() for _ in range(prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def hugging_face(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return [int(token) for token in out[0, len(prompt) :]]

    expected = {tuple(prompt): hugging_face(prompt) for prompt in asked}
    theirs = _times(hugging_face, asked)  # before packing, which changes the model's layers in place
    plain = SpeculativeDecoder(model, drafter="none", fast=True)
    texts = {tuple(prompt): plain.generate(prompt, params).token_ids for prompt in asked}
    arms = {"none": plain}
    for name, right in (("copies", RIGHT_OF_FIVE), ("wrong", 0)):
        arms[name] = plain.using(Copies(texts, vocab, right), num_draft_tokens=DRAFTED)
    times: dict[str, list[float]] = {name: [] for name in arms}
    steps: dict[str, list[float]] = {name: [] for name in arms}
    same = dict.fromkeys(arms, 0)
    for prompt in asked:
        for name, decoder in arms.items():
            begun = perf_counter()
            result = decoder.generate(prompt, params)
            times[name].append(perf_counter() - begun)
            steps[name].append(median(r.seconds.total for r in result.rounds))
            same[name] += result.token_ids == texts[tuple(prompt)]
    table = Table("arm", "seconds a text", "speed against none", "ms a round", "identical to none")
    base = median(times["none"])
    table.add_row(
        "generate",
        f"{median(theirs):.2f}",
        f"{base / median(theirs):.2f}x",
        "-",
        f"{sum(expected[key] == texts[key] for key in texts)} of {prompts}",
    )
    for name in arms:
        row = f"{median(times[name]):.2f}", f"{base / median(times[name]):.2f}x", f"{1e3 * median(steps[name]):.0f}"
        table.add_row(name, *row, f"{same[name]} of {prompts}")
    Console(highlight=False).print(table)
    backend = plain.target.backend
    assert isinstance(backend, OwnCacheBackend)
    print(f"one kept state of a row: {state_bytes(backend) / 1e6:.1f} MB, besides its keys and values")


def _times(run: Callable[[list[int]], list[int]], prompts: Sequence[list[int]]) -> list[float]:
    taken = []
    for prompt in prompts:
        begun = perf_counter()
        run(prompt)
        taken.append(perf_counter() - begun)
    return taken


if __name__ == "__main__":
    typer.run(main)
