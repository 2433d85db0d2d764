"""Tokenizers of several kinds trained on a small text, tiny models with their vocabularies, and bridges."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from slipstream import SpeculativeDecoder
from slipstream.models.loaded import Loaded
from slipstream.models.toy import FABLE, ToyBackend, load_toy
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, bridge_between
from slipstream.wiring import model_pair
from tests.support.tiny_models import fresh

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXT = [
    *FABLE.splitlines(),
    "def f(x):\n    return x ** 2 + 12345\n\n\nfor i in range(100):\n        print(i, 3.14)",
    "na\u00efve caf\u00e9 \N{GRINNING FACE}\N{ROCKET} 2024, 1999 and 123456 \u6771\u4eac\u306e\u5929\u6c17",
]
SPECIALS = ("<|end|>", "<|user|>", "<|model|>")
CHAT = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|model|>"
DIGITS = pre_tokenizers.Digits(individual_digits=True)
KINDS = ("bytes", "digits", "normalized", "sentencepiece", "prefixed", "metaspace")


def _byte_level(size: int, *, digits: bool = False, normalizer: Any = None) -> Tokenizer:
    """A tokenizer like GPT-2's. digits: each digit is a token; otherwise digits are merged as in the training text."""
    inner = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([DIGITS, level]) if digits else level
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=list(SPECIALS), show_progress=False
        ),
    )
    return inner


def _sentencepiece(size: int, *, prefixed: bool = False, metaspace: bool = False) -> Tokenizer:
    """A tokenizer with a sign for the space and a token per byte. prefixed, metaspace: a space precedes every text."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    texts = [word.replace(" ", SPACE) for text in TEXT for word in _words(text)]
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [(left, right) for left, right in model["merges"]]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.add_special_tokens(["<unk>", *SPECIALS])
    replace = normalizers.Replace(" ", SPACE)
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=True)
        decoding = [decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme="first"), decoders.Fuse()]
    elif prefixed:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = replace
        inner.add_tokens(["\n", "\n\n", SPACE * 4])  # as in Gemma: added, but not special
    inner.decoder = decoders.Sequence(decoding)
    inner.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", inner.token_to_id("<|user|>"))]
    )
    return inner


def _words(text: str) -> list[str]:
    """The text cut before each space, as pre-tokenizers do, since no token spans one."""
    words = text.split(" ")
    return [words[0], *(f" {word}" for word in words[1:])]


@cache
def tokenizer(kind: str, size: int = 420) -> Any:
    """A trained tokenizer with an end, two role markers and a chat template."""
    if kind == "bytes":
        inner = _byte_level(size)
    elif kind == "digits":
        inner = _byte_level(size + 60, digits=True)
    elif kind == "normalized":
        inner = _byte_level(size, normalizer=normalizers.NFC())
    else:
        inner = _sentencepiece(size, prefixed=kind == "prefixed", metaspace=kind == "metaspace")
    hf_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIALS[1:]),
        clean_up_tokenization_spaces=False,
    )
    hf_tokenizer.chat_template = CHAT
    return hf_tokenizer


def vocabulary(kind: str, size: int = 420) -> VocabularyInfo:
    """The vocabulary of a model with such a tokenizer and a head padded by 7 logits."""
    if kind == "toy":
        return VocabularyInfo.of(load_toy("toy"))
    hf_tokenizer = HFTokenizer(tokenizer(kind, size))
    return VocabularyInfo(kind, len(hf_tokenizer.inner) + 7, (hf_tokenizer.inner.eos_token_id,), hf_tokenizer)


@cache
def bridge(target: str, draft: str, size: int = 420) -> VocabularyBridge:
    """The bridge between two of them; size: of the draft model's vocabulary."""
    a, b = vocabulary(target), vocabulary(draft, size)
    return bridge_between(a, a.head_size, b, b.head_size)


@cache
def speaking(kind: str, seed: int = 0, size: int = 420, architecture: str = "llama") -> Any:
    """A tiny model of random weights with such a vocabulary, its head padded."""
    info = vocabulary(kind, size)
    return fresh(architecture, seed, vocab_size=info.head_size, eos_token_id=info.end_ids[0])


@cache
def _counted(
    text: tuple[int, ...], order: int, vocab_size: int
) -> tuple[dict[tuple[int, ...], dict[int, int]], dict[tuple[int, ...], Tensor]]:
    """How often each token follows each context of a text, and a cache for distributions over `vocab_size` tokens."""
    counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for position, token in enumerate(text):
        for length in range(min(order, position) + 1):
            counts[text[position - length : position]][token] += 1
    return counts, {}


class FableBackend(ToyBackend):
    """The toy model with another vocabulary: it knows the fable in these tokens, up to its order."""

    def __init__(self, info: VocabularyInfo, order: int, max_length: int = 1 << 16) -> None:
        super().__init__(1)
        assert isinstance(info.tokenizer, HFTokenizer)
        self.vocab_size, self.max_length, self._order = info.head_size, max_length, order
        self._end, self._fable = info.end_ids[0], info.tokenizer.bare(FABLE.replace("\n", " ").strip())
        self._counts, self._distributions = _counted((*self._fable, self._end), order, self.vocab_size)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """See `ToyBackend.forward`."""
        rows, width = tokens.shape
        for row, start in enumerate(starts):
            self._cache.slots[first_slot + row, start : start + width] = tokens[row]
        if not logits:
            return torch.empty(0)
        contexts = [
            self._cache.slots[first_slot + row, max(0, start + i + 1 - self._order) : start + i + 1].tolist()
            for row, start in enumerate(starts)
            for i in range(width)
        ]
        return torch.stack([self._of(tuple(context)) for context in contexts]).reshape(rows, width, -1)

    def _of(self, context: tuple[int, ...]) -> Tensor:
        if context not in self._distributions:
            self._distributions[context] = self._mixed(context)
        return self._distributions[context]

    def _mixed(self, context: tuple[int, ...]) -> Tensor:
        probs = torch.full((self.vocab_size,), 1e-4 / self.vocab_size, dtype=torch.float64)
        for length in range(len(context) + 1):
            counts = self._counts.get(context[len(context) - length :])
            if counts:
                fresh = torch.zeros_like(probs)
                fresh[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float64) / sum(counts.values())
                probs = 0.15 * probs + 0.85 * fresh
        return probs.log().float()


def fable_model(kind: str, order: int = 3, size: int = 420, max_length: int = 1 << 16) -> Loaded:
    """A model that knows the fable, with such a vocabulary."""
    info = vocabulary(kind, size)
    backend = FableBackend(info, order, max_length)
    return Loaded(backend, f"{kind}-{size}", info.end_ids, info.tokenizer, fingerprint=f"{kind}-{order}-{size}")


def decoder_of(target: Loaded, draft: Loaded | None, **settings: Any) -> SpeculativeDecoder:
    """A decoder over models made in this file."""
    loaded_models = {id(model): model for model in (target, draft) if model is not None}

    def find_loaded(source: Any, options: Any, tokenizer: Any = None) -> Loaded:
        return loaded_models[id(source)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_pair, "load", find_loaded)
        return SpeculativeDecoder(target, draft, **settings)
