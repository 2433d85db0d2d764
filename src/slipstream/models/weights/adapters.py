"""Adapters of PEFT (LoRA, DoRA, ...): the base model they name is loaded, and they are merged into its weights.

The merged model is the target: its weights are rounded once to their precision, and everything that makes models faster
works for it. A `PeftModel` that is handed over as an object runs unmerged instead, as its owner has it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.weights.safetensors_files import file_of, located
from slipstream.models.weights.transformers_reader import READER_ERRORS

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MISSING = "Found missing adapter keys"  # how PEFT's warning begins


@dataclass(frozen=True)
class Adapter:
    """An adapter. place: its folder or hub id; base: the model that it changes, with its revision, "" for any."""

    source: str
    place: str
    base: str
    revision: str
    files: Mapping[str, Any]

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
                adapted = PeftModel.from_pretrained(model, self.place, **located(self.files))
                config = adapted.active_peft_config
                if config.is_prompt_learning:
                    raise UsageError(
                        f"model {self.source!r} puts virtual tokens before the prompt ({config.peft_type.value}); "
                        "allowed: adapters that change layers (LoRA, ...)"
                    )
                self._check(caught)
                return adapted.merge_and_unload(safe_merge=True)
        except SlipstreamError:
            raise
        except READER_ERRORS as error:
            raise SlipstreamError(
                f"adapter {self.source!r} does not fit its base model {self.base!r}: {one_line(error)}"
            ) from error

    def _resize(self, model: Any) -> None:
        """Make room for tokens that the adapter's tokenizer has beyond the base model's, as PEFT does."""
        if not self.has_tokenizer:
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.place, **self.files)
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer))

    def _check(self, caught: list[warnings.WarningMessage]) -> None:
        """Refuse adapters of which weights are missing: PEFT would use untrained ones."""
        for warning in caught:
            if (text := str(warning.message)).startswith(MISSING):
                raise SlipstreamError(f"adapter {self.source!r}: weights are missing: {' '.join(text.split()):.200}")

    @property
    def has_tokenizer(self) -> bool:
        """Whether it comes with a tokenizer of its own."""
        return file_of(self.place, "tokenizer_config.json", self.files) is not None


def adapter_at(source: str, place: str, files: Mapping[str, Any]) -> Adapter | None:
    """The adapter in a folder or repository; None for whole models. files: see `LoadOptions.files`.

    Raises `UsageError` for an adapter that names no base model, OSError where files cannot be fetched.
    """
    if file_of(place, CONFIG, files) is not None or (file := file_of(place, ADAPTER, files)) is None:
        return None
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"model {source!r} is an adapter whose {ADAPTER} has base_model_name_or_path={base!r}; allowed: the base "
            "model's hub id or folder"
        )
    return Adapter(source, place, base, str(settings.get("revision") or ""), files)
