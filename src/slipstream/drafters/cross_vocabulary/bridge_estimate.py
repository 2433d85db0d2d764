"""Estimates, from a text and without any model, how well drafts translate between two vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge

DRAFTED, EVERY = 6, 3  # draft tokens of a trial, target tokens between two trials
SHOWN = 5  # names of special tokens that are listed


@dataclass(frozen=True)
class BridgeEstimate:
    """How well a bridge translates drafts, counted on a text.

    shared: how many tokens both vocabularies have; of_target, of_draft: as shares of each. known: the share of the
    text's tokens that the draft has too; aligned: the share that end where a draft token ends. kept: the share of
    proposed tokens that are right if the draft model guesses the text perfectly; per_step: how many that is per draft
    token. special: names of special tokens that both have. own_chat: whether the draft model has a chat template.
    """

    shared: int
    of_target: float
    of_draft: float
    known: float
    aligned: float
    kept: float
    per_step: float
    special: tuple[str, ...]
    own_chat: bool

    def findings(self) -> list[tuple[str, bool | None, str, str]]:
        """Lines of a report: subject, whether both are the same, the finding, its consequence."""
        names = ", ".join(self.special[:SHOWN]) + (", ..." if len(self.special) > SHOWN else "")
        chat = "by the draft model's own template" if self.own_chat else "by the target's template, its markers as text"
        return [
            (
                "shared tokens",
                False,
                f"{self.shared}: {self.of_target:.1%} of the target's, {self.of_draft:.1%} of the draft's",
                "acceptance block and rejection draft these alone"
                if self.shared
                else "acceptance block and rejection are refused",
            ),
            ("special names", bool(names), names or "none in common", f"chats are rendered {chat}"),
            (
                "estimated loss",
                None,
                f"of the text's tokens {self.known:.1%} are in the draft's vocabulary, {self.aligned:.1%} end where "
                "a draft token ends",
                f"a draft model that guessed every word would have {1 - self.kept:.1%} of its tokens rejected, and "
                f"brings {self.per_step:.2f} tokens per step",
            ),
        ]


def estimate(bridge: VocabularyBridge, text: str) -> BridgeEstimate:
    """Try the bridge on the first 8,000 characters of a text."""
    text = text[:8000]
    target_ids, draft_ids = bridge.target.encode(text).ids, bridge.draft.encode(text).ids
    ends = _ends(bridge.draft.texts, draft_ids)
    target_ends = _ends(bridge.target.texts, target_ids)
    shared = bridge.target.ids.keys() & bridge.draft.ids.keys()
    count = max(1, len(target_ids))
    kept, proposed, steps = _trials(bridge, text, target_ids)
    return BridgeEstimate(
        shared=len(shared),
        of_target=len(shared) / max(1, len(bridge.target.ids)),
        of_draft=len(shared) / max(1, len(bridge.draft.ids)),
        known=sum(bridge.target.texts[token] in shared for token in target_ids) / count,
        aligned=len(set(target_ends) & set(ends)) / count,
        kept=kept / max(1, proposed),
        per_step=kept / max(1, steps),
        special=tuple(sorted(bridge.target.special.keys() & bridge.draft.special.keys())),
        own_chat=bridge.draft.render is not None,
    )


def _trials(bridge: VocabularyBridge, text: str, target_ids: list[int]) -> tuple[int, int, int]:
    """Right tokens, proposed tokens and draft tokens, where the draft is always the text's true continuation."""
    ends, data = _ends(bridge.target.texts, target_ids), text.encode()
    kept = proposed = steps = 0
    for position in range(EVERY, len(target_ids) - 2 * DRAFTED, EVERY):
        rest = data[ends[position - 1] : ends[position - 1] + 16 * DRAFTED].decode(errors="ignore")
        drafted = bridge.draft.encode(rest).ids[:DRAFTED]
        continuation = Continuation(bridge, target_ids[:position])
        for token in drafted:
            continuation.add(token)
        tokens, true = continuation.tokens(), target_ids[position : position + 2 * DRAFTED]
        right = next((i for i, (a, b) in enumerate(zip(tokens, true, strict=False)) if a != b), len(tokens))
        kept, proposed, steps = kept + right, proposed + len(tokens), steps + len(drafted)
    return kept, proposed, steps


def _ends(texts: list[bytes | None], ids: list[int]) -> list[int]:
    """Where each token ends, in bytes."""
    ends, end = [], 0
    for token in ids:
        end += len(texts[token] or b"")
        ends.append(end)
    return ends
