"""A model ready for use, and how models are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.core.interfaces import Backend
from slipstream.errors import UsageError
from slipstream.text.pictures import Vision
from slipstream.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slipstream.models.draft_vocabulary import RestrictedHead
    from slipstream.models.hf.model_view import ModelView


PLAN = "tp_plan"  # the load option of tensor parallelism, see `slipstream.models.hf.tensor_parallel`
MTP = "mtp"  # names a target's own multi-token-prediction layers as the draft model
# load options for how files are fetched and whether their code may run; they also apply to the draft model's files
FETCHING = ("cache_dir", "force_download", "local_files_only", "proxies", "token", "trust_remote_code")
READS_TEXT = "it reads text only"
# load options that select a repository's files
WHICH_FILES = ("code_revision", "revision", "subfolder")


@dataclass(frozen=True)
class Loaded:
    """A model ready for use."""

    backend: Backend
    name: str  # includes `source` and `rounding`
    end_ids: tuple[int, ...]  # end-of-sequence tokens
    tokenizer: Tokenizer | None = None
    model: Any = None  # the framework's own object, if any
    packed: bool = False
    fingerprint: str = ""  # architecture, sizes and precision: everything that decides a forward's cost and bits
    restricted: RestrictedHead | None = None  # the output layer, if it can score a part of the vocabulary
    arithmetic: str = ""  # of the kernels, where they do not compute in the model's dtype
    source: str = ""  # what the model was loaded from
    rounding: str = "none"  # see `LoadOptions.rounding`
    view: ModelView | None = None  # for a caller's model: its modules run, and `model` stays as its owner made it
    vision: Vision | str = READS_TEXT  # reads images; a string is the reason why the model takes none

    @property
    def plain_model(self) -> Any:
        """The framework's own object with ordinary weights; None if that is not in memory."""
        return None if self.packed and self.view is None else self.model

    @property
    def precision(self) -> str:
        """The arithmetic, for a decoder's `repr`."""
        return f", arithmetic={self.arithmetic!r}" if self.arithmetic else ""


@dataclass(frozen=True)
class LoadOptions:
    """How to load models.

    fast: True packs CPU weights and on CUDA captures graphs, or refuses with the reason why it cannot; "auto" packs the
    weights of models that Slipstream loads itself, and captures graphs; False does neither. quantize: "int4"
    and "int8" quantize a draft model's weights or refuse; "auto" uses int4 where that is faster and `fast` allows it.
    """

    dtype: str = "auto"
    device: str = "auto"
    fast: bool | str = "auto"
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of `from_pretrained`, such as revision
    quantize: str | None = None
    vocabulary: int | str = "full"  # `DecoderConfig.draft_vocabulary`; targets always score all of it
    activations: str = "auto"  # `DecoderConfig.activations`
    rounding: str = "none"  # `DecoderConfig.quantize`: what a target's weights are quantized to

    @property
    def files(self) -> dict[str, Any]:
        """Arguments for whatever reads a file of the model: configuration, tokenizer, weights.

        Code from a repository runs only if the caller has allowed it; there is no interactive question.
        """
        chosen = {name: value for name, value in self.extra.items() if name in (*FETCHING, *WHICH_FILES)}
        return {"trust_remote_code": False} | chosen

    @property
    def precision(self) -> str:
        """The draft precision that the user chose, as one label."""
        return f"{self.draft_type or self.quantize or 'auto'}{' plain' if self.fast is False else ''}"

    @property
    def for_reader(self) -> list[str]:
        """Names of the load options that only transformers' own reader of weights understands."""
        return [name for name in self.extra if name not in (*FETCHING, *WHICH_FILES)]

    def for_draft(self, dtype: str, vocabulary: int | str = "full") -> LoadOptions:
        """The options of the draft model: its own precision and vocabulary, with the target's options for fetching."""
        extra = {name: value for name, value in self.extra.items() if name in FETCHING}
        options = replace(self, vocabulary=vocabulary, activations="auto", rounding="none", extra=extra)
        return options.with_draft_dtype(dtype)

    def with_draft_dtype(self, dtype: str) -> LoadOptions:
        """These options with weights in the precision `DecoderConfig.draft_dtype`."""
        return replace(self, quantize=dtype) if dtype in ("auto", "int4", "int8") else replace(self, dtype=dtype)

    @property
    def draft_type(self) -> str | None:
        """The floating-point type that the user chose for the draft's weights; None if there is no such choice."""
        return self.dtype if self.quantize is None and self.dtype != "auto" else None


def is_toy(source: Any) -> bool:
    """True if this names the built-in toy model."""
    return isinstance(source, str) and (source == "toy" or source.startswith("toy:"))


def is_loaded(model: Any) -> bool:
    """True if this is a model object, not the name of one."""
    return not isinstance(model, str | os.PathLike)


def _refuse_options_of_targets(options: LoadOptions, target: Any) -> None:
    """Refuse load options that draft models do not take, for when only a draft model will be loaded."""
    for name in options.extra:
        if name not in FETCHING:
            why = "the toy model has no files" if is_toy(target) else "the target is loaded already"
            raise UsageError(
                f"load_options {name!r}, but {why}; allowed: {', '.join(FETCHING)}, which the draft model gets too"
            )


def refuse_unused(options: LoadOptions, target: Any, draft: Any) -> None:
    """Refuse load options that would have no effect, because the models are loaded already."""
    named = [model for model in (target, draft) if model is not None]
    if any(not is_loaded(model) and not is_toy(model) for model in named):
        if is_loaded(target) or is_toy(target):
            _refuse_options_of_targets(options, target)
        return
    toys = all(is_toy(model) for model in named)
    why = "the toy model has no weights and runs on the CPU" if toys else "the models are loaded already"
    checks: list[tuple[str, Any, list[Any]]] = [
        ("dtype", options.dtype, ["auto"]),
        ("device", options.device, ["auto", "cpu"] if toys else ["auto"]),
        ("load_options", options.extra, [{}]),
        ("activations", options.activations, ["auto"]),
        ("quantize", options.rounding, ["none"]),
    ]
    for name, value, allowed in checks:
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise UsageError(f"{name}={value!r}, but {why}; allowed: {choices}")
