"""A model's tokens and their ids, and whether a draft model has the target's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import UsageError
from slipstream.tokenization.byte_vocabulary import RunningModel
from slipstream.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class VocabularyInfo:
    """A model's vocabulary, known without its weights."""

    name: str
    head_size: int  # number of logits, padding included
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    num_weights: int | None = None  # weights that a forward of one token reads, about; None if unknown

    @staticmethod
    def of(model: RunningModel) -> VocabularyInfo:
        return VocabularyInfo(model.name, model.backend.vocab_size, model.end_ids, model.tokenizer)


def same_vocabulary(target: RunningModel, draft: RunningModel) -> bool:
    """True if ids mean the same to both models, heads' padding apart. Raises `UsageError` if that cannot be known."""
    a, b = VocabularyInfo.of(target), VocabularyInfo.of(draft)
    differing = differences(a, b)
    if differing is None and a.head_size != b.head_size:
        raise UsageError(
            f"draft {b.name!r} has {b.head_size} logits, target {a.name!r} has {a.head_size}, and no tokenizers are at "
            "hand to compare; allowed: the same vocabulary, or both tokenizers, by tokenizer= and draft_tokenizer= of "
            "SpeculativeDecoder or CustomGenerate"
        )
    return usable(a, b, differing)


def differing_tokens(target: dict[str, int], draft: dict[str, int]) -> list[str]:
    """Descriptions of tokens whose ids differ or that one side lacks."""
    differing = {token for token, _ in target.items() ^ draft.items()}
    return [
        f"{token!r} is {_id(target.get(token))} in the target and {_id(draft.get(token))} in the draft"
        for token in sorted(differing, key=lambda t: (target.get(t, 1 << 60), t))
    ]


def differences(target: VocabularyInfo, draft: VocabularyInfo) -> list[str] | None:
    """The tokens that differ, or None if there are no two tokenizers to compare."""
    if target.tokenizer is None or draft.tokenizer is None:
        return None
    if draft.tokenizer is target.tokenizer:  # of a draft head
        return []
    return differing_tokens(target.tokenizer.vocabulary(), draft.tokenizer.vocabulary())


def usable(target: VocabularyInfo, draft: VocabularyInfo, differing: list[str] | None) -> bool:
    """True if ids mean the same to both, given their differences."""
    return target.head_size == draft.head_size if differing is None else not differing


def _id(value: int | None) -> str:
    return "absent" if value is None else str(value)
