"""Writes a target and a draft model with the shapes of real ones, whose drafts are right with a set probability.

    python benchmarks/random_pair.py 1.5b FOLDER
    python benchmarks/random_pair.py 1.5b FOLDER --gguf      # and both as Q4_K_M, by llama.cpp's quantizer

For machines without network. The weights are random, but both models follow the same tour through the vocabulary: after
each token they choose the next one by a wide margin, so that neither near-ties nor repetitions disturb a measurement.
After a set share of the tokens, the draft model chooses a wrong one. All layers of a model are copies of one random
layer.

It writes FOLDER/target and FOLDER/draft as transformers saves models, FOLDER/prompts.jsonl and, with --gguf,
FOLDER/target.gguf and FOLDER/draft.gguf.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from terminal import run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from slipstream.bench.llama_cpp import bindings
from slipstream.errors import SlipstreamError, UsageError

SPREAD = 16.0  # standard deviation of embeddings with which the last token outweighs the random layers
LAYER_SPREAD = 0.02
ACCEPTANCE = 0.8
END = "<end>"
MERGE = ("Ċ", "Ċ")  # a byte-level BPE tokenizer needs at least one merge
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS, PROMPT_TOKENS = 8, 127  # tokens before the last; that one differs in each prompt, and with it the text
FILES = ("target", "draft")

Shape = dict[str, int]


def shape(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> Shape:
    """Sizes under transformers' names."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    num_heads = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return sizes | num_heads | {"vocab_size": vocabulary}


SHAPES: dict[str, tuple[Shape, Shape]] = {
    "tiny": (shape(256, 512, 3, 4, 2, 512), shape(256, 256, 1, 4, 2, 512)),
    # SmolLM2-135M, and a small one
    "135m": (shape(576, 1536, 30, 9, 3, 49152), shape(192, 512, 6, 3, 1, 49152)),
    # Qwen2.5-1.5B and 0.5B
    "1.5b": (shape(1536, 8960, 28, 12, 2, 151936), shape(896, 4864, 24, 14, 2, 151936)),
    # Qwen2.5-7B and 0.5B
    "7b": (shape(3584, 18944, 28, 28, 4, 152064), shape(896, 4864, 24, 14, 2, 152064)),
}


def main(
    name: Annotated[str, typer.Argument(help=", ".join(SHAPES))],
    folder: Path,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="probability that a draft token is right")
    ] = ACCEPTANCE,
    gguf: Annotated[bool, typer.Option("--gguf", help="also write both as Q4_K_M; needs llama-cpp-python")] = False,
) -> None:
    """Write the files of the pair that FOLDER lacks."""
    if name not in SHAPES:
        raise UsageError(f"shape {name!r}; allowed: {', '.join(SHAPES)}")
    write_pair(name, folder, acceptance, gguf)


def write_pair(name: str, folder: Path, acceptance: float = ACCEPTANCE, gguf: bool = False) -> None:
    """Write the files of a pair that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, sizes in zip(FILES, SHAPES[name], strict=True):
        model = RandomModel(sizes, 1.0 if file == "target" else acceptance)
        if not (folder / file / "config.json").exists():
            model.save(folder / file)
        if gguf and not (folder / f"{file}.gguf").exists():
            model.save_gguf(folder / f"{file}.gguf")
    letters = random.Random(0)
    texts = ["".join(letters.choices(LETTERS, k=PROMPT_TOKENS)) + last for last in LETTERS[:PROMPTS]]
    lines = [json.dumps({"category": "letters", "turns": [text]}) + "\n" for text in texts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def vocabulary(size: int) -> list[str]:
    """All tokens: the bytes, the merged pair, tokens that no text contains, and the end token."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(MERGE)]
    return [*tokens, *(f"t{number}" for number in range(size - len(tokens) - 1)), END]


def write_tokenizer(writer: Any, size: int) -> None:
    """Write the metadata of a GGUF file's tokenizer with this many tokens."""
    tokens = vocabulary(size)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(len(tokens) - 1)


