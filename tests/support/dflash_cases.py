"""Random DFlash heads in both layouts, and a plain transcription of their computation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

INNER, DEPTH, BLOCK, MASK, EACH, DRAFTED = 40, 2, 6, 2, 8, 37


@dataclass(frozen=True)
class DFlash:
    """A written head. layers: the layers whose inputs it reads."""

    folder: Path
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]


def write_dflash(
    folder: Path, model: Any, *, layout: str = "official", layers: Sequence[int] = (1, 3), seed: int = 0
) -> DFlash:
    """A random head for a tiny Llama; in the layout of `speculators` with a vocabulary and output layer of its own."""
    config, gen = model.config, torch.Generator().manual_seed(seed)
    size, heads, key_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen) * (2 / shape[-1] ** 0.5)

    def norm(length: int = size) -> Tensor:
        return 1 + 0.3 * torch.randn(length, generator=gen)

    tensors = {"fc.weight": random(size, len(layers) * size), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(DEPTH):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        tensors |= {
            f"{attention}q_proj.weight": random(heads * EACH, size),
            f"{attention}k_proj.weight": random(key_heads * EACH, size),
            f"{attention}v_proj.weight": random(key_heads * EACH, size),
            f"{attention}o_proj.weight": random(size, heads * EACH),
            f"{attention}q_norm.weight": norm(EACH),
            f"{attention}k_norm.weight": norm(EACH),
            f"{mlp}gate_proj.weight": random(INNER, size),
            f"{mlp}up_proj.weight": random(INNER, size),
            f"{mlp}down_proj.weight": random(size, INNER),
            f"layers.{i}.input_layernorm.weight": norm(),
            f"layers.{i}.post_attention_layernorm.weight": norm(),
        }
    layer = {
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": DEPTH,
        "head_dim": EACH,
        "layer_types": ["full_attention"] * DEPTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": config.vocab_size,
    }
    if layout == "official":
        named = {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in layers]}
        settings = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": named, **layer}
    else:
        ids = torch.randperm(config.vocab_size, generator=gen)[:DRAFTED].sort().values
        tensors |= {"d2t": ids - torch.arange(DRAFTED), "lm_head.weight": random(DRAFTED, size)}
        settings = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": list(layers),
            "transformer_layer_config": layer,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return DFlash(folder, tensors, tuple(layers))


@torch.inference_mode()
def transcribed(
    head: DFlash, model: Any, text: Sequence[int], steps: int, *, shift: int = 0, causal: bool = False, slot: int = 1
) -> list[Tensor]:
    """The head's logits for each token of a draft after `text`, layer by layer and row by row.

    Options for negative controls: shift reads the states of other layers; causal hides later rows; slot=0 takes each
    row's scores for the token after it.
    """
    t, config = head.tensors, model.config
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    states = model(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), t[f"{name}.weight"], 1e-5)

    def rotated(x: Tensor, position: int) -> Tensor:
        half = EACH // 2
        angles = position * 5000.0 ** -(torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )

    before = len(text) - 1  # positions that the target has read
    context = [
        normed(linear(torch.cat([states[i + shift][0, p] for i in head.layers]), t["fc.weight"]), "hidden_norm")
        for p in range(before)
    ]
    hidden = [model.get_input_embeddings().weight[token] for token in (text[-1], *[MASK] * (BLOCK - 1))]
    for i in range(DEPTH):
        name, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        entering = [normed(x, f"{name}input_layernorm") for x in hidden]
        keys, values = [], []
        for position, x in enumerate([*context, *entering]):
            key = linear(x, t[f"{attention}k_proj.weight"]).view(-1, EACH)
            keys.append(rotated(normed(key, f"{attention}k_norm"), position))
            values.append(linear(x, t[f"{attention}v_proj.weight"]).view(-1, EACH))
        for row, x in enumerate(entering):
            query = normed(linear(x, t[f"{attention}q_proj.weight"]).view(-1, EACH), f"{attention}q_norm")
            end = before + row + 1 if causal else len(keys)
            attended = []
            for h, q in enumerate(rotated(query, before + row)):
                shared = h * key_heads // heads
                weights = torch.stack([q @ key[shared] / EACH**0.5 for key in keys[:end]]).softmax(0)
                attended.append(sum(w * value[shared] for w, value in zip(weights, values[:end], strict=True)))
            hidden[row] = hidden[row] + linear(torch.cat(attended), t[f"{attention}o_proj.weight"])  # type: ignore[arg-type]
            middle = normed(hidden[row], f"{name}post_attention_layernorm")
            gate, up = (linear(middle, t[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            hidden[row] = hidden[row] + linear(silu(gate) * up, t[f"{name}mlp.down_proj.weight"])
    logits = []
    for x in hidden[slot : slot + steps]:
        out = normed(x, "norm")
        if "d2t" in t:
            scores = torch.full((config.vocab_size,), float("-inf"))
            scores[t["d2t"] + torch.arange(DRAFTED)] = linear(out, t["lm_head.weight"])
        else:
            scores = model.lm_head(out)
        logits.append(scores)
    return logits
