"""Compares a draft model's vocabulary with the target's, and estimates what drafting through text would lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.models.model_size import larger
from slipstream.text.prompt_sets import builtin_prompts
from slipstream.tokenization.vocabulary import VocabularyInfo, differences, usable
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, bridge_between

SHOWN = 3  # tokens that differ
MAX_CHARACTERS = 8000  # of the text on which drafts through text are tried
DRAFTED, EVERY = 6, 3  # draft tokens of a trial, target tokens between two trials
PROBE = " two  spaces,\n\ta tab, 1234567890, x ** 2, na\u00efve \N{GRINNING FACE}"


@dataclass(frozen=True)
class BridgeEstimate:
    """Yield of drafts through text, if the draft model guesses every word."""

    shared: int  # tokens that both vocabularies have
    kept: float  # the share of proposed tokens that are right
    per_step: float  # right tokens per token that the draft model computes


@dataclass(frozen=True)
class VocabularyReport:
    """The answer to whether `draft` can draft for `target`, and the reasons."""

    target: str
    draft: str
    usable: bool
    verdict: str  # the answer in a sentence or two
    notes: tuple[str, ...] = ()  # what costs speed, a sentence each
    bridge: BridgeEstimate | None = None  # where the vocabularies differ

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join((self.verdict, *self.notes))


def check_pair(target: str, draft: str) -> VocabularyReport:
    """Check whether `draft` can draft for `target`, from their tokenizers and configurations, without weights.

    target, draft: a hub id, a local folder, a .gguf file, "smollm2" or "toy"; `print` shows the report. Raises
    `UsageError` for what is no model, `SlipstreamError` for what cannot be read.
    """
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary  # transformers takes seconds

    return compare_vocabularies(inspect_vocabulary(target), inspect_vocabulary(draft))


def compare_vocabularies(
    target: Loaded | VocabularyInfo, draft: Loaded | VocabularyInfo, text: str = ""
) -> VocabularyReport:
    """Check whether `draft` can be the draft model of `target`.

    text: sample for drafts through text, if the vocabularies differ; by default the package's own prompts.
    """
    a, b = (model if isinstance(model, VocabularyInfo) else VocabularyInfo.of(model) for model in (target, draft))
    differing = differences(a, b)
    size = larger(a.num_weights, b.num_weights)
    slow = ", but hardly saves time" if size else ""
    notes = [f"Warning: draft model {b.name!r} {size}."] if size else []
    if differing is None:
        lacking = " and ".join(who for who, info in (("target", a), ("draft", b)) if info.tokenizer is None)
        why = f"the {lacking} came without a tokenizer"
        if not usable(a, b, differing):
            why = f"{why}, and there are {a.head_size} and {b.head_size} logits; nothing shows that ids mean the same"
            return VocabularyReport(a.name, b.name, False, why)
        verdict = f"Works{slow} if both have the same tokens, which cannot be checked: {why}."
        return VocabularyReport(a.name, b.name, True, verdict, tuple(notes))
    if not differing:
        verdict = f"Works{slow}: {b.name!r} and {a.name!r} have the same tokens. No extra rejections."
        return VocabularyReport(a.name, b.name, True, verdict, (*notes, *_costs(a, b)))
    try:
        text = text or "\n\n".join(prompt.prompt for prompt in builtin_prompts())
        bridge = _estimated(bridge_between(a, a.head_size, b, b.head_size), text[:MAX_CHARACTERS])
    except UsageError as error:
        return VocabularyReport(a.name, b.name, False, str(error))
    verdict = (
        f"Works, through text{slow}: the vocabularies differ, so drafts of {b.name!r} are translated into tokens of "
        f"{a.name!r}. Expect about {1 - bridge.kept:.1%} extra rejections."
    )
    notes += [
        f"{len(differing)} tokens differ, first {'; '.join(differing[:SHOWN])}.",
        f"With acceptance block and rejection only the {bridge.shared} tokens that both have are drafted."
        if bridge.shared
        else "Acceptance block and rejection are refused, because no token is in both vocabularies.",
    ]
    return VocabularyReport(a.name, b.name, True, verdict, tuple(notes), bridge)


def _costs(target: VocabularyInfo, draft: VocabularyInfo) -> Iterator[str]:
    """Reasons why drafting may be slower although the tokens are the same."""
    assert target.tokenizer is not None and draft.tokenizer is not None
    if lost := sum(token >= draft.head_size for token in target.tokenizer.vocabulary().values()):
        yield f"The draft has {draft.head_size} logits, so the target's last {lost} tokens are never drafted."
    try:
        same = target.tokenizer.bare(PROBE) == draft.tokenizer.bare(PROBE)
    except ValueError:  # one of them cannot encode it
        same = False
    if not same:
        yield "The tokenizers split text differently; the draft model, which gets the target's tokens, may guess worse."


def _estimated(bridge: VocabularyBridge, text: str) -> BridgeEstimate:
    """Draft the true continuation of a text in many places, and count the tokens that come through right."""
    target_ids, data = bridge.target.encode(text).ids, text.encode()
    ends = list(accumulate(len(bridge.target.texts[token] or b"") for token in target_ids))
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
    shared = len(bridge.target.ids.keys() & bridge.draft.ids.keys())
    return BridgeEstimate(shared, kept / max(1, proposed), kept / max(1, steps))
