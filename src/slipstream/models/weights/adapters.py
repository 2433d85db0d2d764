"""Adapters of PEFT (LoRA, DoRA, ...): loads the base model that they name, and merges them into its weights.

The merged model is the target: its weights are rounded once to their precision, and all optimizations work for it. A
`PeftModel` that the caller passes as an object runs unmerged instead.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.weights.model_files import refuse_pointers
from slipstream.models.weights.safetensors_files import file_of, located
from slipstream.models.weights.transformers_reader import reader_errors

CONFIG, ADAPTER = "config.json", "adapter_config.json"
# beginnings of PEFT's warnings that do not affect weights
HARMLESS = (
    "Model has `tie_word_embeddings=True`",  # layers get separate weights before the adapter is merged
    "Model with `tie_word_embeddings=True`",
    "Input and output embeddings are no longer tied",
    "Unsupported layer type",  # PEFT does not know its sizes; the adapter's weights are still checked against it
    "Unexpected keyword arguments",  # unknown settings are refused by name, if they are set
)


@dataclass(frozen=True)
class Adapter:
    """An adapter. place: its folder or hub id; base: the model that it changes, with its revision ("" for any)."""

    source: str
    place: str
    base: str
    revision: str
    files: Mapping[str, Any]
    settings: Mapping[str, Any]  # of its adapter_config.json

    def merged_into(self, model: Any) -> Any:
        """The base model with this adapter in its weights. Raises `SlipstreamError` for adapters that do not fit."""
        try:
            from peft import PeftModel
        except ImportError as error:
            raise SlipstreamError(
                f"model {self.source!r} is an adapter, which needs {error.name or 'peft'}; run: pip install peft"
            ) from error
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._resize(model)
                place = located(self.files)
                adapted = PeftModel.from_pretrained(model, self.place, **place)
                config = adapted.active_peft_config
                if config.is_prompt_learning:
                    raise UsageError(
                        f"model {self.source!r} puts virtual tokens before the prompt ({config.peft_type.value}); "
                        "allowed: adapters that change layers (LoRA, ...)"
                    )
                names = getattr(model, "_checkpoint_conversion_mapping", {})  # as `from_pretrained` passes it
                report = adapted.load_adapter(self.place, adapted.active_adapter, key_mapping=names, **place)
                self._check(config, report.unexpected_keys)
                _separate_weights(adapted)
                merged = adapted.merge_and_unload(safe_merge=True)
            self._check_warnings(caught)
            for name, module in merged.named_modules():
                if type(module).__module__.startswith("peft."):
                    raise SlipstreamError(
                        f"adapter {self.source!r}: PEFT cannot merge it, {name} stays a {type(module).__name__}; "
                        "allowed: the PeftModel as an object, which runs unmerged"
                    )
            return merged
        except SlipstreamError:
            raise
        except reader_errors() as error:
            place = Path(self.place) / self.files.get("subfolder", "")
            refuse_pointers(place)
            if place.is_dir() and not any(place.glob("adapter_model.*")):
                raise SlipstreamError(
                    f"adapter {self.source!r} has no weights; allowed: a folder with adapter_model.safetensors"
                ) from error
            raise SlipstreamError(
                f"adapter {self.source!r} does not fit its base model {self.base!r}: {one_line(error)}"
            ) from error

    def _resize(self, model: Any) -> None:
        """Make room for additional tokens in the adapter's tokenizer, as PEFT does."""
        if not self.has_tokenizer:
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.place, **self.files)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))

    def _check(self, config: Any, unused: list[str]) -> None:
        """Refuse settings and weights of the adapter that PEFT leaves out."""
        for name, value in self.settings.items():
            if value and not hasattr(config, name):
                raise SlipstreamError(
                    f"adapter {self.source!r}: {ADAPTER} has {name}={value!r:.80}, which the installed version of PEFT "
                    "does not know; allowed: settings that it has, so a newer one may help: pip install -U peft"
                )
        # PEFT stores whole layers of a larger vocabulary twice
        if unused := [name for name in unused if ".modules_to_save." not in name]:
            raise SlipstreamError(
                f"adapter {self.source!r}: {len(unused)} weights of the file are not used, first {min(unused)}; "
                f"allowed: weights of the layers that {ADAPTER} names"
            )

    def _check_warnings(self, caught: list[warnings.WarningMessage]) -> None:
        """Refuse an adapter that makes PEFT warn, for example of missing weights: it would use untrained ones."""
        for warning in caught:
            text = one_line(Exception(str(warning.message)))
            is_technical = issubclass(warning.category, DeprecationWarning | FutureWarning | PendingDeprecationWarning)
            if "peft" in Path(warning.filename).parts and not is_technical and not text.startswith(HARMLESS):
                raise SlipstreamError(
                    f"adapter {self.source!r} may give other weights than its owner's; PEFT warns: {text:.200}; "
                    "allowed: adapters without this warning, or the PeftModel as an object, which runs unmerged"
                )

    @property
    def has_tokenizer(self) -> bool:
        """True if it comes with a tokenizer of its own."""
        return file_of(self.place, "tokenizer_config.json", self.files) is not None


def adapter_at(
    source: str, place: str, files: Mapping[str, Any], adapters: frozenset[Path] = frozenset()
) -> Adapter | None:
    """The adapter in a folder or repository; None for whole models. files: see `LoadOptions.files`.

    adapters: folders of the adapters whose base model this is. Raises `UsageError` for an adapter that names no base
    model or leads back to itself, `SlipstreamError` for damaged settings, OSError where files cannot be fetched.
    """
    if file_of(place, CONFIG, files) is not None or (file := file_of(place, ADAPTER, files)) is None:
        return None
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SlipstreamError(f"adapter {source!r}: {file} is damaged: {one_line(error)}; allowed: JSON") from error
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"model {source!r} is an adapter whose {ADAPTER} has base_model_name_or_path={base!r}; allowed: the base "
            "model's hub id or folder"
        )
    if (folder := Path(place).resolve()) in adapters:
        raise UsageError(
            f"adapter {source!r}: base_model_name_or_path={base!r} leads back to the adapter itself; allowed: the base "
            "model's hub id or folder"
        )
    if expanded(base).is_dir():
        adapter_at(base, str(expanded(base)), {}, adapters | {folder})
    return Adapter(source, place, base, str(settings.get("revision") or ""), files, settings)


def _separate_weights(adapted: Any) -> None:
    """Give layers that an adapter changes their own copies of weights that they share with other layers.

    Merging into shared weights, such as tied embeddings, would change all layers that share them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    holders = Counter(id(weight) for module in adapted.modules() for weight in module._parameters.values())
    for module in adapted.modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        for name, weight in list(layer.named_parameters(recurse=False)) if layer is not None else ():
            if holders[id(weight)] > 1:
                setattr(layer, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
