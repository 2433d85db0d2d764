"""Tiny random models, a tokenizer of single characters, a backend that shows wrong cached tokens, an oracle drafter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from slipstream import Draft
from slipstream.core.rng import Race, key
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.cpu.packed_linear import compressed_or_packed, pack
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from slipstream.sampling.sampler import Sampler

SPECIALS = ("<pad>", "<eos>", "<unk>")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:!?"
VOCAB = len(SPECIALS) + len(LETTERS)
WINDOW = 8
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}a:"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _gpt2() -> Any:
    options = {name: _SHAPE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "tie_word_embeddings")}
    return transformers.GPT2Config(**options, n_positions=96, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = _SHAPE | {"num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 8}
    return transformers.Gemma3TextConfig(**shape, sliding_window=WINDOW, layer_types=kinds)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "llama-eager": lambda: transformers.LlamaConfig(**_SHAPE, attn_implementation="eager"),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "phi3": lambda: transformers.Phi3Config(**_SHAPE),
    "olmo2": lambda: transformers.Olmo2Config(**_SHAPE),
}


def fresh(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A new model of an architecture; `changes` are set on its configuration."""
    config = ARCHITECTURES[name]()
    for field_name, value in changes.items():
        setattr(config, field_name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@cache
def shared(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model that many tests use and none changes."""
    return fresh(name, seed, dtype)


@cache
def perturbed(name: str, scale: float = 0.1) -> Any:
    """A copy of `shared(name)` with noise on its weights: a draft model that is right some of the time."""
    model = copy.deepcopy(shared(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    return model


def reference(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy text of Hugging Face `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat a motif, so that retrieval finds n-grams."""
    generator = torch.Generator().manual_seed(seed)
    motif = torch.randint(3, vocab, (6,), generator=generator).tolist()
    texts = []
    for length in lengths:
        noise = torch.randint(3, vocab, (length,), generator=generator).tolist()
        texts.append([motif[i % 6] if i % 12 < 6 else noise[i] for i in range(length)])
    return texts


def tokenizer(extra: Sequence[str] = (), template: str | None = CHAT_TEMPLATE) -> Any:
    """One token per character of LETTERS, after three special tokens; `extra` characters come last."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *LETTERS, *extra))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    hf_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    hf_tokenizer.chat_template = template
    return hf_tokenizer


def byte_tokenizer(template: str | None) -> Any:
    """One token per byte, so that every text comes back whole; <eos> is special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate((*SPECIALS, *letters))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    hf_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    hf_tokenizer.chat_template = template
    return hf_tokenizer


class HashBackend:
    """Its logits hash all cached tokens of the prefix, so any wrong cached token shows."""

    def __init__(self, vocab_size: int = 7, max_length: int = 1 << 16) -> None:
        self.vocab_size, self.max_length, self.device = vocab_size, max_length, torch.device("cpu")
        self.slots = torch.full((0, 0), -1)
        self.forwards: list[tuple[int, int, bool]] = []
        self._race = Race(vocab_size, self.device)

    def reserve(self, rows: int, length: int) -> None:
        old = self.slots
        self.slots = torch.full((max(rows, old.shape[0]), max(length, old.shape[1])), -1)
        self.slots[: old.shape[0], : old.shape[1]] = old

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        rows, width = tokens.shape
        self.forwards.append((rows, width, logits))
        all_logits = torch.zeros(rows, width, self.vocab_size)
        for i, start in enumerate(starts):
            self.slots[first_slot + i, start : start + width] = tokens[i]
            if logits:
                cached = self.slots[first_slot + i].tolist()
                for j in range(width):
                    all_logits[i, j] = self._race.noise(key(*cached[: start + j + 1]))
        return all_logits if logits else torch.empty(0)

    def copy(self, source: int, destination: int, length: int) -> None:
        self.slots[destination, :length] = self.slots[source, :length]


class RaggedHash(HashBackend):
    """The same with ragged forwards; padding is written after the last row's tokens."""

    ragged = True

    def __init__(self, vocab_size: int = 7, max_length: int = 1 << 16) -> None:
        super().__init__(vocab_size, max_length)
        self.together: list[tuple[list[int], int]] = []  # (tokens of each row, tokens of the forward)

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        self.together.append(([segment.count for segment in segments], len(tokens)))
        all_logits, first = torch.zeros(len(tokens), self.vocab_size), 0
        assert widths is None or [segment.slot for segment in segments] == list(range(len(segments)))
        for segment in segments:
            row_tokens = tokens[first:] if segment is segments[-1] else tokens[first : first + segment.count]
            row_logits = HashBackend.forward(
                self, row_tokens[None], [segment.start], first_slot=segment.slot, logits=True
            )[0]
            self.forwards.pop()
            all_logits[first : first + len(row_logits)] = row_logits
            first += segment.count
        return all_logits if columns is None else all_logits[columns]


@dataclass
class Oracle:
    """Proposes known continuations: texts[row.index] is the whole row, `lies` the output positions to get wrong."""

    texts: Sequence[Sequence[int]]
    lies: frozenset[int] = frozenset()
    vocab_size: int = VOCAB
    asked: list[tuple[int, int, int]] = field(default_factory=list)  # (row, remaining, length)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        proposals = []
        for row, length in zip(rows, lengths, strict=True):
            self.asked.append((row.index, row.remaining, length))
            start = len(row.tokens)
            draft = list(self.texts[row.index][start : start + length])
            lies = [position + row.prompt_length - start for position in self.lies]
            for j in lies:
                if 0 <= j < len(draft):
                    draft[j] = (draft[j] + 1) % self.vocab_size
            proposals.append(draft)
        return Draft.from_lists(proposals, sampler.device)


def fast(name: str, dtype: torch.dtype = torch.float32, *, fused: bool = True, **changes: Any) -> HFBackend:
    """A new model, packed, with grouped attention and, by default, fused layers."""
    model = fresh(name, dtype=dtype, **changes)
    backend = HFBackend(model)
    fuse(model, compressed_or_packed)
    pack(model, compressed_or_packed)
    group_queries(backend)
    if fused:
        fuse_layers(backend)
    return backend


def ragged_logits(backend: HFBackend) -> Tensor:
    """Logits of a prompt longer than a sliding window, then of a ragged batch of two rows that continue it."""
    backend.reserve(2, 128)
    tokens = torch.arange(1, 21)[None]
    first = backend.forward(tokens, [0], first_slot=0, logits=True)[0]
    backend.copy(0, 1, 13)
    batch = backend.forward(torch.tensor([[5, 6, 7], [8, 9, 10]]), [20, 13], first_slot=0, logits=True)
    return torch.cat([first, *batch]).float()
