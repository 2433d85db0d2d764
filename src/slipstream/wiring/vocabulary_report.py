"""Compares a draft model's vocabulary with the target's, and estimates what drafting through bytes would lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.models.model_size import larger
from slipstream.text.prompt_sets import builtin_prompts
from slipstream.tokenization.tokenizer import Tokenizer
from slipstream.tokenization.vocabulary import SPECIAL, VocabularyInfo, differences, usable
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, bridge_between

T = TypeVar("T")
SHOWN = 3  # tokens that differ
NAMED = 5  # special tokens that both have
DRAFTED, EVERY = 6, 3  # draft tokens of a trial, target tokens between two trials
PROBES = {
    "spaces": " two  spaces,\n\ta tab and a line ",
    "digits": "1234567890 and 3.14",
    "code": "def f(x):\n    return x ** 2",
    "emoji": "na\u00efve \N{GRINNING FACE}\N{ROCKET}",
}
CHAT_PROBE = [{"role": "user", "content": "Hello!"}]


@dataclass(frozen=True)
class Finding:
    """One comparison: its subject, whether both are the same (None: unknown), what was found and what follows.

    amount: the result of an estimate, which is neither the same nor different.
    """

    subject: str
    same: bool | None
    found: str
    follows: str
    amount: str = ""

    @property
    def mark(self) -> str:
        """The result in a word."""
        return self.amount or {True: "same", False: "different", None: "unknown"}[self.same]


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

    def findings(self) -> list[Finding]:
        """The estimate as findings of the report."""
        names = ", ".join(self.special[:NAMED]) + (", ..." if len(self.special) > NAMED else "")
        chat = "by the draft model's own template" if self.own_chat else "by the target's template, its markers as text"
        return [
            Finding(
                "shared tokens",
                False,
                f"{self.shared}: {self.of_target:.1%} of the target's, {self.of_draft:.1%} of the draft's",
                "with acceptance block and rejection only these are drafted"
                if self.shared
                else "acceptance block and rejection are refused",
            ),
            Finding("special names", bool(names), names or "none in common", f"chats are rendered {chat}"),
            Finding(
                "estimated loss",
                None,
                f"of the text's tokens {self.known:.1%} are in the draft's vocabulary, {self.aligned:.1%} end where "
                "a draft token ends",
                f"a draft model that guessed every word would have {1 - self.kept:.1%} of its tokens rejected, and "
                f"brings {self.per_step:.2f} tokens per step",
                amount=f"{1 - self.kept:.1%}",
            ),
        ]


@dataclass(frozen=True)
class VocabularyReport:
    """Whether `draft` can draft for `target`, and why. differing: the first SHOWN of `num_differing` tokens.

    head_sizes: the target's number of logits and the draft's. bridge: what to expect of drafts through bytes, where
    the vocabularies differ and can be read so. warning: why a usable draft model hardly saves time; empty if it may.
    """

    target: str
    draft: str
    usable: bool
    conclusion: str
    head_sizes: tuple[int, int]
    num_differing: int
    differing: tuple[str, ...]
    findings: tuple[Finding, ...]
    bridge: BridgeEstimate | None = None
    warning: str = ""

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two, for a pair that is usable."""
        same = next(finding.same for finding in self.findings if finding.subject == "tokens")
        slow = ", but hardly saves time" if self.warning else ""
        if self.bridge is not None:
            return (
                f"Works, through text{slow}: the vocabularies differ, so drafts of {self.draft!r} are translated into "
                f"tokens of {self.target!r}. Expect about {1 - self.bridge.kept:.1%} extra rejections."
            )
        if same is None:
            return f"Works{slow} if both have the same tokens, which cannot be checked: {self.findings[0].found}."
        return f"Works{slow}: {self.draft!r} and {self.target!r} have the same tokens. No extra rejections."

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report for people: the conclusion, then two lines per finding."""
        lines = [f"draft {self.draft!r} for target {self.target!r}: {self.conclusion}"]
        for finding in self.findings:
            lines += [f"  {finding.subject:15} {finding.mark:10} {finding.found}", f"  {'':26} {finding.follows}"]
        return lines


def check_pair(target: str, draft: str) -> VocabularyReport:
    """Whether `draft` can be the draft model of `target`: from their tokenizers and configurations, without weights.

    target, draft: a hub id, a local folder, a .gguf file, "smollm2" or "toy"; `print` shows the report. Raises
    `UsageError` for what is no model, `SlipstreamError` for what cannot be read.
    """
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary  # transformers takes seconds

    return compare_vocabularies(inspect_vocabulary(target), inspect_vocabulary(draft))


def compare_vocabularies(
    target: Loaded | VocabularyInfo, draft: Loaded | VocabularyInfo, text: str = ""
) -> VocabularyReport:
    """Whether `draft` can be the draft model of `target`, and what their differences mean.

    text: on which drafts through bytes are tried, where the vocabularies differ; a text of the package's by default.
    """
    a, b = (model if isinstance(model, VocabularyInfo) else VocabularyInfo.of(model) for model in (target, draft))
    differing = differences(a, b)
    same = usable(a, b, differing)
    bridge, refusal = (None, "") if same or differing is None else _bridge(a, b, text)
    tokens, head = _tokens(a, b, differing, bridge is not None), _head(a, b, same)
    conclusion = head.follows if same else refusal or tokens.follows
    findings = [tokens, head, _special(a, b, same), _ends(a, b, same)]
    if bridge is not None:
        findings += bridge.findings()
    elif a.tokenizer is not None and b.tokenizer is not None:
        findings += _encodings(a.tokenizer, b.tokenizer)
    sizes, shown = (a.head_size, b.head_size), tuple((differing or [])[:SHOWN])
    count, comparison = len(differing or []), larger(a.num_weights, b.num_weights)
    warning = f"draft model {b.name!r} {comparison}" if comparison else ""
    return VocabularyReport(
        a.name, b.name, same or bridge is not None, conclusion, sizes, count, shown, tuple(findings), bridge, warning
    )


def _bridge(target: VocabularyInfo, draft: VocabularyInfo, text: str) -> tuple[BridgeEstimate | None, str]:
    """What to expect of drafts through bytes, or why there can be none."""
    text = text or "\n\n".join(prompt.prompt for prompt in builtin_prompts())
    try:
        return _estimated(bridge_between(target, target.head_size, draft, draft.head_size), text), ""
    except UsageError as error:
        return None, f"not usable as a draft model: {error}"


def _estimated(bridge: VocabularyBridge, text: str) -> BridgeEstimate:
    """Try the bridge on the first 8,000 characters of a text."""
    text = text[:8000]
    target_ids, draft_ids = bridge.target.encode(text).ids, bridge.draft.encode(text).ids
    ends = _byte_ends(bridge.draft.texts, draft_ids)
    target_ends = _byte_ends(bridge.target.texts, target_ids)
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
    ends, data = _byte_ends(bridge.target.texts, target_ids), text.encode()
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


def _byte_ends(texts: list[bytes | None], ids: list[int]) -> list[int]:
    """Where each token ends, in bytes."""
    ends, end = [], 0
    for token in ids:
        end += len(texts[token] or b"")
        ends.append(end)
    return ends


def _tokens(target: VocabularyInfo, draft: VocabularyInfo, differing: list[str] | None, bridged: bool) -> Finding:
    if differing:
        summary = f"{len(differing)} tokens differ, first {'; '.join(differing[:SHOWN])}"
        follows = "not usable as a draft model: the same id is another text to the target"
        return Finding("tokens", False, summary, "usable through bytes, verified by match" if bridged else follows)
    if differing is None or target.tokenizer is None:
        lacking = " and ".join(who for who, info in (("target", target), ("draft", draft)) if info.tokenizer is None)
        follows = "taken to be the same, because the heads are of one size"
        if target.head_size != draft.head_size:
            follows = "not usable as a draft model: the heads differ, and nothing shows that ids mean the same"
        return Finding("tokens", None, f"the {lacking} came without a tokenizer", follows)
    summary = f"{len(target.tokenizer.vocabulary())} tokens, each with the same id"
    return Finding("tokens", True, summary, "a drafted id means the same to the target")


def _head(target: VocabularyInfo, draft: VocabularyInfo, usable: bool) -> Finding:
    extra = draft.head_size - target.head_size
    summary = f"{target.head_size} logits in the target, {draft.head_size} in the draft"
    if not usable:
        follows = "irrelevant, as drafts are translated through their text"
    elif extra == 0:
        follows = "usable as is"
    elif extra > 0:
        follows = f"usable: the draft's larger head is cut, and its last {extra} ids are never drafted"
    else:
        vocabulary = {} if draft.tokenizer is None else draft.tokenizer.vocabulary()
        real = sum(number >= draft.head_size for number in vocabulary.values())
        follows = (
            f"usable: the draft's head is smaller; the target's last {-extra} ids ({real} tokens) are never drafted"
        )
    return Finding("head", extra == 0, summary, follows)


def _special(target: VocabularyInfo, draft: VocabularyInfo, same_tokens: bool) -> Finding:
    target_special, draft_special = target.special, draft.special
    differing = [
        f"{name} is {target_special.get(name, 'none')} in the target and {draft_special.get(name, 'none')} in the draft"
        for name in SPECIAL
        if target_special.get(name) != draft_special.get(name)
    ]
    same = ", ".join(f"{name} {token}" for name, token in target_special.items()) or "neither tokenizer names one"
    follows = "only the target's are used: it alone encodes prompts"
    if not same_tokens:
        follows = "each is translated into the other model's token of the same role"
    return Finding("special tokens", not differing, "; ".join(differing) or same, follows)


def _ends(target: VocabularyInfo, draft: VocabularyInfo, same_tokens: bool) -> Finding:
    target_ends, draft_ends = sorted(target.end_ids), sorted(draft.end_ids)
    follows = "the draft's do not matter, because only the target's end the text"
    if not same_tokens:
        follows = "where the draft model ends, the target's end is proposed"
    summary = f"{target_ends} in the target, {draft_ends} in the draft"
    return Finding("end ids", target_ends == draft_ends, summary, follows)


def _encodings(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Whether probe texts and, where there is a template, a chat become the same ids."""
    differing = [name for name, text in PROBES.items() if not _same_ids(target.bare, draft.bare, text)]
    summary = f"{', '.join(differing or PROBES)} become {'other' if differing else 'the same'} ids"
    follows = "the draft model sees text cut as in its training"
    if differing:
        follows = "only the target's tokenizer splits text; the draft model, trained on other splits, may guess worse"
    findings = [Finding("encoding", not differing, summary, follows)]
    having = [who for who, tokenizer in (("target", target), ("draft", draft)) if tokenizer.has_chat_template]
    if having:
        same = len(having) == 2 and _same_ids(target.chat, draft.chat, CHAT_PROBE)
        summary = f"a chat becomes {'the same' if same else 'other'} ids"
        summary = summary if len(having) == 2 else f"only the {having[0]} has one"
        follows = "only the target's is used, for the draft model as well"
        findings.append(Finding("chat template", same, summary, follows))
    return findings


def _same_ids(target: Callable[[T], list[int]], draft: Callable[[T], list[int]], probe: T) -> bool:
    try:
        return target(probe) == draft(probe)
    except ValueError:  # one of them cannot encode it
        return False
