"""Writes draft heads in the layout of `speculators`, which `head_files` and vLLM read.

A head has three features and no norms around `fc`, as in the paper: other variants need flags that not every reader
supports. It has no embedding, which may be larger than all its other tensors: readers take the target's. `speculators`
0.9.0 does so only if its embedding is NaN, but leaves it uninitialized: fill it with NaN, then call
`load_verifier_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from slipstream.durable_files import replaced
from slipstream.models.heads.network import HeadConfig

FORMAT_VERSION = "0.9.0"  # of `speculators`


def write_head(
    folder: Path,
    config: HeadConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    target: Mapping[str, Any],
    num_draft_tokens: int,
    trained: Mapping[str, Any],
) -> None:
    """Write `model.safetensors` and `config.json`, each atomically.

    weights: by their names without ".weight". target: its name_or_path, architectures and context length. trained: a
    description of the training, stored in config.json.
    """
    assert config.token_ids is not None
    ids, size = config.token_ids.cpu(), config.hidden_size
    tensors = {f"{name}.weight": weight.detach().cpu().to(dtype).contiguous() for name, weight in weights.items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "draft_vocab_size": len(ids),
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        "target_hidden_size": config.target_hidden_size,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target["name_or_path"], "architectures": target["architectures"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_key_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.eps,
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
            "rope_theta": config.rope_theta,
            "max_position_embeddings": target["max_length"],
            "vocab_size": config.vocab_size,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "torch_dtype": str(dtype).removeprefix("torch."),
        "trained": dict(trained),
    }
    with replaced(folder / "model.safetensors") as partial:
        partial.write_bytes(save(tensors))
    with replaced(folder / "config.json") as partial:
        partial.write_text(json.dumps(settings, indent=1), encoding="utf-8")
