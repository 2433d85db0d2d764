"""Records what `speculators` computes with tiny random heads of its own: python speculators_record.py FOLDER.

FOLDER gets a target with an MTP layer, and for each head the files that `speculators` writes and `steps.safetensors`:
a text, and for each of `ends` the logits [steps, draft vocabulary] of the tokens after so many of the text. In each
step the tokens before it are the text's. Of DSpark's also `confidence` [steps], the head's own estimates of acceptance
before the sigmoid, where it makes any. Prints the heads as JSON.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

for unused in ("torchaudio", "torchvision"):  # their wheels need CUDA, which PyTorch's for processors does not have
    sys.modules[unused] = None  # type: ignore[assignment]

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.convert.mtp.converter import MTPConverter
from speculators.models.dflash import core as dflash
from speculators.models.dflash2 import core as dflash2
from speculators.models.dspark import core as dspark
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, DRAFTED, LENGTH, STEPS, MASK = 61, 37, 16, 3, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
ANCHORS = 1, 6, 10  # where blocks begin
BLOCKS = {"block_size": 5, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 2]}
MARKOV = {"markov_rank": 6}
WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
TWO_LAYERS = WINDOWED | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# for each head: its type, its settings, and the class and values of the settings of its layers
HEADS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": DRAFTED, "fc_norm": True}, LlamaConfig, {"num_hidden_layers": 2}),
    "eagle3_of_trainer": (  # its trainer's default, except for the size of the window
        "eagle3",
        {"draft_vocab_size": DRAFTED, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        LlamaConfig,
        WINDOWED,
    ),
    "eagle3_qwen3": ("eagle3", {}, Qwen3Config, {}),
    "peagle": ("peagle", {"draft_vocab_size": DRAFTED, "mask_token_id": MASK}, Qwen3Config, TWO_LAYERS),
    "dflash": ("dflash", BLOCKS, Qwen3Config, TWO_LAYERS),
    "dspark": ("dspark", BLOCKS | MARKOV, Qwen3Config, {}),
    "dspark_gated": (
        "dspark",
        BLOCKS | MARKOV | {"draft_vocab_size": DRAFTED, "markov_head_type": "gated"},
        Qwen3Config,
        {},
    ),
    "dspark_rnn": (
        "dspark",
        BLOCKS | MARKOV | {"markov_head_type": "rnn", "sample_from_anchor": False, "enable_confidence_head": False},
        Qwen3Config,
        {},
    ),
    "dflash2": (
        "dflash2",
        BLOCKS | {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7},
        Qwen3Config,
        WINDOWED,
    ),
    "mtp": ("mtp", {}, Qwen3Config, {"num_hidden_layers": 3}),
}
EAGLES = "eagle3", "peagle"
LAYERS_READ = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"


class Weights:
    """Random weights from a seed: norms are near one, and products have about the size of their inputs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        numbers = torch.randn(shape, generator=self._generator)
        if name.endswith("norm.weight") or ("norm." in name and len(shape) == 1):
            return 1 + 0.3 * numbers
        if "codebook" in name or "markov_w" in name:
            return numbers
        return numbers / shape[-1] ** 0.5

    def fill(self, model: torch.nn.Module, skipped: tuple[str, ...] = ()) -> None:
        """Set new weights in all modules of a model except the skipped ones."""
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                if not name.startswith(skipped):
                    weight.copy_(self(name, weight.shape))


def write_target(folder: Path) -> None:
    """A Qwen3 of three layers, with an MTP layer as Qwen3-Next and Qwen3.5 have one."""
    model, weights = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **SHAPE)), Weights(1)
    weights.fill(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    block = {name.partition("layers.0.")[2]: part.shape for name, part in tensors.items() if "layers.0." in name}
    size = SHAPE["hidden_size"]
    shapes = {f"mtp.layers.0.{name}": shape for name, shape in block.items()}
    shapes |= {
        f"mtp.{name}.weight": torch.Size([size]) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    shapes["mtp.fc.weight"] = torch.Size([size, 2 * size])
    tensors |= {name: weights(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def build(name: str, target: Path) -> Any:
    """A head with random weights; an MTP head's are the target's."""
    kind, settings, layer, more = HEADS[name]
    layer_config = layer(**SHAPE | {"num_hidden_layers": 1} | more)
    layer_config._attn_implementation = "eager"
    if kind in EAGLES:
        settings = settings | {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "target_hidden_size": SHAPE["hidden_size"],
        }
    if kind != "mtp":
        settings = {"draft_vocab_size": VOCABULARY} | settings
    proposal = GreedyTokenProposalConfig(speculative_tokens=1 if kind == "mtp" else STEPS)
    config = SpeculatorModelConfig.from_dict(
        {
            "speculators_model_type": kind,
            "transformer_layer_config": layer_config,
            "speculators_config": SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=str(target), architectures=["Qwen3ForCausalLM"]),
            ),
            **settings,
        }
    )
    model: Any = SpeculatorModel.registered_model_class_from_config(config)(config)
    if kind == "mtp":
        model.load_state_dict(MTPConverter().convert_to_state_dict(target), strict=False)
    else:
        seed = 2 + list(HEADS).index(name)
        if model.use_draft_vocab:
            chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:DRAFTED].sort().values
            t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, chosen, True)
            model.load_vocab_mappings(t2d, chosen - torch.arange(DRAFTED))
        has_own_output = kind in EAGLES or model.use_draft_vocab
        Weights(seed).fill(model, ("embed_tokens", "verifier_", *(() if has_own_output else ("lm_head",))))
    model.load_verifier_weights()
    return model.eval()