def tour(size: int, acceptance: float) -> Tensor:
    """[size]: the token after each. A share of 1 - acceptance of them differs from the tour with acceptance 1."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(size - 1, generator=generator)  # nothing leads to the end
    following = torch.zeros(size, dtype=torch.int64)
    following[order] = order.roll(-1)
    mistaken = order[torch.rand(size - 1, generator=generator) >= acceptance]
    following[mistaken] = following[mistaken].roll(1)
    return following


@dataclass(frozen=True)
class RandomModel:
    """A model of random weights that follows the tour. acceptance: how often it chooses the tour's next token."""

    sizes: Shape
    acceptance: float

    @property
    def config(self) -> Qwen2Config:
        """A Qwen2 configuration, an architecture whose rows need no reordering for a GGUF file."""
        last = self.sizes["vocab_size"] - 1
        fixed = {"max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": torch.bfloat16}
        return Qwen2Config(
            **self.sizes, **fixed, eos_token_id=last, bos_token_id=None, architectures=["Qwen2ForCausalLM"]
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and bfloat16 tensors in the model's order. Every layer has the tensors of the first."""
        generator, of_first_layer = torch.Generator().manual_seed(1), dict[str, Tensor]()
        embedding = torch.empty(self.sizes["vocab_size"], self.sizes["hidden_size"], dtype=torch.bfloat16)
        embedding.normal_(0, SPREAD, generator=generator)
        with torch.device("meta"):
            names = AutoModelForCausalLM.from_config(self.config).state_dict()
        for name, empty in names.items():
            kind = re.sub(r"layers\.\d+\.", "", name)
            if kind == "model.embed_tokens.weight":
                yield name, embedding
            elif kind == "lm_head.weight":
                head = torch.zeros_like(embedding)
                head[tour(len(embedding), self.acceptance)] = embedding / (SPREAD * embedding.shape[1] ** 0.5)
                yield name, head
            else:
                if kind not in of_first_layer:
                    of_first_layer[kind] = (
                        torch.zeros(empty.shape) if kind.endswith("bias") else torch.ones(empty.shape)
                    )
                    if empty.dim() == 2:
                        of_first_layer[kind].normal_(0, LAYER_SPREAD, generator=generator)
                yield name, of_first_layer[kind].bfloat16()

    def save(self, folder: Path) -> None:
        """Save as transformers does, a file for each layer. The configuration comes last: then all is there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer().save_pretrained(folder)
        files, parts = dict[str, str](), dict[str, dict[str, Tensor]]()
        for name, tensor in self.tensors():
            layer = re.search(r"layers\.\d+", name)
            file = f"model-{layer[0] if layer else name}.safetensors"
            files[name] = file
            if file not in parts:
                _save_all(parts, folder)
            parts.setdefault(file, {})[name] = tensor
        _save_all(parts, folder)
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        self.config.save_pretrained(folder)

    def _tokenizer(self) -> Any:
        tokens = {token: number for number, token in enumerate(vocabulary(self.sizes["vocab_size"]))}
        tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[MERGE]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)

    def save_gguf(self, file: Path) -> None:
        """Save as Q4_K_M, by way of a bfloat16 file."""
        import gguf
        import numpy

        bf16_file, architecture = file.with_suffix(".bf16"), gguf.MODEL_ARCH.QWEN2
        writer = gguf.GGUFWriter(bf16_file, "qwen2")
        writer.add_context_length(self.config.max_position_embeddings)
        writer.add_embedding_length(self.sizes["hidden_size"])
        writer.add_block_count(self.sizes["num_hidden_layers"])
        writer.add_feed_forward_length(self.sizes["intermediate_size"])
        writer.add_head_count(self.sizes["num_attention_heads"])
        writer.add_head_count_kv(self.sizes["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(self.config.rms_norm_eps)
        writer.add_rope_freq_base(self.config.rope_parameters["rope_theta"])
        write_tokenizer(writer, self.sizes["vocab_size"])
        names = gguf.get_tensor_name_map(architecture, self.sizes["num_hidden_layers"])
        for name, tensor in self.tensors():
            gguf_name = names.get_name(name, (".weight", ".bias"))
            if tensor.dim() == 1:
                writer.add_tensor(gguf_name, tensor.float().numpy())
            else:
                rows = tensor.view(torch.uint8).numpy().view(numpy.uint8)
                writer.add_tensor(gguf_name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantize(bf16_file, file)
        bf16_file.unlink()


def _save_all(parts: dict[str, dict[str, Tensor]], folder: Path) -> None:
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    parts.clear()


def quantize(bf16_file: Path, file: Path) -> None:
    """Quantize a GGUF file to Q4_K_M by llama.cpp, with as many threads as PyTorch has."""
    llama, scratch = bindings("--gguf"), file.with_suffix(".part")
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = llama.LLAMA_FTYPE_MOSTLY_Q4_K_M, torch.get_num_threads()
    if code := llama.llama_model_quantize(str(bf16_file).encode(), str(scratch).encode(), ctypes.byref(settings)):
        raise SlipstreamError(f"llama.cpp could not quantize {str(bf16_file)!r}: code {code}")
    scratch.replace(file)


if __name__ == "__main__":
    run(main)
