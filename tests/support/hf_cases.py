"""Padded batches, and the texts of `generate` for them with Slipstream's loop and without it."""

from functools import cache
from typing import Any

import torch

from slipstream.integrations.transformers.custom_generate import custom_generate
from tests.support.tiny_models import perturbed, prompts, shared

COUNT = 16
ENDS = [5, 7, 11, 30]
WIDTH = 20


def batch(lengths: tuple[int, ...] = (3, 9, 14, WIDTH), seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged prompts, padded on the left."""
    texts, width = prompts(lengths, seed=seed), max(lengths)
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0}


@cache
def expected(name: str) -> torch.Tensor:
    return shared(name).generate(**batch(), **GREEDY, eos_token_id=ENDS)


def drafting(name: str, drafter: str) -> dict[str, Any]:
    return {"draft": perturbed(name), "num_draft_tokens": 3} if drafter == "model" else {"drafter": drafter}


def both(options: dict[str, Any], name: str = "llama", **drafted: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts of `generate` with Slipstream's loop and without it."""
    settings = GREEDY | {"eos_token_id": ENDS} | options
    if "max_length" in options or "generation_config" in options:
        settings = {"do_sample": False, "pad_token_id": 0, **options}
    plain = shared(name).generate(**batch(), **settings)
    drafted = drafted or drafting(name, "model")
    return shared(name).generate(**batch(), **settings, custom_generate=custom_generate, **drafted), plain
