"""Ways to round weights to 4 bits in groups of 32, by the distance of the model's logits from the original's.

    python benchmarks/rounding_schemes.py FOLDER --tokens 160

Weights alone are rounded, in float32 (8 bytes a weight); all else is PyTorch's. `quantize="int4"` is "zero points,
best share". Embedding and output layer get 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from terminal import JsonFile, console, run
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.weights.model_files import quiet
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.rounding import rounded
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.text.prompt_sets import builtin_prompts

SHARES = tuple(0.75 + 0.035 * step for step in range(11))
AT_A_TIME = 1 << 20  # weights
Groups = Callable[[Tensor], Tensor]  # [..., 32] weights -> what they are rounded to


def half(x: Tensor) -> Tensor:
    """Scales as float16 has them."""
    return torch.where(x == 0, torch.full_like(x, 2.0**-24), x.half().float())


def symmetric(groups: Tensor, share: float = 1.0) -> Tensor:
    """-8 to 7 times a scale, at which the largest becomes -8 (GGUF's Q4_0)."""
    scale = half(groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) * (share / -8))
    return (groups / scale).round().clamp(-8, 7) * scale


def best_symmetric(groups: Tensor) -> Tensor:
    """The same with the share of that scale that has the least squared error."""
    found, best = groups, torch.full_like(groups[..., :1], torch.inf)
    for share in SHARES:
        trial = symmetric(groups, share)
        error = (trial - groups).square().sum(-1, keepdim=True)
        found, best = torch.where(error < best, trial, found), torch.minimum(error, best)
    return found


def zero_points(groups: Tensor) -> Tensor:
    """0 to 15 less a zero point, times a scale, over the whole range."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = half((high - low) / 15)
    zero = (-low / scale).round()
    return ((groups / scale + zero).round().clamp(0, 15) - zero) * scale


def minima(groups: Tensor) -> Tensor:
    """0 to 15 times a scale plus a float16 minimum (GGUF's Q4_1), 5 bits a weight."""
    low, high = half(groups.amin(-1, keepdim=True)), groups.amax(-1, keepdim=True)
    scale = half((high - low) / 15)
    return ((groups - low) / scale).round().clamp(0, 15) * scale + low


def taken(bits: int) -> Groups:
    """What `quantize=` does."""
    return lambda groups: rounded(groups.flatten(-2), bits).values().unflatten(-1, (-1, 32))


SCHEMES: dict[str, Groups] = {
    "symmetric": symmetric,
    "symmetric, best share": best_symmetric,
    "zero points": zero_points,
    "zero points, best share": taken(4),
    "minima": minima,
    "int8": taken(8),
}


def main(folder: str, tokens: int = 160, json_file: JsonFile = None) -> None:
    """Print the KL divergence and the agreement of the likeliest token of each scheme."""
    quiet()
    tokenizer, model = load_tokenizer(folder, resolve(folder)), load_unpacked(folder, LoadOptions("float32", "cpu"))
    if tokenizer is None:
        raise UsageError(f"model {folder!r} has no tokenizer; allowed: a model that reads text")
    ids = torch.tensor([tokenizer.encode("\n".join(prompt.prompt for prompt in builtin_prompts()))[:tokens]])
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    matrices = {parameter: parameter.detach().clone() for parameter in model.parameters() if parameter.dim() == 2}
    expected, found = _logits(model, ids), dict[str, dict[str, float]]()
    for name, scheme in SCHEMES.items():
        for parameter, weight in matrices.items():
            _round(parameter, weight, taken(8) if any(parameter is end for end in ends) else scheme)
        got = _logits(model, ids)
        distance = float((expected.exp() * (expected - got)).sum(-1).mean())
        same = float((expected.argmax(-1) == got.argmax(-1)).float().mean())
        found[name] = {"kl": distance, "same_choice": same}
        console.print(f"{name}: KL {distance:.2g}, the likeliest token is the same at {same:.1%}")
    if json_file is not None:
        json_file.write_text(json.dumps(found) + "\n")


@torch.inference_mode()
def _logits(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)


@torch.no_grad()
def _round(parameter: Tensor, weight: Tensor, scheme: Groups) -> None:
    step = max(AT_A_TIME // weight.shape[1], 1)
    for into, rows in zip(parameter.split(step), weight.split(step), strict=True):
        into.copy_(scheme(rows.unflatten(1, (-1, 32))).flatten(1))


if __name__ == "__main__":
    run(main)
