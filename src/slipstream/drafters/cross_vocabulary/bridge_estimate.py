"""What drafts through bytes can bring between two vocabularies, tried on a text without any model."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge

DRAFTED, EVERY, CHARACTERS = 6, 3, 8000  # draft tokens of a trial, tokens between two trials, characters tried
SHOWN = 5


@dataclass(frozen=True)
class BridgeEstimate:
    """What the bridge does, counted on a text.

    shared: tokens of both; of_target, of_draft: as shares of each. known: share of the text's tokens that the draft
    has too; aligned: share that end where a draft token ends. kept: share of proposed tokens that are the text's, if
    the draft model guesses the text perfectly; per_step: how many are proposed per draft token then.
    special: names of special tokens that both have. own_chat: the draft model renders chats by a template of its own.
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
        """Subject, whether both are the same, what was found, what follows."""
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
                f"of the text's tokens {self.known:.1%} are in the draft's vocabulary, {self.aligned:.1%} end where a "
                "draft token ends",
                f"a draft model that guessed every word would have {1 - self.kept:.1%} of its tokens rejected, and "
                f"brings {self.per_step:.2f} tokens per step",
            ),
        ]


def estimate(bridge: VocabularyBridge, text: str) -> BridgeEstimate:
    """Try the bridge on the first CHARACTERS of a text."""
    text = text[:CHARACTERS]
    target_ids, draft_ids = bridge.target.encode(text).ids, bridge.draft.encode(text).ids
    ends = _ends(bridge.draft.texts, draft_ids)
    own_ends = _ends(bridge.target.texts, target_ids)
    shared = bridge.target.ids.keys() & bridge.draft.ids.keys()
    count = max(1, len(target_ids))
    kept, proposed, steps = _trials(bridge, text, target_ids)
    return BridgeEstimate(
        shared=len(shared),
        of_target=len(shared) / max(1, len(bridge.target.ids)),
        of_draft=len(shared) / max(1, len(bridge.draft.ids)),
        known=sum(bridge.target.texts[token] in shared for token in target_ids) / count,
        aligned=len(set(own_ends) & set(ends)) / count,
        kept=kept / max(1, proposed),
        per_step=kept / max(1, steps),
        special=tuple(sorted(bridge.target.special.keys() & bridge.draft.special.keys())),
        own_chat=bridge.draft.render is not None,
    )


def _trials(bridge: VocabularyBridge, text: str, target_ids: list[int]) -> tuple[int, int, int]:
    """Tokens that are right, tokens proposed and draft tokens, where the text's own next words are drafted."""
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
