"""Makes a mixture of experts of a small dense model, for tests and measurements of mixtures on real text.

    python benchmarks/upcycled_mixture.py FOLDER [--gguf] [--layers 30] [--experts 8] [--used 2] [--source smollm2]

Nothing is trained. In the last `--layers` layers a shared expert gives half of what the layer's feed-forward part gave,
and each routed expert the other half with neuron gains of its own (1 + 0.2 n, n normal). A router prefers the experts
whose centroid is near the layer's input: centroids are those of k-means by cosine on the texts of docs/. So all experts
are used, the choice depends on the text, and a wrong expert changes the logits, while the text stays the dense model's
in quality. The same arguments give the same files. FOLDER holds the model as a checkpoint of `glm4_moe` in bfloat16;
--gguf adds a file in Q4_0 blocks.

Prints the loss of both models on text that the routers were not made from, and how many different experts of a layer
the tokens of a forward use, by its width, relative to those of one token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.tokenization.file_tokenizer import FileTokenizer

DOCS = Path(__file__).parents[1] / "docs"
CLUSTERED, HELD_OUT = ("architecture.md", "speed.md", "drafters.md"), ("planner.md", "quantized.md")
TOKENS = 4096  # of either text
GAIN = 0.2  # standard deviation of the gains of routed experts
SHARPNESS = 8.0  # a router's logits are about this times a cosine
STEPS, SEED = 15, 7
WIDTHS = (1, 2, 4, 8, 16)
CHUNK = 512  # tokens of a forward


def main() -> None:
    """Write the files and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", action="store_true", help="write FOLDER/model.gguf, too")
    parser.add_argument("--layers", type=int, default=30, help="how many of the last layers become mixtures")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--used", type=int, default=2, help="experts of a token")
    parser.add_argument("--source", default="smollm2", help="a dense model of Llama's architecture")
    arguments = parser.parse_args()
    loaded = load(arguments.source, LoadOptions(dtype="float32", fast=False))
    dense, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    arguments.layers = min(arguments.layers, dense.config.num_hidden_layers)
    torch.manual_seed(SEED)
    inputs = feed_forward_inputs(dense, ids_of(tokenizer, CLUSTERED))
    model = upcycled(dense, inputs, arguments)
    model.bfloat16().save_pretrained(arguments.folder)
    written, folder = tokenizer.inner, Path(arguments.folder)
    written.save(folder) if isinstance(written, FileTokenizer) else written.save_pretrained(folder)
    if arguments.gguf:
        write_gguf(model.float(), folder / "model.gguf", written)
    print(json.dumps(measured(dense, str(arguments.folder), ids_of(tokenizer, HELD_OUT), arguments)))


def ids_of(tokenizer: Any, names: Sequence[str]) -> Tensor:
    """[TOKENS] at most: the tokens of some files."""
    text = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in names)
    return torch.tensor(tokenizer.encode(text))[:TOKENS]


@torch.inference_mode()
def feed_forward_inputs(dense: Any, ids: Tensor) -> list[Tensor]:
    """[tokens, hidden] for each layer: what enters its feed-forward part."""
    inputs: list[list[Tensor]] = [[] for _ in dense.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, given, kept=kept: kept.append(given[0][0]))
        for layer, kept in zip(dense.model.layers, inputs, strict=True)
    ]
    for chunk in ids.split(CHUNK):
        dense(input_ids=chunk[None])
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in inputs]


def router_of(inputs: Tensor, experts: int) -> Tensor:
    """[experts, hidden]: centroids of inputs, less the inputs' mean, scaled so that logits are `SHARPNESS` cosines."""
    mean = inputs.mean(0)
    centered = inputs - mean
    size = centered.norm(dim=1).mean()
    directions = nn.functional.normalize(centered, dim=1)
    centroids = directions[torch.randperm(len(directions))[:experts]]
    for _ in range(STEPS):
        nearest = (directions @ centroids.T).argmax(1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, directions)
        is_empty = nearest.bincount(minlength=experts) == 0
        sums[is_empty] = directions[torch.randperm(len(directions))[: int(is_empty.sum())]]
        centroids = nn.functional.normalize(sums, dim=1)
    along = nn.functional.normalize(mean, dim=0)
    return (centroids - (centroids @ along)[:, None] * along) * SHARPNESS / size  # a router has no bias for the mean


