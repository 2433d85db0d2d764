"""The decoder's settings in one dataclass: the home of every default, and where JSON and flags come from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from slipstream.checks import changed_repr, check_choice, check_known, check_whole, explained_fields, read_json
from slipstream.draft_length.choice import LengthChoice
from slipstream.drafters import usage
from slipstream.errors import UsageError, setting

DTYPES = ("auto", "bfloat16", "float16", "float32")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
ACTIVATIONS = ("auto", "int8", "int15")
MAX_BATCH_SIZE = 4096
SHORTEST_CONTEXT = 128  # the smallest `draft_context`
QUANTIZE = ("none", "int4", "int8")
DRAFT_DTYPES = ("auto", "int4", "int8", *DTYPES[1:])


@explained_fields
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """All settings of a decoder besides its models."""

    drafter: str = setting(
        "auto",
        "auto (with a draft model hybrid, or model if num_draft_tokens fixes lengths; else suffix) | "
        + " | ".join(usage())
        + " | MODULE:NAME (your own)",
    )
    num_draft_tokens: int | str = setting(
        "auto",
        "tokens drafted per round: auto (as many as pay) | chain (the same without branches) | a number | "
        "heuristic[:MOST] | confidence:CHANCE | DEPTHxWIDTH (a tree) | MODULE:NAME (your own policy)",
    )
    acceptance: str = setting(
        "auto", "auto | block | rejection | match (lossless), topk:K | typical (lossy) | MODULE:RULE (your own)"
    )
    dtype: str = setting("auto", "auto | bfloat16 | float16 | float32")
    draft_dtype: str = setting(
        "auto", "the draft model's: auto (int4 on CPU) | int4 | int8 | bfloat16 | float16 | float32"
    )
    activations: str = setting(
        "auto",
        "precision of activations, if a quantized target is computed in its own blocks: auto (int8) | int8 | int15 "
        "(the file's own results, up to rounding)",
    )
    quantize: str = setting(
        "none", "quantize the target's weights at load, on CPU, which makes it another model: none | int4 | int8"
    )
    draft_vocabulary: int | str = setting(
        "auto",
        "tokens the draft model chooses from: auto (frequent ones and the prompt's, where that is faster) | full | "
        "a number (of frequent ones)",
    )
    draft_context: int | str = setting(
        "auto",
        "tokens of a prompt that the draft model reads, at its beginning and end: auto (what its context holds) | "
        "full | a number (from 128)",
    )
    device: str = setting("auto", "auto | cpu | cuda | cuda:N")
    fast: bool | str = setting(
        "auto",
        "auto | true | false: packed weights on CPU, kernels and graphs on CUDA; true refuses where there are none",
    )
    reproducible: bool | str = setting("auto", "auto | true | false: forwards keep to a fixed set of shapes")
    max_batch_size: int = setting(8, "rows decoded together")
    load_options: dict[str, Any] = setting({}, "further from_pretrained arguments of the target, as JSON")

    def __repr__(self) -> str:
        return changed_repr(self)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if callable(getattr(value, "tolist", None)):  # numbers of numpy and PyTorch
                object.__setattr__(self, name, value.tolist())
        LengthChoice.parse(self.num_draft_tokens)
        for name in ("drafter", "acceptance", "device"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name}={getattr(self, name)!r}; allowed: a name (string)")
        for name in ("dtype", "draft_dtype"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, SHORT_DTYPES.get(value, value))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("draft_dtype", self.draft_dtype, DRAFT_DTYPES)
        check_choice("activations", self.activations, ACTIVATIONS)
        check_choice("quantize", self.quantize, QUANTIZE)
        for name in ("fast", "reproducible"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or value == "auto"):
                raise UsageError(f"{name}={value!r}; allowed: 'auto', True, False")
        check_whole("draft_vocabulary", self.draft_vocabulary, 1, words=("auto", "full"))
        check_whole("draft_context", self.draft_context, SHORTEST_CONTEXT, words=("auto", "full"))
        check_whole("max_batch_size", self.max_batch_size, 1, MAX_BATCH_SIZE)
        if not isinstance(self.load_options, dict):
            raise UsageError(f"load_options={self.load_options!r}; allowed: a mapping of from_pretrained arguments")

    def contradiction(self) -> str | None:
        """A message about a setting that another one makes useless; None if there is none."""
        if self.drafter == "none" and self.num_draft_tokens not in ("auto", 0):
            return (
                f"num_draft_tokens={self.num_draft_tokens!r} with drafter='none', which drafts nothing; "
                "allowed: 'auto' or 0, or another drafter"
            )
        return None

    def to_json(self) -> str:
        """The settings as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, path: Path, defaults: DecoderConfig | None = None) -> DecoderConfig:
        """Settings from a JSON file; unknown keys are errors. defaults: for keys left out; None for the class's."""
        values = read_json("config file", path)
        allowed = [f.name for f in fields(cls)]
        if not isinstance(values, dict):
            raise UsageError(f"config file {str(path)!r} is not an object; allowed: {', '.join(allowed)}")
        check_known(f"config file {str(path)!r} has the unknown key", values, allowed)
        return replace(defaults or cls(), **values)


SERVED = DecoderConfig(acceptance="match")  # for servers and jobs, whose texts must not depend on what was drafted
