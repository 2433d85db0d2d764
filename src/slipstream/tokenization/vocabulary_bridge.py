"""Two vocabularies compared as bytes: which tokens they share, and which special tokens correspond."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slipstream.errors import UsageError
from slipstream.tokenization.byte_vocabulary import ByteVocabulary, NamedModel, byte_vocabulary


@dataclass(frozen=True)
class VocabularyBridge:
    """The vocabularies of a target and of a draft model."""

    target: ByteVocabulary
    draft: ByteVocabulary

    @cached_property
    def special_to_draft(self) -> dict[int, int]:
        """The draft model's token for each special one of the target: that of the same name; an end for other ends."""
        draft_special = self.draft.special
        named = {number: draft_special[name] for name, number in self.target.special.items() if name in draft_special}
        ends = {end: self.draft.end_ids[0] for end in self.target.end_ids if self.draft.end_ids}
        return ends | named

    @cached_property
    def end_to_target(self) -> dict[int, int]:
        """The target's end token for each of the draft model's: that of the same name, else the target's first."""
        names = {number: name for name, number in self.draft.special.items()}
        ends = {}
        for end in self.draft.end_ids:
            same = self.target.special.get(names.get(end, ""))
            if same in self.target.end_ids:
                ends[end] = same
            elif self.target.end_ids:
                ends[end] = self.target.end_ids[0]
        return {end: same for end, same in ends.items() if same is not None}

    @cached_property
    def special_names(self) -> dict[int, bytes]:
        """The names of the target's special tokens, which are read as text where the draft model has no such token."""
        return {number: name.encode() for name, number in self.target.special.items()}

    @cached_property
    def shared(self) -> dict[int, int]:
        """The draft model's token for each of the target's tokens that it has too, ends included."""
        draft_ids = self.draft.ids
        ends = {target_id: end for end, target_id in reversed(self.end_to_target.items())}
        return {target_id: draft_ids[text] for text, target_id in self.target.ids.items() if text in draft_ids} | ends


def bridge_between(target: NamedModel, target_size: int, draft: NamedModel, draft_size: int) -> VocabularyBridge:
    """The bridge between two models with heads of these sizes; refuses a tokenizer that cannot be read as bytes."""
    read = []
    for model, size in ((target, target_size), (draft, draft_size)):
        try:
            read.append(byte_vocabulary(model, size))
        except UsageError as error:
            raise UsageError(
                f"draft {draft.name!r} has another vocabulary than target {target.name!r}, and {model.name!r} cannot "
                f"draft or be drafted for through bytes: {error}; allowed: a draft model of the target's vocabulary"
            ) from error
    return VocabularyBridge(*read)


def unfinished(data: bytes) -> int:
    """Number of bytes at the end that begin an incomplete character of UTF-8."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
    return 0
