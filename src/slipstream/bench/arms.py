"""Arms: their notation (`model@4/rejection`, for example), which ones are refused, and their names in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream import drafters
from slipstream.core.acceptance import load_rule
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.draft_length.choice import LengthChoice
from slipstream.errors import UsageError, did_you_mean
from slipstream.sampling.params import SamplingParams

PLAIN = "none"
HF, ASSISTED, TUNED, LOOKUP = "hf", "hf-assisted", "hf-assisted-tuned", "hf-lookup"
LLAMA, LLAMA_LOOKUP = "llama", "llama-lookup"  # llama.cpp on the same file
OF_LLAMA_CPP = (LLAMA, LLAMA_LOOKUP)
BASELINES = (HF, ASSISTED, TUNED, LOOKUP, *OF_LLAMA_CPP)
BASELINE_DRAFT_TOKENS = {TUNED: 4, LOOKUP: 7, LLAMA_LOOKUP: 7}  # as many as our own drafters of these kinds
SYNTAX = (
    "DRAFTER[@LENGTH][/RULE][.plain][.predicted][~TEMPERATURE], for example none, ngram@7, model@4/rejection, "
    "model@4x2 (a tree), auto@chain (no trees), none.plain (unpacked weights), auto.predicted (given the prompts' "
    "predictions), model@4~0.8, module:Name@3 or model@module:Policy (your own); or one of transformers' own: "
    f"{HF}, {ASSISTED} (its defaults), {TUNED}[@LENGTH], {LOOKUP}[@LENGTH]; or one of llama.cpp's: "
    f"{LLAMA}, {LLAMA_LOOKUP}[@LENGTH]"
)
_ARM = re.compile(
    r"(?P<name>[a-z][a-z_-]*|[A-Za-z_][\w.]*(?=:[A-Za-z_]\w*))(?P<argument>:[^@/.~]+)?"
    r"(?:@(?P<length>\d+x\d+|\d+|chain|[A-Za-z_][\w.]*:[A-Za-z_]\w*))?(?:/(?P<rule>[\w.]+:[A-Za-z_]\w*|[^.~]+))?"
    r"(?P<plain>\.plain)?(?P<predicted>\.predicted)?(?:~(?P<temperature>\d+(?:\.\d+)?))?"
)
_BASELINES = {
    HF: "Hugging Face",
    ASSISTED: "Hugging Face assisted",
    TUNED: "Hugging Face assisted",
    LOOKUP: "Hugging Face prompt lookup",
    LLAMA: "llama.cpp",
    LLAMA_LOOKUP: "llama.cpp prompt lookup",
}


@dataclass(frozen=True)
class Arm:
    """One way of generating; None keeps the run's setting."""

    name: str  # as the user wrote it, unique within a run
    drafter: str | None = None
    num_draft_tokens: int | str | None = None  # the draft length
    acceptance: str | None = None
    fast: bool | None = None  # False: weights that are never packed
    temperature: float | None = None
    # another project's generation, to which drafter, acceptance and fast do not apply; None: our own
    baseline: str | None = None
    predicted: bool = False  # the arm uses the prompts' predictions


