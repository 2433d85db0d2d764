"""Speculative decoding by one function call: text, acceptance rate and tokens per second.

    python examples/speculative_generate.py --prompt "Name three rivers of Europe." --gamma 4 --temperature 0.7 --debug

The function has the signature that teaching code often gives to the algorithm of Leviathan et al. 2023
(https://arxiv.org/abs/2211.17192) and Chen et al. 2023 (https://arxiv.org/abs/2302.01318). It needs a draft model. By
default SmolLM2 drafts for itself, which is always right but no faster; a smaller model of the target's family is cheap
and often right. With an empty --draft, `SpeculativeDecoder` looks drafts up in the text so far instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.integrations.reference import (
    GreedyProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    speculative_generate,
)
from slipstream.models.weights.resolve import resolve

Generate = Callable[[list[int]], tuple[list[int], float]]  # a prompt -> new token ids, acceptance rate
TARGET = DRAFT = "smollm2"  # or meta-llama/Llama-3.2-3B-Instruct with meta-llama/Llama-3.2-1B-Instruct


def options() -> argparse.Namespace:
    """The command line's options. The environment may set other defaults for models and length."""
    get = os.environ.get
    parser = argparse.ArgumentParser(description="Generate a text by speculative decoding.")
    add = parser.add_argument
    add("--target", default=get("SLIPSTREAM_TARGET", TARGET), help="hub id, folder or smollm2 (default: %(default)s)")
    add(
        "--draft",
        default=get("SLIPSTREAM_DRAFT", DRAFT),
        help="draft model; empty: look drafts up (default: %(default)s)",
    )
    add("--prompt", default="Explain quantum computing in simple terms.", help="(default: %(default)s)")
    add("--gamma", type=int, default=5, help="tokens drafted per round (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--top-k", type=int, default=0, help="keep the K most likely tokens; 0 keeps all (default: %(default)s)")
    add(
        "--top-p",
        type=float,
        default=0.9,
        help="probability mass of the most likely tokens that are kept (default: %(default)s)",
    )
    add("--max-tokens", type=int, default=int(get("SLIPSTREAM_MAX_TOKENS", "100")), help="(default: %(default)s)")
    add("--seed", type=int, help="seed of the random numbers (default: a new one)")
    add("--debug", action="store_true", help="print the accepted and rejected tokens of every round")
    return parser.parse_args()


def load(name: str) -> Any:
    """Load a model by transformers, onto the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(resolve(name), dtype="auto").to(device).eval()


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of the prompt, as a chat message if the tokenizer has a chat template."""
    if not tokenizer.chat_template:
        return list(tokenizer(prompt).input_ids)
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def processor(chosen: argparse.Namespace) -> Any:
    """Greedy at temperature 0, else sampling by top-p, and by top-k if it is set."""
    if chosen.temperature == 0:
        return GreedyProcessor()
    if chosen.top_k:
        return TopKNucleusProcessor(chosen.temperature, chosen.top_k, chosen.top_p)
    return NucleusProcessor(chosen.temperature, chosen.top_p)


def with_draft_model(chosen: argparse.Namespace, target: Any, tokenizer: Any) -> Generate:
    """Generate by `speculative_generate`."""
    drafter = load(chosen.draft)

    def generate(prompt: list[int]) -> tuple[list[int], float]:
        return speculative_generate(
            prompt,
            drafter,
            target,
            tokenizer=tokenizer,
            gamma=chosen.gamma,
            logits_processor=processor(chosen),
            max_gen_len=chosen.max_tokens,
            eos_tokens_id=[tokenizer.eos_token_id],
            debug=chosen.debug,
        )

    return generate


def with_lookup(chosen: argparse.Namespace, target: Any, tokenizer: Any) -> Generate:
    """Generate by `SpeculativeDecoder`, with drafts looked up in the text so far."""
    decoder = SpeculativeDecoder(
        target, tokenizer=tokenizer, drafter="ngram", num_draft_tokens=chosen.gamma, fast=False, reproducible=False
    )
    params = SamplingParams(
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        max_tokens=chosen.max_tokens,
        seed=int(torch.randint(1 << 62, ())),
    )

    def generate(prompt: list[int]) -> tuple[list[int], float]:
        result = decoder.generate(prompt, params)
        if chosen.debug:
            print(result.debug(), file=sys.stderr)
        return result.token_ids, result.stats.acceptance_rate or 0.0

    return generate


def main() -> None:
    """Load the models, generate and print the result."""
    chosen = options()
    if chosen.seed is not None:
        torch.manual_seed(chosen.seed)
    try:
        tokenizer, target = AutoTokenizer.from_pretrained(resolve(chosen.target)), load(chosen.target)
        generate = (with_draft_model if chosen.draft else with_lookup)(chosen, target, tokenizer)
        prompt = encode(tokenizer, chosen.prompt)
        started = perf_counter()
        ids, rate = generate(prompt)
        seconds = perf_counter() - started
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    print("target:", Path(chosen.target).name)
    print("draft: ", Path(chosen.draft).name if chosen.draft else "n-grams of the text so far")
    print("Output:", tokenizer.decode(ids, skip_special_tokens=True))
    print(f"Acceptance rate: {rate:.3f}")
    print(f"{len(ids)} tokens in {seconds:.2f} s, {len(ids) / seconds:.1f} tokens per second")


if __name__ == "__main__":
    main()
