"""The advice in files: as JSON, as `--config`, and as settings of vLLM, SGLang and llama.cpp (docs/tune.md has the
sources).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.bench.arms import PLAIN
from slipstream.bench.tuning.advice import Advice, CandidateResult, needs_draft
from slipstream.bench.tuning.search import Candidate
from slipstream.config import DecoderConfig
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.drafters import hybrid, ngram, suffix
from slipstream.drafters.model.model_drafter import MIN_DRAFT_PROB
from slipstream.errors import UsageError, os_reason
from slipstream.models.heads.head_files import trained_kind
from slipstream.models.heads.head_kinds import ASSISTANT, DFLASH, DFLASH2, DSPARK, EAGLE1, EAGLE3, PARD, PEAGLE
from slipstream.models.loaded import MTP
from slipstream.models.weights.hub_files import local_file
from slipstream.models.weights.model_files import is_gguf

# a draft model's name in each engine, by how it was trained: vLLM's method, SGLang's algorithm, llama.cpp's type
ENGINE_NAMES: dict[str | None, tuple[str, str, str]] = {
    None: ("draft_model", "STANDALONE", "draft-simple"),
    ASSISTANT: ("mtp", "FROZEN_KV_MTP", "draft-mtp"),
    PARD: ("draft_model", "STANDALONE", "draft-simple"),
    **dict.fromkeys((DFLASH, DFLASH2), ("dflash", "DFLASH", "draft-dflash")),
    DSPARK: ("dspark", "DSPARK", "draft-dspark"),
    EAGLE1: ("eagle", "EAGLE", ""),
    EAGLE3: ("eagle3", "EAGLE3", "draft-eagle3"),
    PEAGLE: ("eagle3", "", ""),
    MTP: ("mtp", "", ""),
}
NOTHING = "do not speculate: no setting measured gains anything here"


@dataclass(frozen=True)
class Settings:
    """How to set one engine as advised."""

    engine: str
    flags: tuple[str, ...] = ()  # of its command line
    notes: tuple[str, ...] = ()  # differences from Slipstream
    value: dict[str, Any] | None = None  # vLLM's object

    @property
    def text(self) -> str:
        """Notes as comment lines, then the flags on one line, quoted for a shell."""
        lines = [f"# {note}" for note in self.notes]
        return "\n".join([*lines, *([shlex.join(self.flags)] if self.flags else [])]) + "\n"


def engine_settings(candidate: Candidate | None, *, stops_early: bool = False) -> list[Settings]:
    """The settings of a candidate for vLLM, SGLang and llama.cpp; candidate None means do not speculate.

    stops_early: the draft model ends a draft once it is unsure, as with length "auto" on CPU.
    """
    if candidate is None:
        return [Settings(engine, notes=(NOTHING,)) for engine in ("vllm", "sglang", "llamacpp")]
    return [_vllm(candidate, stops_early), _sglang(candidate, stops_early), _llamacpp(candidate, stops_early)]


def _vllm(candidate: Candidate, stops_early: bool) -> Settings:
    value: dict[str, Any] = {"num_speculative_tokens": candidate.tokens}
    notes: list[str] = []
    if candidate.kind == "ngram":
        value = {"method": "ngram", **value, "prompt_lookup_min": ngram.SHORTEST, "prompt_lookup_max": ngram.LONGEST}
    elif candidate.kind == "suffix":
        bounds = {
            "suffix_decoding_max_spec_factor": float(candidate.tokens),
            "suffix_decoding_min_token_prob": suffix.suffix_drafter.THRESHOLD,
        }
        value = {"method": "suffix", **value, **bounds}
    else:
        kind = _trained_kind(candidate)
        value = {"method": ENGINE_NAMES[kind][0]}
        value |= {} if candidate.draft == MTP else {"model": candidate.draft}  # MTP layers are the target's own
        value |= {"num_speculative_tokens": candidate.tokens}
        value |= {"parallel_drafting": True} if kind in (PARD, PEAGLE) else {}
        notes = _model_notes(candidate, stops_early, "vLLM")
    return Settings("vllm", ("--speculative-config", json.dumps(value)), tuple(notes), value)


def _sglang(candidate: Candidate, stops_early: bool) -> Settings:
    if candidate.kind in ("model", "hybrid"):
        steps, kind = candidate.tokens, _trained_kind(candidate)
        if not ENGINE_NAMES[kind][1]:
            return Settings("sglang", notes=(f"SGLang runs no draft heads of the kind of {candidate.draft}",))
        flags = ["--speculative-algorithm", ENGINE_NAMES[kind][1]]
        flags += ["--speculative-draft-model-path", str(candidate.draft)]
        if kind not in (DFLASH, DFLASH2, DSPARK):  # which draft a block in one step
            flags += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(steps + 1)]
        notes = [*_model_notes(candidate, stops_early, "SGLang"), *_token_by_token(kind, "SGLang")]
        return Settings("sglang", tuple(flags), tuple(notes))
    matching = {"ngram": "BFS", "suffix": "PROB"}[candidate.kind]  # the most recent match, or the most frequent
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(candidate.tokens + 1)]
    flags += ["--speculative-ngram-max-bfs-breadth", "1", "--speculative-ngram-match-type", matching]
    notes = [f"{candidate.kind} has no exact counterpart: NGRAM as a chain is the nearest, and needs CUDA"]
    return Settings("sglang", tuple(flags), tuple(notes))


def _llamacpp(candidate: Candidate, stops_early: bool) -> Settings:
    types, flags, notes = [], list[str](), list[str]()
    if candidate.kind != "model":
        types.append("ngram-simple")
        size = ngram.SHORTEST
        flags += ["--spec-ngram-simple-size-n", str(size), "--spec-ngram-simple-size-m", str(candidate.tokens)]
        notes.append(
            f"{candidate.kind} has no exact counterpart: ngram-simple (matches of exactly {size} tokens) is the nearest"
        )
    kind = _trained_kind(candidate)
    if candidate.kind in ("model", "hybrid") and not (name := ENGINE_NAMES[kind][2]):
        notes.append(f"llama.cpp runs no draft heads of the kind of {candidate.draft}")
    elif candidate.kind in ("model", "hybrid"):
        types.append(name)
        notes += _token_by_token(kind, "llama.cpp")
        min_probability = f"{MIN_DRAFT_PROB:g}" if stops_early else "0"
        draft = local_file(str(candidate.draft))
        flags += ["--spec-draft-model", draft, "--spec-draft-n-max", str(candidate.tokens)]
        flags += ["--spec-draft-n-min", "0", "--spec-draft-p-min", min_probability]
        if stops_early:
            notes.append("p-min bounds the probability of each token, here drafts end where another step would not pay")
        if not is_gguf(draft):
            notes.append(f"llama.cpp reads GGUF files: put that of {candidate.draft} in its place")
    return Settings("llamacpp", ("--spec-type", ",".join(types), *flags) if types else (), tuple(notes))


def _trained_kind(candidate: Candidate) -> str | None:
    if candidate.draft is None or candidate.draft == MTP:
        return candidate.draft
    return trained_kind(candidate.draft)


def _token_by_token(kind: str | None, engine: str) -> list[str]:
    return [f"{engine} drafts token by token with a model of PARD, which drafts at once here"] if kind == PARD else []


def _model_notes(candidate: Candidate, stops_early: bool, engine: str) -> list[str]:
    notes = []
    if candidate.kind == "hybrid":
        notes.append(
            f"hybrid has no counterpart: {engine} speculates in one way at a time, the draft model is the nearest"
        )
    if stops_early:
        notes.append(
            f"measured with drafts that end where another token would not pay; in {engine} all have one length"
        )
    return notes


def config_of(candidate: Candidate | None, config: DecoderConfig) -> DecoderConfig:
    """The decoder's settings for a candidate; None is plain decoding."""
    if candidate is None:
        return replace(config, drafter=PLAIN, num_draft_tokens="auto")
    return replace(config, drafter=candidate.drafter, num_draft_tokens=candidate.length or "auto")


