"""A folder's header in words: what was run, with which settings, on which machine; and what each arm is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from slipstream import drafters
from slipstream.bench.arms import (
    ASSISTED,
    HF,
    LLAMA,
    LLAMA_LOOKUP,
    LOOKUP,
    TUNED,
    counted,
    label,
    local_time,
    parse_arm,
)
from slipstream.bench.records import Header
from slipstream.config import DecoderConfig
from slipstream.sampling.params import SamplingParams

Rows = list[tuple[str, str]]
BASELINES = {
    HF: "Hugging Face's own generate, the same model and precision, without drafts",
    ASSISTED: "Hugging Face's assisted generation with the draft model, at its defaults",
    TUNED: "Hugging Face's assisted generation with the draft model, a fixed number of draft tokens",
    LOOKUP: "Hugging Face's prompt lookup",
    LLAMA: "llama.cpp on the same file, without drafts",
    LLAMA_LOOKUP: "llama.cpp on the same file, with prompt lookup",
}
NAMES = {
    "threads": "threads of PyTorch",
    "memory_gib": "memory (GiB)",
    "gpu": "GPU",
    "slipstream": "Slipstream",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "python": "Python",
}


def settings_table(header: Header) -> Rows:
    """What was run; options of the decoder and of sampling only where they are not the defaults."""
    settings = header.settings
    params: Mapping[str, Any] = settings.get("params", {})
    families = Counter(str(prompt).rpartition("/")[0] for prompt in settings.get("prompts", {}))
    rows: Rows = [("target", words(settings.get("target"))), ("draft model", words(settings.get("draft")))]
    rows.append(("arms", "; ".join(label(name) for name in settings.get("arms", []))))
    rows.append(("speed-ups refer to", label(settings["reference"]) if "reference" in settings else "plain"))
    rows.append(("batch sizes", words(settings.get("batch_sizes"))))
    rows.append(("repeats", words(settings.get("repeats"))))
    rows.append(("prompts", "; ".join(f"{name} {count}" for name, count in families.items()) or "none recorded"))
    rows.append(("chat template", "used" if settings.get("chat", True) else "not used (--raw)"))
    rows.append(("sampling", _sampling(params)))
    rows.append(("longest answer", counted(int(params.get("max_tokens") or 0), "token")))
    shown = {"target", "draft", "arms", "reference", "batch_sizes", "repeats", "prompts", "chat", "config", "params"}
    rows += [(_spaced(name), words(value)) for name, value in settings.items() if name not in shown]
    rows += _changed(settings.get("config", {}), DecoderConfig, set())
    rows += _changed(params, SamplingParams, {"temperature", "seed", "max_tokens"})
    return [*rows, ("begun", local_time(header.started))]


def machine_table(header: Header) -> Rows:
    """What it was measured on: the machine, and the versions of Slipstream and the libraries it uses."""
    both = header.machine | header.versions
    return [(NAMES.get(name, _spaced(name)), words(value)) for name, value in both.items()]


def arms_table(header: Header) -> Rows:
    """Each arm that was run, in one sentence."""
    return [(label(name), describe(name)) for name in header.settings.get("arms", [])]


def describe(name: str) -> str:
    """What an arm is."""
    arm = parse_arm(name)
    if arm.baseline is not None:
        text = BASELINES[arm.baseline]
    elif arm.drafter in (None, "auto"):
        text = "the drafter and the draft length are chosen from measured costs and acceptance, round by round"
    else:
        text = drafters.summary(str(arm.drafter))
    parts = [text]
    if isinstance(arm.num_draft_tokens, int):
        parts.append(f"{counted(arm.num_draft_tokens, 'token')} per draft")
    elif arm.num_draft_tokens is not None:
        parts.append("no trees" if arm.num_draft_tokens == "chain" else f"draft length {arm.num_draft_tokens}")
    if arm.acceptance is not None:
        parts.append(f"acceptance rule {arm.acceptance}")
    if arm.fast is False:
        parts.append("weights as loaded, not packed")
    if arm.predicted:
        parts.append("with the prompts' predictions")
    return "; ".join(parts)


def words(value: Any) -> str:
    """A recorded value as a person writes it."""
    if value is None or value in ("", [], {}, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{_spaced(str(name))} {words(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sampling(params: Mapping[str, Any]) -> str:
    temperature = params.get("temperature", 0)
    return "greedy" if temperature == 0 else f"temperature {words(temperature)}, seed {words(params.get('seed'))}"


def _changed(values: Mapping[str, Any], cls: type[Any], shown: set[str]) -> Rows:
    """The fields that differ from the defaults of their dataclass; fields it does not know are always told."""
    defaults = {f.name: {} if f.default is MISSING else f.default for f in fields(cls)}  # only mappings have a factory
    return [
        (_spaced(name), words(value))
        for name, value in values.items()
        if name not in shown and (name not in defaults or words(value) != words(defaults[name]))
    ]


def _spaced(name: str) -> str:
    return name.replace("_", " ")
