"""A model's generation settings: default sampling options, and the tokens that end a text.

They come from generation_config.json, or from a GGUF file's `general.sampling` keys, which llama.cpp's converter copies
from there. Unsupported settings that would change the text are reported once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from slipstream.checks import expanded, is_number
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.models.notices import announce
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_metadata import shortest
from slipstream.models.weights.model_files import is_gguf
from slipstream.sampling.params import OWN_OPTIONS, SAMPLED, SamplingParams

log = logging.getLogger("slipstream")

GGUF = "general.sampling."
GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # options that have other names there
# settings without effect here: ids and lengths, which requests set, reports, caches, assisted generation
HARMLESS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("max_length", "max_new_tokens", "num_return_sequences", "renormalize_logits", "remove_invalid_values"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "trust_remote_code", "transformers_version"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("length_penalty", "early_stopping", "diversity_penalty"),  # only with beams, see `num_beams`
    *("xtc_threshold", "mirostat_tau", "mirostat_eta"),  # only with xtc_probability and mirostat
}
# values that turn the other settings off; so do None and empty values
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "typical_p"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "temperature", "top_p"), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_p", "xtc_probability", "mirostat"), (0,)),
    "token_healing": (False,),
    "top_k": (0, -1, 50),  # 50: the default that older versions of `generate` wrote into every file
    "penalty_last_n": (-1,),
}
INSTEAD = {  # the options that a request can set in their place
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_tokens"),
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}


@dataclass(frozen=True)
class ModelSettings:
    """The settings that a model brings."""

    model: str = ""  # its name
    options: Mapping[str, float] = field(default_factory=dict)  # fields of `SamplingParams`
    not_applied: Mapping[str, Any] = field(default_factory=dict)  # settings that would change texts

    @classmethod
    def of(cls, target: Loaded) -> ModelSettings:
        """The settings of a model's GGUF file or of its generation_config."""
        if is_gguf(target.source):
            metadata = read_header(expanded(target.source)).values
            settings = {key.removeprefix(GGUF): value for key, value in metadata.items() if key.startswith(GGUF)}
            values = {
                GGUF_NAMES.get(name, name): shortest(value) if isinstance(value, float) else value
                for name, value in settings.items()
            }
            # files have no do_sample; a temperature that they leave out is 1, as in `generate`
            return cls._read(target.name, {"do_sample": not values.keys().isdisjoint(SAMPLED)} | values)
        config = getattr(target.model, "generation_config", None)
        return cls() if config is None else cls._read(target.name, vars(config))

    @classmethod
    def _read(cls, model: str, settings: Mapping[str, Any]) -> ModelSettings:
        settings = {name: _as_list(value) for name, value in settings.items()}
        samples = settings.pop("do_sample", False) is True
        options: dict[str, float] = {"temperature": 1.0} if samples else {}
        not_applied = {}
        for name, value in settings.items():
            if value is None or value in ([], {}, "") or name in HARMLESS or name.startswith("_"):
                continue
            # `generate` reads options of sampling with do_sample alone
            if name in OWN_OPTIONS and (samples or name not in SAMPLED) and _is_allowed(name, value):
                options[name] = value
            elif value not in NEUTRAL.get(name, ()):
                not_applied[name] = value
        return cls(model, options, not_applied)

    def applied_to(self, params: SamplingParams) -> SamplingParams:
        """The options of a request, with the model's own for those that its caller left out.

        Logs one line the first time that this changes a request or leaves settings of the model unapplied.
        """
        if not self.options and not self.not_applied:
            return params
        unset = params.unset
        if not unset.keys().isdisjoint(OWN_OPTIONS):
            _name_once(self.line, bool(self.not_applied))
        missing: dict[str, Any] = {name: value for name, value in self.options.items() if name in unset}
        return replace(params, **missing)

    @property
    def line(self) -> str:
        """One line that describes the settings to users."""
        options = ", ".join(f"{name}={value:g}" for name, value in self.options.items())
        line = (
            f"model {self.model} brings {options}, which apply unless a request sets "
            "something else (--greedy turns them off)"
        )
        if not self.not_applied:
            return line
        names = ", ".join(f"{name}={value!r:.60}" for name, value in self.not_applied.items())
        instead = ", ".join(dict.fromkeys(INSTEAD[name] for name in self.not_applied if name in INSTEAD))
        begins = f"{line}; its other settings" if options else f"model {self.model}: its settings"
        return f"{begins} are not applied: {names}{instead and f' (requests can set {instead})'}"


def _is_allowed(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except UsageError:
        return False
    return True


@cache
def _name_once(line: str, is_warning: bool) -> None:
    if is_warning:
        log.warning("%s", line)
    else:
        announce(line)


def warn_without_ends(target: Loaded) -> None:
    """Warn of a model whose generation_config names no end token, though its config does."""
    settings = getattr(target.model, "generation_config", None)
    if settings is None or settings.eos_token_id is not None:
        return
    end = getattr(target.model.config.get_text_config(), "eos_token_id", None)
    if end is not None:
        ids = list(end) if isinstance(end, list | tuple) else [end]
        log.warning(
            "model %s: its generation_config names no end token, though its config does (eos_token_id=%r): outputs run "
            "to max_tokens, as with generate; SamplingParams(stop_token_ids=%r) ends them",
            target.name,
            end,
            ids,
        )


def end_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids `generate` would use."""
    settings = getattr(model, "generation_config", None) or model.config.get_text_config()
    return read_end_ids(type(model).__name__, getattr(settings, "eos_token_id", None), vocab_size)


def read_end_ids(name: str, ends: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids in a model's settings that its vocabulary has. ends: an id, several, or None.

    Raises `UsageError`, naming the model, for anything that is not a token id.
    """
    ends = _as_list(ends)
    if ends is None:
        return ()
    ids = [_as_list(i) for i in ends] if isinstance(ends, list | tuple) else [ends]
    if not all(is_number(i) and i == int(i) for i in ids):
        raise UsageError(f"model {name!r} has eos_token_id={ends!r:.60}; allowed: None, a token id or a list of them")
    return tuple(int(i) for i in ids if 0 <= i < vocab_size)


def _as_list(value: Any) -> Any:
    """Convert tensors and arrays, which `generate` accepts, to lists and numbers."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
