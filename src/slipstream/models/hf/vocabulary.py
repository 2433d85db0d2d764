"""Whether a draft model speaks the target's vocabulary, and what follows where the two differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import UsageError
from slipstream.models.hf.gguf_conversion import unreadable_gguf
from slipstream.models.hf.hf_tokenizer import HFTokenizer, load_tokenizer
from slipstream.models.hf.model_files import not_loaded, resolve
from slipstream.models.hf.weights import READER_ERRORS, quietly
from slipstream.models.loaded import Loaded, is_toy
from slipstream.models.toy import load_toy
from slipstream.text.detokenizer import Tokenizer

T = TypeVar("T")
SHOWN = 3
SPECIAL = ("bos", "eos", "pad")
PROBES = {
    "spaces": " two  spaces,\n\ta tab and a line ",
    "digits": "1234567890 and 3.14",
    "code": "def f(x):\n    return x ** 2",
    "emoji": "na\u00efve \N{GRINNING FACE}\N{ROCKET}",
}
CHAT_PROBE = [{"role": "user", "content": "Hello!"}]


@dataclass(frozen=True)
class VocabularyInfo:
    """A model's vocabulary, known without its weights. head_size: how many logits it has, padding included."""

    name: str
    head_size: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None

    @staticmethod
    def of(loaded: Loaded) -> VocabularyInfo:
        """That of a loaded model."""
        return VocabularyInfo(loaded.name, loaded.backend.vocab_size, loaded.end_ids, loaded.tokenizer)

    @property
    def special(self) -> dict[str, str]:
        """The tokens and ids of SPECIAL that the tokenizer names."""
        if not isinstance(self.tokenizer, HFTokenizer):
            return {}
        inner = self.tokenizer.inner
        named = {name: (getattr(inner, f"{name}_token"), getattr(inner, f"{name}_token_id")) for name in SPECIAL}
        return {name: f"{token!r} ({number})" for name, (token, number) in named.items() if token is not None}


@dataclass(frozen=True)
class Finding:
    """One comparison: of what, whether both are the same (None: not comparable), what was found, what follows."""

    subject: str
    same: bool | None
    found: str
    follows: str


