"""Loads a head and computes with it: python speculators_load.py HEAD STEPS.

STEPS is a file with `text`; its `logits` [rows, steps, draft vocabulary] are written, those of row r after the first
r + 2 tokens, in each step with the text's own tokens before it. Prints as JSON how the head differs from its files.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

for unused in ("torchaudio", "torchvision"):  # their wheels need CUDA, which PyTorch's for processors does not have
    sys.modules[unused] = None  # type: ignore[assignment]

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import AutoModelForCausalLM

STEPS = 4


@torch.no_grad()
def main(head: str, steps: str) -> dict[str, Any]:
    settings = json.loads((Path(head) / "config.json").read_text())
    config: Any = SpeculatorModelConfig.from_pretrained(head)
    layer = config.transformer_layer_config
    layer._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(head, config=config).eval()
    model.embed_tokens.weight.fill_(torch.nan)  # taken from the verifier; uninitialized after loading
    model.load_verifier_weights()
    held, files = model.state_dict(), load_file(Path(head) / "model.safetensors")
    verifier = config.speculators_config.verifier.name_or_path
    target = AutoModelForCausalLM.from_pretrained(verifier, dtype="auto").eval()
    text = load_file(steps)["text"]
    states = target(text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in model.target_layer_ids], -1)
    rows, logits = len(text) - 1, list[torch.Tensor]()
    hook = model.lm_head.register_forward_hook(lambda _, inputs, output: logits.append(output[0, : rows - STEPS]))
    model(
        features[None, :-1],
        text[None, 1:],
        torch.zeros(1, rows, dtype=torch.int64),
        position_ids=torch.arange(1, rows + 1)[None],
        ttt_steps=STEPS,
    )
    hook.remove()
    save_file({"text": text, "logits": torch.stack(logits, 1)}, steps)
    return {
        "class": type(model).__name__,
        "unknown settings": sorted(settings.keys() - type(config).model_fields),
        "unknown settings of the layer": sorted(settings["transformer_layer_config"].keys() - layer.to_dict().keys()),
        "other settings": sorted(
            name for name, value in settings["transformer_layer_config"].items() if getattr(layer, name, value) != value
        ),
        "other tensors": sorted(name for name, part in files.items() if not torch.equal(held[name], part)),
        "never loaded": sorted(name for name, part in held.items() if part.is_floating_point() and part.isnan().any()),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
