"""Whether a draft model speaks the target's vocabulary."""

from __future__ import annotations

from slipstream.backends import Loaded
from slipstream.types import UsageError

SHOWN = 3


def differing_tokens(target: dict[str, int], draft: dict[str, int]) -> list[str]:
    """Descriptions of tokens whose ids differ or that one side lacks."""
    return [
        f"{token!r} is {_id(target.get(token))} in the target and {_id(draft.get(token))} in the draft"
        for token in sorted(target.keys() | draft.keys(), key=lambda t: (target.get(t, 1 << 60), t))
        if target.get(token) != draft.get(token)
    ]


def _id(value: int | None) -> str:
    return "absent" if value is None else str(value)


def check_same(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model of another vocabulary, naming tokens that differ. Heads padded differently are fine."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.backend.vocab_size != draft.backend.vocab_size:
            raise UsageError(
                f"draft {draft.name!r} has {draft.backend.vocab_size} logits, target {target.name!r} has "
                f"{target.backend.vocab_size}, and no tokenizers are at hand to compare; allowed: the same vocabulary"
            )
        return
    differing = differing_tokens(target.tokenizer.vocabulary(), draft.tokenizer.vocabulary())
    if differing:
        raise UsageError(
            f"draft {draft.name!r} has another vocabulary than target {target.name!r}: {len(differing)} tokens differ, "
            f"first {'; '.join(differing[:SHOWN])}; draft models with another vocabulary are not supported yet"
        )
