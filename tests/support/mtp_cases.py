"""Tiny targets with random multi-token-prediction layers in their checkpoints' layouts, and the drafts of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import VOCAB, WINDOW, tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
QWEN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
MELLUM: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "num_mtp_layers": 1,
}


def _prefixed(prefix: str, names: Mapping[str, str]) -> Callable[[int, int, str], str]:
    """A function from a layer's number, the target's number of layers and our name to the layout's name of a tensor."""

    def name(number: int, num_layers: int, ours: str) -> str:
        return prefix.format(number, num_layers + number) + names.get(ours, ours)

    return name


DEEPSEEK = _prefixed("model.layers.{1}.", {"norm.weight": "shared_head.norm.weight"})
MIMO = _prefixed(
    "model.mtp_layers.{0}.",
    {
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
)


def _of_qwen(number: int, num_layers: int, ours: str) -> str:
    shared = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
    }
    return shared.get(ours, f"mtp.layers.{number}.{ours}")


@dataclass(frozen=True)
class Layout:
    """A kind of target and how its checkpoints name MTP layers. like: the layer of the target that they resemble.

    rotation: options of the target's rotations in such a layer; window: the number of tokens its attention sees.
    """

    config: Callable[[], Any]
    name: Callable[[int, int, str], str]
    like: int
    hidden_first: bool = False
    rotation: Mapping[str, str] = field(default_factory=dict)
    window: int = 1 << 20


LAYOUTS: dict[str, Layout] = {
    "deepseek_v3": Layout(lambda: transformers.DeepseekV3Config(**SHAPE | MIXTURE | LATENT), DEEPSEEK, 2),
    "glm4_moe": Layout(lambda: transformers.Glm4MoeConfig(**SHAPE | MIXTURE, head_dim=8), DEEPSEEK, 2),
    "qwen3_5": Layout(lambda: transformers.Qwen3_5TextConfig(**SHAPE | QWEN), _of_qwen, 3),
    "mellum": Layout(
        lambda: transformers.MellumConfig(**SHAPE | MELLUM),
        _of_qwen,
        1,
        rotation={"layer_type": "sliding_attention"},
        window=WINDOW,
    ),
    "mimo": Layout(lambda: transformers.Qwen2Config(**SHAPE), MIMO, 1, hidden_first=True),
}


@dataclass(frozen=True)
class Written:
    """A written checkpoint. layers: tensors of each MTP layer by our names."""

    folder: Path
    layout: Layout
    layers: list[dict[str, Tensor]]


def write_target(folder: Path, kind: str, *, count: int = 1, dtype: Any = torch.float32, **changes: Any) -> Written:
    """A random target of this kind with `count` MTP layers. changes: of its configuration."""
    layout, gen = LAYOUTS[kind], torch.Generator().manual_seed(1)
    config = layout.config()
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    start, size, layers = f"model.layers.{layout.like}.", config.hidden_size, list[dict[str, Tensor]]()
    stored = load_file(folder / "model.safetensors")
    for _ in range(count):
        block = {name.removeprefix(start): tensor for name, tensor in stored.items() if name.startswith(start)}
        layer = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=gen) for name, tensor in block.items()}
        layer |= {f"{name}.weight": 1 + 0.3 * torch.randn(size, generator=gen) for name in ("enorm", "hnorm", "norm")}
        layer["eh_proj.weight"] = torch.randn(size, 2 * size, generator=gen) / size**0.5
        layers.append({name: tensor.to(dtype) for name, tensor in layer.items()})
    written = Written(folder, layout, layers)
    _store(written, stored, config.num_hidden_layers)
    return written


def write_copying_target(folder: Path, kind: str, *, swapped: bool = False, **options: Any) -> Written:
    """A target whose next token depends on the last one only, as no layer adds anything, and MTP layers that know it.

    swapped: they take the hidden state for the token.
    """
    written = write_target(folder, kind, **options)
    stored, layers = load_file(folder / "model.safetensors"), list[dict[str, Tensor]]()
    adding = [name for name in stored if re.search(r"(o_proj|out_proj|down_proj)\.weight", name)]
    stored |= {name: torch.zeros_like(stored[name]) for name in adding}
    for layer in written.layers:
        adding = [name for name in layer if re.search(r"(o_proj|down_proj)\.weight", name)]
        ones, norm = torch.ones_like(layer["enorm.weight"]), stored["model.norm.weight"]
        halves = [torch.eye(len(ones)), torch.zeros(len(ones), len(ones))]
        project = torch.cat(halves[::-1] if written.layout.hidden_first != swapped else halves, 1).to(norm.dtype)
        parts = {"enorm.weight": ones, "hnorm.weight": ones, "norm.weight": norm, "eh_proj.weight": project}
        layers.append(layer | {name: torch.zeros_like(layer[name]) for name in adding} | parts)
    copying = replace(written, layers=layers)
    _store(copying, stored, written.layout.config().num_hidden_layers)
    return copying