def with_fixed_length(
    candidate: Candidate, others: Sequence[CandidateResult], longest: int
) -> tuple[Candidate, tuple[str, ...]]:
    """The candidate with one draft length, as other engines need it, and notes on where the length comes from.

    A candidate that chooses its lengths gets the fastest length among those of its drafter that stayed in the race
    longest, else the usual one, up to `longest`. others: the other candidates' results.
    """
    if candidate.length is not None:
        return candidate, ()
    drafter = "model" if needs_draft(candidate) else candidate.kind
    speeds = {
        result.candidate.length: (result.units, result.measured.value)
        for result in others
        if (result.candidate.drafter, result.candidate.draft) == (drafter, candidate.draft)
        and result.candidate.length is not None
        and result.measured is not None
        and not result.failed
    }
    chooses = f"{candidate.setting} chooses its draft lengths here"
    if not speeds:
        length = min(hybrid.STEPS if candidate.kind == "hybrid" else candidate.tokens, longest)
        return replace(candidate, length=length), (f"{chooses}; no fixed length was measured, {length} is a guess",)
    length = max(speeds, key=lambda n: speeds[n])
    speed_up = speeds[length][1]
    note = f"{chooses}; {length} is the fastest fixed length measured ({drafter}@{length}: {speed_up:.2f}x)"
    return replace(candidate, length=length), (note,)


def files_for(
    candidate: Candidate | None,
    config: DecoderConfig,
    *,
    stops_early: bool,
    others: Sequence[CandidateResult] = (),
    longest: int = MAX_DRAFT_TOKENS,
) -> dict[str, str]:
    """File names and contents. vLLM's object is null if the advice is not to speculate.

    others, longest: see `with_fixed_length`.
    """
    fixed, notes = (None, ()) if candidate is None else with_fixed_length(candidate, others, longest)
    settings = {
        settings_of.engine: replace(settings_of, notes=(*notes, *settings_of.notes))
        for settings_of in engine_settings(fixed, stops_early=stops_early)
    }
    texts = {f"{engine}.txt": settings_of.text for engine, settings_of in settings.items()}
    value: Settings = settings["vllm"]
    return {
        "slipstream.json": config_of(candidate, config).to_json() + "\n",
        "vllm.json": json.dumps(value.value, indent=2) + "\n",
        **texts,
    }


def write_files(
    folder: Path, advice: Sequence[tuple[Advice, bool]], config: DecoderConfig, longest: int, result: dict[str, Any]
) -> list[Path]:
    """Write tune.json and the settings; returns their paths.

    advice: for each batch size, the advice and whether its draft model stops early. longest: the longest draft
    considered. Files of the first batch size have plain names; those of others have its number in their names, and are
    written only if they differ.
    """
    texts = {"tune.json": json.dumps(result, indent=2) + "\n"}
    first = dict[str, str]()
    for of_batch, stops_early in advice:
        best, others = None if of_batch.best is None else of_batch.best.candidate, of_batch.others
        batch_texts = files_for(best, config, stops_early=stops_early, others=others, longest=longest)
        first = first or batch_texts
        if batch_texts is first:
            texts |= batch_texts
        elif batch_texts != first:
            texts |= {name.replace(".", f"-batch{of_batch.batch}."): text for name, text in batch_texts.items()}
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be written: {os_reason(error)}") from error
    return [folder / name for name in texts]