def parse_arms(text: str) -> list[Arm]:
    """The arms of a comma-separated list; each may occur once."""
    arms = [parse_arm(part.strip()) for part in text.split(",") if part.strip()]
    names = [arm.name for arm in arms]
    if not arms:
        raise UsageError(f"arms {text!r}; allowed: at least one of {SYNTAX}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"arm {twice[0]!r} is given twice; allowed: each arm once")
    return arms


def parse_arm(text: str) -> Arm:
    """Parse one arm; unknown drafters and rules, and parts without effect, are refused."""
    parts = _ARM.fullmatch(text)
    if parts is None:
        raise UsageError(f"arm {text!r}; allowed: {SYNTAX}")
    length = _length(text, parts["length"])
    temperature = None if parts["temperature"] is None else float(parts["temperature"])
    if temperature is not None:
        SamplingParams(temperature=temperature)
    if parts["name"] in BASELINES:
        return _baseline(text, parts, length, temperature)
    drafter = parts["name"] + (parts["argument"] or "")
    drafters.check_name(drafter)
    if parts["name"] == PLAIN and (length is not None or parts["rule"]):
        raise UsageError(f"arm {text!r}: `none` drafts nothing; allowed: `none` without a length or a rule")
    if parts["rule"] not in (None, "auto"):
        load_rule(parts["rule"])
    plain = False if parts["plain"] else None
    return Arm(text, drafter, length, parts["rule"], plain, temperature, predicted=parts["predicted"] is not None)


def _length(text: str, spelled: str | None) -> int | str | None:
    """A number of tokens, or one of the forms of `num_draft_tokens`."""
    if spelled is None:
        return None
    count = int(spelled) if spelled.isdecimal() else LengthChoice.parse(spelled).count
    if count is not None and not 1 <= count <= MAX_DRAFT_TOKENS:
        raise UsageError(f"arm {text!r}: draft length {spelled}; allowed: 1 to {MAX_DRAFT_TOKENS} tokens")
    return int(spelled) if spelled.isdecimal() else spelled


def reference_of(arms: Sequence[Arm], name: str | None) -> str:
    """The arm that speed-ups refer to: the named one, else plain decoding, else the first."""
    names = [arm.name for arm in arms]
    if name is None:
        return PLAIN if PLAIN in names else names[0]
    check_reference(name, names)
    return name


def check_reference(name: str, names: Sequence[str]) -> None:
    """Refuse a reference that is not among the arms of these names."""
    if name not in names:
        near = did_you_mean(name, *names)
        raise UsageError(f"reference {name!r} is not among the arms; allowed: {', '.join(names)}{near}")


def uses_draft_model(arm: Arm) -> bool:
    """True if the arm drafts with the run's draft model."""
    if arm.baseline is not None:
        return arm.baseline in (ASSISTED, TUNED)
    drafter = arm.drafter or "auto"
    if drafter == "auto":
        drafter = drafters.preferred(draft_model=True, costs=arm.num_draft_tokens is None)
    return drafters.traits(drafter).needs_draft_model


def runs_in_batches(arm: Arm) -> bool:
    """True if the arm can decode several prompts together: our own, and transformers' plain generation."""
    return arm.baseline in (None, HF)


def _baseline(text: str, parts: re.Match[str], length: int | str | None, temperature: float | None) -> Arm:
    name = parts["name"]
    if (
        parts["argument"]
        or parts["rule"]
        or parts["plain"]
        or parts["predicted"]
        or (length is not None and name not in BASELINE_DRAFT_TOKENS)
        or isinstance(length, str)
    ):
        raise UsageError(
            f"arm {text!r}; allowed: {HF}, {ASSISTED}, {TUNED}[@LENGTH], {LOOKUP}[@LENGTH], {LLAMA}, "
            f"{LLAMA_LOOKUP}[@LENGTH], [~TEMPERATURE]"
        )
    return Arm(text, None, length or BASELINE_DRAFT_TOKENS.get(name), None, None, temperature, name)


def label(name: str, *, temperature: bool = True) -> str:
    """An arm's name in words. temperature: include the arm's own temperature, if it has one."""
    arm = parse_arm(name)
    parts = [_BASELINES.get(arm.baseline or "") or ("plain" if arm.drafter == PLAIN else str(arm.drafter))]
    if isinstance(arm.num_draft_tokens, str):
        kind = "policy" if ":" in arm.num_draft_tokens else "tree"
        parts.append("no trees" if arm.num_draft_tokens == "chain" else f"{kind} {arm.num_draft_tokens}")
    elif arm.num_draft_tokens is not None:
        parts.append(f"{arm.num_draft_tokens} token{'s' if arm.num_draft_tokens > 1 else ''}")
    if arm.acceptance is not None:
        parts.append(f"{arm.acceptance} rule")
    if arm.fast is False:
        parts.append("unpacked weights")
    if arm.predicted:
        parts.append("with predictions")
    if temperature and arm.temperature is not None:
        parts.append("greedy" if arm.temperature == 0 else f"temperature {arm.temperature:g}")
    return ", ".join(parts)
