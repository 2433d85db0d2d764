"""Structured output for tests: a small vocabulary with tokens for JSON, tiny models of it, schemas, a table grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream import Constraint, SpeculativeDecoder
from slipstream.constraints.compiled_grammars import CompiledGrammars, GrammarState
from slipstream.models.loaded import Loaded
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.tiny_models import fresh

VOCAB, END, EMPTY = 448, "<eos>", 5  # the last EMPTY ids are no tokens, as in a padded output layer


def strict(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, SMALL = {"type": "string", "maxLength": 6}, {"type": "integer", "minimum": -5, "maximum": 120}
SCHEMAS: dict[str, dict[str, Any]] = {
    "record": strict({"name": TEXT, "age": SMALL, "member": {"type": "boolean"}}),
    "optional": {
        "type": "object",
        "properties": {"a": SMALL, "b": TEXT},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": strict({"place": strict({"city": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}), "n": SMALL}),
    "array": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [SMALL, TEXT], "items": False, "minItems": 2},
    "enum": strict({"color": {"enum": ["red", "green", "dark blue"]}, "fixed": {"const": {"version": 2}}}),
    "any_of": strict({"value": {"anyOf": [SMALL, {"type": "null"}, {"type": "boolean"}]}}),
    "one_of": {
        "oneOf": [strict({"kind": {"const": "circle"}, "r": SMALL}), strict({"kind": {"const": "box"}, "w": SMALL})]
    },
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 40}]},
    "reference": {
        "$defs": {"point": strict({"x": SMALL, "y": SMALL})},
        **strict({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "date": strict({"day": {"type": "string", "format": "date"}}),
    "multiple": strict({"even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 98}}),
    "float": strict({"share": {"type": "number", "minimum": 0, "maximum": 1}}),
    "call": strict(
        {"name": {"const": "get_weather"}, "arguments": strict({"city": TEXT, "unit": {"enum": ["celsius", "kelvin"]}})}
    ),
}


@cache
def tokenizer() -> Any:
    """Byte-level BPE of JSON texts, with an end token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - EMPTY, special_tokens=[END], initial_alphabet=alphabet)
    inner.train_from_iterator([json.dumps(schema, separators=(",", ":")) for schema in SCHEMAS.values()] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


@cache
def model(seed: int = 0, noise: float = 0.0) -> Any:
    """A tiny random Llama of this vocabulary; `noise` of another seed makes it a draft model for the first."""
    changes = {"vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.3}
    llama = fresh("llama", seed, **changes, eos_token_id=tokenizer().eos_token_id)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in llama.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return llama


@cache
def decoder(drafter: str = "none", acceptance: str = "auto") -> SpeculativeDecoder:
    """A decoder over the tiny model and a draft model like it."""
    if (drafter, acceptance) == ("none", "auto"):
        return SpeculativeDecoder(model(), model(0, noise=0.2), tokenizer=tokenizer(), drafter="none")
    return decoder().using(drafter, acceptance=acceptance, num_draft_tokens="auto" if drafter == "none" else 4)


@cache
def grammars() -> CompiledGrammars:
    end = tokenizer().eos_token_id
    loaded = Loaded(decoder().target.backend, "tiny", (end,), HFTokenizer(tokenizer()))
    return CompiledGrammars(loaded, VOCAB)


def state(constraint: Constraint, *further: int) -> GrammarState:
    """The initial state of a grammar; `further` tokens end the row too."""
    return grammars().constraint(constraint, frozenset((tokenizer().eos_token_id, *further)))


def allowed(masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """[J, VOCAB] bool from packed masks."""
    return np.unpackbits(masks, axis=1, count=VOCAB, bitorder="little").astype(bool)


class TableGrammar:
    """A `RowConstraint` over few tokens: a function from the output to the tokens that may follow."""

    def __init__(self, legal: Callable[[tuple[int, ...]], frozenset[int]]) -> None:
        self._legal = legal

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        rows, num_legal_tokens = [], self.num_legal(output, draft)
        for count in range(len(draft) + 1):
            legal = self._legal((*output, *draft[:count])) if count <= num_legal_tokens else frozenset(range(8))
            rows.append([sum(1 << token for token in legal)])
        return np.array(rows, dtype=np.uint8)

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        illegal = (i for i in range(len(draft)) if draft[i] not in self._legal((*output, *draft[:i])))
        return next(illegal, len(draft))

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < limit and len(legal := self._legal((*output, *tokens))) == 1:
            tokens += legal
        return tokens

    def problem(self, output: Sequence[int]) -> str | None:
        return None