def _store(written: Written, tensors: dict[str, Tensor], num_layers: int) -> None:
    for number, layer in enumerate(written.layers):
        named = {written.layout.name(number, num_layers, name): tensor for name, tensor in layer.items()}
        tensors |= {name: tensor.clone().contiguous() for name, tensor in named.items()}
    save_file(tensors, written.folder / "model.safetensors", {"format": "pt"})


class Transcription:
    """The drafts of a checkpoint's MTP layers, with all rows computed again for every token, without any cache.

    Each decoder layer is taken from a target in whose checkpoint it replaces the layer that it resembles.
    """

    def __init__(self, written: Written) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(written.folder, dtype="auto").eval()
        self.layout, self.layers = written.layout, written.layers
        self._eps = self.model.config.rms_norm_eps
        self._blocks = [self._block(written, layer) for layer in written.layers]

    def _block(self, written: Written, layer: Mapping[str, Tensor]) -> Any:
        tensors = load_file(written.folder / "model.safetensors")
        start = f"model.layers.{self.layout.like}."
        tensors |= {start + name: layer[name] for name in layer if start + name in tensors}
        model = type(self.model).from_pretrained(None, config=self.model.config, state_dict=tensors, dtype="auto")
        return model.eval().get_decoder().layers[self.layout.like]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = type(self.model.get_decoder().norm)(len(weight), self._eps)
        norm.weight.data = weight
        return norm(x)

    def _run(self, number: int, tokens: Sequence[int], entering: Tensor, first: int, *, swapped: bool) -> Tensor:
        """[N, H] of rows at positions first, first + 1, ... with these tokens and hidden states [N, H]."""
        layer, decoder = self.layers[number], self.model.get_decoder()
        embedded = self._norm(decoder.embed_tokens(torch.tensor(tokens)), layer["enorm.weight"])
        parts = [embedded, self._norm(entering, layer["hnorm.weight"])]
        joined = torch.cat(parts[::-1] if self.layout.hidden_first != swapped else parts, -1)
        inputs = torch.nn.functional.linear(joined, layer["eh_proj.weight"])[None]
        positions = torch.arange(first, first + len(tokens))[None]
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().triu(1 - self.layout.window)
        rotated = decoder.rotary_emb(inputs, positions, **self.layout.rotation)
        out = self._blocks[number](
            inputs, attention_mask=seen[None, None], position_ids=positions, position_embeddings=rotated, cache=None
        )
        return self._norm(out[0], layer["norm.weight"])

    @torch.inference_mode()
    def logits(self, text: Sequence[int], draft: Sequence[int], *, shift: int = 0, swapped: bool = False) -> Tensor:
        """[K, V] logits for each token of a draft after a text. The options make it wrong, for negative controls.

        shift: takes earlier features of the target; swapped: swaps the hidden state and the token.
        """
        states = self.model(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states[-1][0]
        tokens, newest, logits = list(text), len(text) - 1, list[Tensor]()
        features = {position: states[max(0, position - shift)] for position in range(newest)}
        returned: list[dict[int, Tensor]] = [features, *({} for _ in self.layers)]  # of the target, of each layer
        for step, drafted in enumerate(draft):
            number = min(step, len(self.layers) - 1)
            rows = range(number + 1, newest + step + 1)
            before = [returned[number if row - newest <= number else number + 1][row - 1] for row in rows]
            out = self._run(number, tokens[rows[0] :], torch.stack(before), rows[0], swapped=swapped)
            returned[number + 1] |= dict(zip(rows, out, strict=True))
            logits.append(self.model.lm_head(out[-1]))
            tokens.append(drafted)
        return torch.stack(logits)