@torch.no_grad()
def upcycled(dense: Any, inputs: Sequence[Tensor], arguments: argparse.Namespace) -> Any:
    """The mixture, float32."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    old, first = dense.config, dense.config.num_hidden_layers - arguments.layers
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    same += ("bos_token_id", "eos_token_id", "pad_token_id")
    config = Glm4MoeConfig(
        **{name: getattr(old, name) for name in same},
        head_dim=getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads,
        rope_parameters=dict(old.rope_parameters) | {"partial_rotary_factor": 1.0},
        moe_intermediate_size=old.intermediate_size,
        n_routed_experts=arguments.experts,
        num_experts_per_tok=arguments.used,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        first_k_dense_replace=first,
        attention_bias=False,
        use_qk_norm=False,
    )
    model = Glm4MoeForCausalLM(config).float().eval()
    weights, own = dense.state_dict(), model.state_dict()
    for name in own.keys() & weights.keys():
        own[name].copy_(weights[name])
    for index in range(first, config.num_hidden_layers):
        mlp, block = dense.model.layers[index].mlp, model.model.layers[index].mlp
        block.gate.weight.copy_(router_of(inputs[index], arguments.experts))
        block.shared_experts.gate_proj.weight.copy_(mlp.gate_proj.weight)
        block.shared_experts.up_proj.weight.copy_(mlp.up_proj.weight)
        block.shared_experts.down_proj.weight.copy_(mlp.down_proj.weight / 2)
        block.experts.gate_up_proj.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        gains = 1 + GAIN * torch.randn(arguments.experts, 1, old.intermediate_size)
        block.experts.down_proj.copy_(mlp.down_proj.weight / 2 * gains)
    return model


def write_gguf(model: Any, path: Path, tokenizer: Any) -> None:
    """Write a model in Q4_0 blocks, as llama.cpp's converter would."""
    import gguf
    import numpy
    from gguf.quants import quantize

    config, writer = model.config, gguf.GGUFWriter(path, "glm4moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(config.vocab_size)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.all_special_ids) | {added["id"] for added in backend["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number in special else 1 for _, number in vocabulary])
    merges = backend["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, config.num_hidden_layers)

    def add(name: str, tensor: Tensor) -> None:
        numbers = tensor.numpy()
        if tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, numbers.astype(numpy.float32))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd.weight" else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, quantize(numbers, kind), raw_dtype=kind)

    for key, tensor in model.state_dict().items():
        prefix = f"blk.{key.partition('layers.')[2].partition('.')[0]}"
        if key.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                add(f"{prefix}.ffn_{part}_exps.weight", half)
        elif key.endswith("experts.down_proj"):
            add(f"{prefix}.ffn_down_exps.weight", tensor)
        elif key.endswith("e_score_correction_bias"):
            add(f"{prefix}.exp_probs_b.bias", tensor)
        elif key != "lm_head.weight" or not config.tie_word_embeddings:
            add(names.get_name(key, (".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def measured(dense: Any, folder: str, ids: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses, and distinct experts of a layer by width."""
    from slipstream.models.cpu.block_experts import experts_of

    mixture = load(folder, LoadOptions()).model
    blocks, chosen = experts_of(mixture), list[Tensor]()
    losses = {"dense": 0.0, "mixture": 0.0}
    chunks = ids.split(CHUNK)
    for chunk in chunks:
        for name, model in (("dense", dense), ("mixture", mixture)):
            logits = model(input_ids=chunk[None]).logits[0, :-1].float()
            losses[name] += float(nn.functional.cross_entropy(logits, chunk[1:])) / len(chunks)
        chosen += [block.chosen for block in blocks]
    distinct = {}
    for width in WIDTHS:
        windows = [part for choice in chosen for part in choice.split(width) if len(part) == width]
        distinct[width] = round(sum(len(part.unique()) for part in windows) / len(windows) / arguments.used, 3)
    counts = [choice.flatten().bincount(minlength=arguments.experts) for choice in chosen]
    per_layer = torch.stack(counts).unflatten(0, (len(chunks), -1)).sum(0)
    shape = {"layers": arguments.layers, "experts": arguments.experts, "used": arguments.used, "tokens": len(ids)}
    rounded = {name: round(loss, 4) for name, loss in losses.items()}
    return shape | rounded | {"distinct": distinct, "never_used": int((per_layer == 0).sum())}


if __name__ == "__main__":
    main()