@dataclass(frozen=True)
class VocabularyReport:
    """Whether `draft` can draft for `target`, and why. differing: the first SHOWN of `num_differing` tokens.

    head_sizes: the target's number of logits and the draft's.
    """

    target: str
    draft: str
    usable: bool
    conclusion: str
    head_sizes: tuple[int, int]
    num_differing: int
    differing: tuple[str, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as values that JSON knows."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people: the conclusion, then two lines per finding."""
        lines = [f"draft {self.draft!r} for target {self.target!r}: {self.conclusion}"]
        for one in self.findings:
            mark = {True: "same", False: "different", None: "unknown"}[one.same]
            lines += [f"  {one.subject:15} {mark:10} {one.found}", f"  {'':26} {one.follows}"]
        return lines


def inspect_vocabulary(source: str) -> VocabularyInfo:
    """The vocabulary of "toy", the embedded model, a folder, a .gguf file or a hub id; no weights are loaded.

    Only the embedded model is fetched if it is not at hand. End ids are those of a folder's generation config, else
    those of the model's configuration. Raises UsageError for what is no model, SlipstreamError for what is unreadable.
    """
    if is_toy(source):
        return VocabularyInfo.of(load_toy(source))
    from transformers import AutoConfig  # takes seconds

    is_gguf, path = source.endswith(".gguf"), Path(source).expanduser()
    if is_gguf and not path.is_file():
        raise UsageError(f"model {source!r} does not exist; allowed: a readable .gguf file")
    place = str(path.parent) if is_gguf else resolve(source)
    options = {"gguf_file": path.name} if is_gguf else {}
    try:
        with quietly():
            config = AutoConfig.from_pretrained(place, **options).get_text_config()
        generation = Path(place) / "generation_config.json"
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() and not is_gguf else None
    except READER_ERRORS as error:
        raise unreadable_gguf(path, error) if is_gguf else not_loaded(source, place, error) from error
    head_size = getattr(config, "vocab_size", None)
    if head_size is None:
        raise UsageError(f"model {source!r} has no vocab_size; allowed: language models")
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    known = tuple(i for i in ids if 0 <= i < head_size)
    return VocabularyInfo(source, head_size, known, load_tokenizer(source, place, **options))


def compare_vocabularies(target: Loaded | VocabularyInfo, draft: Loaded | VocabularyInfo) -> VocabularyReport:
    """Whether `draft` can be the draft model of `target`, and what their differences mean."""
    a, b = (one if isinstance(one, VocabularyInfo) else VocabularyInfo.of(one) for one in (target, draft))
    differing = _differing(a, b)
    usable = _usable(a, b, differing)
    tokens, head = _tokens(a, b, differing), _head(a, b, usable)
    conclusion = head.follows if usable else tokens.follows
    findings = [tokens, head, _special(a, b), _ends(a, b)]
    if a.tokenizer is not None and b.tokenizer is not None:
        findings += _encodings(a.tokenizer, b.tokenizer)
    sizes, shown = (a.head_size, b.head_size), tuple((differing or [])[:SHOWN])
    return VocabularyReport(a.name, b.name, usable, conclusion, sizes, len(differing or []), shown, tuple(findings))


def check_same(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model of another vocabulary, naming tokens that differ. Heads padded differently are fine."""
    a, b = VocabularyInfo.of(target), VocabularyInfo.of(draft)
    differing = _differing(a, b)
    if _usable(a, b, differing):
        return
    if differing is None:
        raise UsageError(
            f"draft {b.name!r} has {b.head_size} logits, target {a.name!r} has {a.head_size}, and no tokenizers are at "
            "hand to compare; allowed: the same vocabulary"
        )
    raise UsageError(
        f"draft {b.name!r} has another vocabulary than target {a.name!r}: {len(differing)} tokens differ, "
        f"first {'; '.join(differing[:SHOWN])}; draft models with another vocabulary are not supported yet"
    )


def differing_tokens(target: dict[str, int], draft: dict[str, int]) -> list[str]:
    """Descriptions of tokens whose ids differ or that one side lacks."""
    return [
        f"{token!r} is {_id(target.get(token))} in the target and {_id(draft.get(token))} in the draft"
        for token in sorted(target.keys() | draft.keys(), key=lambda t: (target.get(t, 1 << 60), t))
        if target.get(token) != draft.get(token)
    ]


def _id(value: int | None) -> str:
    return "absent" if value is None else str(value)


def _differing(target: VocabularyInfo, draft: VocabularyInfo) -> list[str] | None:
    """The tokens that differ, or None if there are no two tokenizers to compare."""
    if target.tokenizer is None or draft.tokenizer is None:
        return None
    return differing_tokens(target.tokenizer.vocabulary(), draft.tokenizer.vocabulary())


def _usable(target: VocabularyInfo, draft: VocabularyInfo, differing: list[str] | None) -> bool:
    return target.head_size == draft.head_size if differing is None else not differing


def _tokens(target: VocabularyInfo, draft: VocabularyInfo, differing: list[str] | None) -> Finding:
    if differing:
        found = f"{len(differing)} tokens differ, first {'; '.join(differing[:SHOWN])}"
        return Finding("tokens", False, found, "not usable as a draft model: the same id is another text to the target")
    if differing is None or target.tokenizer is None:
        lacking = " and ".join(who for who, one in (("target", target), ("draft", draft)) if one.tokenizer is None)
        follows = "taken to be the same, because the heads are of one size"
        if target.head_size != draft.head_size:
            follows = "not usable as a draft model: the heads differ, and nothing shows that ids mean the same"
        return Finding("tokens", None, f"the {lacking} came without a tokenizer", follows)
    found = f"{len(target.tokenizer.vocabulary())} tokens, each with the same id"
    return Finding("tokens", True, found, "a drafted id means the same to the target")


def _head(target: VocabularyInfo, draft: VocabularyInfo, usable: bool) -> Finding:
    extra = draft.head_size - target.head_size
    found = f"{target.head_size} logits in the target, {draft.head_size} in the draft"
    if not usable:
        follows = "beside the point, since the tokens decide"
    elif extra == 0:
        follows = "usable as is"
    elif extra > 0:
        follows = f"usable, padded head cut: the draft's last {extra} ids are never drafted"
    else:
        vocabulary = {} if draft.tokenizer is None else draft.tokenizer.vocabulary()
        real = sum(number >= draft.head_size for number in vocabulary.values())
        follows = f"usable, smaller head filled: the target's last {-extra} ids ({real} real tokens) are never drafted"
    return Finding("head", extra == 0, found, follows)


def _special(target: VocabularyInfo, draft: VocabularyInfo) -> Finding:
    ours, theirs = target.special, draft.special
    found = [
        f"{name} is {ours.get(name, 'none')} in the target and {theirs.get(name, 'none')} in the draft"
        for name in SPECIAL
        if ours.get(name) != theirs.get(name)
    ]
    same = ", ".join(f"{name} {token}" for name, token in ours.items()) or "neither tokenizer names one"
    follows = "only the target's are used: it alone encodes prompts"
    return Finding("special tokens", not found, "; ".join(found) or same, follows)


def _ends(target: VocabularyInfo, draft: VocabularyInfo) -> Finding:
    ours, theirs = sorted(target.end_ids), sorted(draft.end_ids)
    follows = "the draft's do not matter, because only the target's end the text"
    return Finding("end ids", ours == theirs, f"{ours} in the target, {theirs} in the draft", follows)


def _encodings(target: Tokenizer, draft: Tokenizer) -> list[Finding]:
    """Whether probe texts and, where there is a template, a chat become the same ids."""
    other = [name for name, text in PROBES.items() if not _same_ids(target.bare, draft.bare, text)]
    found = f"{', '.join(other or PROBES)} become {'other' if other else 'the same'} ids"
    follows = "the draft model sees text cut as in its training"
    if other:
        follows = "only the target's tokenizer cuts text; the draft model is used to other cuts and may guess worse"
    findings = [Finding("encoding", not other, found, follows)]
    having = [who for who, one in (("target", target), ("draft", draft)) if one.has_chat_template]
    if having:
        same = len(having) == 2 and _same_ids(target.chat, draft.chat, CHAT_PROBE)
        found = f"a chat becomes {'the same' if same else 'other'} ids"
        found = found if len(having) == 2 else f"only the {having[0]} has one"
        findings.append(Finding("chat template", same, found, "only the target's is used, for the draft model as well"))
    return findings


def _same_ids(target: Callable[[T], list[int]], draft: Callable[[T], list[int]], probe: T) -> bool:
    try:
        return target(probe) == draft(probe)
    except ValueError:  # one of them cannot encode it
        return False