def captured(module: torch.nn.Module, run: Callable[[], object]) -> list[Tensor]:
    """Collect the outputs of a module in a `with` block."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda _, inputs, output: outputs.append(output.detach()))
    run()
    hook.remove()
    return outputs


def eagle3_steps(model: Any, text: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Row r has token r + 1 and the feature of position r, and in step k the token k places further on."""
    zeros, positions = torch.zeros(1, LENGTH - 1, dtype=torch.int64), torch.arange(1, LENGTH)[None]
    steps = captured(
        model.lm_head,
        lambda: model(features[None, :-1], text[None, 1:], zeros, position_ids=positions, ttt_steps=STEPS),
    )
    rows = LENGTH - STEPS
    return torch.arange(2, 2 + rows), torch.stack([step[0, :rows] for step in steps], 1)


def peagle_steps(model: Any, text: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of the text, and after some of them rows of masks, one for each further token."""
    starts, rows = torch.tensor(ANCHORS), LENGTH - 1
    masked = starts.repeat_interleave(STEPS - 1)
    depths = torch.arange(1, STEPS).repeat(len(starts))
    sampled = torch.cat([torch.arange(rows), masked]), torch.cat([torch.zeros(rows, dtype=torch.int64), depths])
    peagle.generate_cod_sample_indices = lambda **_: sampled
    peagle.compute_metrics = lambda **_: (torch.zeros(()), {})
    zeros, last = torch.zeros(1, rows, dtype=torch.int64), torch.zeros(1, rows, SHAPE["hidden_size"])
    (logits,) = captured(
        model.lm_head, lambda: model(features[None, :-1], text[None, 1:], zeros, verifier_last_hidden_states=last)
    )
    later = logits[0, rows:].unflatten(0, (len(starts), STEPS - 1))
    return starts + 2, torch.cat([logits[0, starts][:, None], later], 1)


def mtp_steps(model: Any, text: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """A single step: in later steps its trainer cannot attend to rows of the first."""
    (logits,) = captured(model.lm_head, lambda: model(text[None], last[None]))
    return torch.arange(2, 2 + logits.shape[1]), logits[0, :, None]


def block_steps(model: Any, text: Tensor, features: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Blocks that begin at `ANCHORS`."""
    blocks = [one_block(model, anchor, text, features, last) for anchor in ANCHORS]
    first = 0 if model.config.sample_from_anchor else 1
    logits = torch.stack([logits for logits, _ in blocks])[:, first:]
    sure = [confidence for _, confidence in blocks if confidence is not None]
    return torch.tensor(ANCHORS) + 1, logits, torch.stack(sure)[:, first:] if sure else None


def one_block(model: Any, anchor: int, text: Tensor, features: Tensor, last: Tensor) -> tuple[Tensor, Tensor | None]:
    """[block, drafted] logits of a block, and [block] estimates; of DSpark and DFlash 2 after the text's own tokens."""
    corrected, sure = list[Tensor](), list[Tensor]()

    def note(
        logits: Tensor | None = None, targets: object = None, confidence: Any = None, *_: object, **named: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        corrected.append(named["unary_logits"] if logits is None else logits)
        if getattr(model, "confidence_head", None) is not None:
            sure.append(confidence[0])
        return torch.zeros(()), {}

    dflash.compute_metrics = dspark.compute_metrics = dflash2.compute_metrics = note
    only = torch.zeros(1, LENGTH).index_fill(1, torch.tensor([anchor]), 1)
    zeros = torch.zeros(1, LENGTH, dtype=torch.int64)
    outputs: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    (logits,) = captured(
        model.lm_head, lambda: model(features[None], text[None], only, last[None], zeros, max_anchors=1)
    )
    hook.remove()
    logits = corrected[0] if corrected else logits
    if hasattr(model, "candidate_selector"):
        before = model._predecessor_ids(text[None], torch.arange(anchor, anchor + model.block_size))
        candidates, scores = model.candidate_selector.select(logits, outputs[0], before.reshape(1, -1))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)
    return logits[0], sure[0] if sure else None


@torch.no_grad()
def main(folder: str) -> Mapping[str, Any]:
    root = Path(folder)
    target = root / "target"
    write_target(target)
    verifier = Qwen3ForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    text = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0))
    run = verifier.model(text[None], output_hidden_states=True)
    before_norm: list[Tensor] = []
    hook = verifier.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    verifier.model(text[None])
    hook.remove()
    for name in HEADS:
        model, kind = build(name, target), HEADS[name][0]
        read = next((ids for key in LAYERS_READ if (ids := getattr(model.config, key, None))), [])
        features = torch.cat([run.hidden_states[i][0] for i in read], -1) if read else torch.empty(0)
        confidence = None
        if kind == "eagle3":
            ends, logits = eagle3_steps(model, text, features)
        elif kind == "peagle":
            ends, logits = peagle_steps(model, text, features)
        elif kind == "mtp":
            ends, logits = mtp_steps(model, text, run.last_hidden_state[0])
        else:
            ends, logits, confidence = block_steps(model, text, features, before_norm[0])
        model.save_pretrained(root / name)
        (root / name / "config.py").unlink(missing_ok=True)  # its own source
        config = root / name / "config.json"
        settings = json.loads(config.read_text())
        settings["speculators_config"]["verifier"]["name_or_path"] = "tiny"
        config.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
        steps = {"text": text, "ends": ends, "logits": logits.contiguous()}
        if confidence is not None:
            steps["confidence"] = confidence.contiguous()
        save_file(steps, root / name / "steps.safetensors")
    return {name: HEADS[name][0] for name in HEADS}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
