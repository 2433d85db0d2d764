"""One choice of an answer as it grows, and reports that all forms of answers share: usage, timings, rounds, receipt."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.apps.server.error_objects import ApiError, as_api_error, refused
from slipstream.apps.server.live_request import Committed, Ended, Event, Job, Scored, Started
from slipstream.core.rounds import MODEL, PREDICTION, RETRIEVAL, FinishReason, Round, TokenLogprobs
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.sampling.processors import params_of
from slipstream.text.results import Stats
from slipstream.tokenization.byte_vocabulary import ReadableAsBytes
from slipstream.tokenization.tokenizer import Tokenizer
from slipstream.wiring.model_pair import fingerprint_of


class Piece(NamedTuple):
    """The addition of an event to a choice."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    round: Round | None = None  # None for the echo of a prompt and for an end without tokens
    finish_reason: FinishReason | None = None


@dataclass
class ChoiceState:
    """One text of an answer, as the events of its job build it."""

    job: Job
    lossless: bool
    rounds: list[Round] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    cached: int = 0  # prompt tokens that were not read again
    started: float | None = None  # time at which the row left the queue, on the clock of `monotonic`
    first: float | None = None  # time of its first tokens
    last: float | None = None  # time of its latest tokens
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    thought_tokens: int | None = None  # of those so far; None if the answer is not separated

    def __post_init__(self) -> None:
        self._stats = Stats(lossless=self.lossless)

    @property
    def prompt(self) -> list[int]:
        return self.job.row.tokens[: self.job.row.prompt_length]

    @property
    def token_ids(self) -> list[int]:
        return [token for round in self.rounds for token in round.tokens]

    @property
    def stats(self) -> Stats:
        """Statistics of the rounds so far. They are computed only when asked for, as streams rarely need them."""
        for round in self.rounds[self._stats.num_rounds :]:
            self._stats.add_step([round])
        return self._stats

    def take(self, event: Event) -> Piece | None:
        """Note an event; returns what it added to the answer. ApiError if the row failed."""
        if isinstance(event, Committed):
            round, self.last = event.round, event.time
            self.first = self.first or event.time
            self.rounds.append(round)
            if round.finish_reason == "error":
                return None  # the end of the job brings the error
            self.text += event.text
            self.finish_reason = round.finish_reason
            return Piece(self.job.choice, event.text, round.tokens, round.logprobs, round, round.finish_reason)
        if isinstance(event, Started):
            self.cached, self.started = event.cached, event.time
        elif isinstance(event, Scored):
            self.prompt_logprobs = event.logprobs
        elif isinstance(event, Ended) and self.finish_reason is None:
            if event.reason in ("error", "cancelled"):
                raise _failure(event, self.job.limits)
            self.finish_reason = event.reason
            return Piece(self.job.choice, "", finish_reason=event.reason)
        return None


def _failure(event: Ended, limits: str | None) -> ApiError:
    if event.reason == "cancelled":
        return ApiError(503, "the request was cancelled")
    if isinstance(event.error, SlipstreamError):
        return refused(first_line(event.error), limits)
    return as_api_error(event.error or RuntimeError("a row failed without a reason"))


@dataclass(frozen=True)
class ModelFacts:
    """The facts about the model that answers report; they do not change while a server runs."""

    name: str
    fingerprint: str
    reproducible: bool  # a seed gives the same text under any load
    source: Callable[[Round], str]  # names the drafter of a round
    lossless: bool  # all texts have the target's distribution
    tokenizer: Tokenizer | None  # a copy for the event loop alone
    family: str = "unknown"  # transformers' name of the architecture
    format: str = "safetensors"  # of its files
    sees_images: bool = False

    @classmethod
    def of(cls, decoder: SpeculativeDecoder, name: str) -> ModelFacts:
        """The facts of a decoder that is served as `name`; "" means the target's own name without its folders."""
        name = name or public_name(decoder.target.name)
        if not name.isprintable():  # JSON cannot hold the bytes of a path that are not UTF-8
            raise UsageError(
                f"the model's name is {name!r:.80}; allowed: printable characters, see --served-model-name"
            )
        return cls(
            name,
            fingerprint_of(decoder.target, decoder.shapes),
            decoder.reproducible and decoder.coupled,
            partial(source_of, decoder.drafter_name, decoder.traits.needs_cost_model),
            decoder.lossless,
            copy.deepcopy(decoder.tokenizer),
            str(getattr(getattr(decoder.target.model, "config", None), "model_type", "") or "unknown"),
            "gguf" if decoder.target.source.endswith(".gguf") else "safetensors",
            not isinstance(decoder.target.vision, str),
        )

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token, perhaps a part of a character; None if it has no text or is not known."""
        if not isinstance(self.tokenizer, ReadableAsBytes):
            return None
        try:
            return self.tokenizer.bytes_of(token)
        except UsageError:  # some tokenizers do not know the bytes of a token
            return None

    def added_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text; none if they are not known."""
        data = self.token_bytes(token)
        if data is None and self.tokenizer is not None:
            data = self.tokenizer.decode([token]).encode()
        return data or b""

    def token_text(self, token: int) -> str:
        """One token as text; a token without text is named by its id."""
        return self.added_bytes(token).decode(errors="replace") or f"token_id:{token}"


def public_name(name: str) -> str:
    """The name of a draft model or drafter as clients see it: only the last part of a local path; hub ids in full."""
    before, store, path = name.encode("utf-8", "replace").decode().rpartition("store=")
    is_path = store or path[:1] in ("~", ".") or Path(path).is_absolute()
    return f"{before}{store}{Path(path).name if is_path else path}"


def source_of(drafter: str, is_mixed: bool, round: Round) -> str:
    """The name of the drafter of a round. is_mixed: the decoder's drafter takes turns with a draft model."""
    if is_mixed:
        return MODEL if round.origin.source == MODEL else RETRIEVAL
    return drafter.partition(":")[0]


@dataclass(frozen=True)
class Share:
    """The tokens that one source drafted in a round, and how many of them were accepted."""

    source: str
    drafted: int
    accepted: int


def shares(round: Round, facts: ModelFacts) -> list[Share]:
    """Each source's share of a round: the request's prediction, and the drafter. Forced tokens have no source."""
    unforced = round.without_forced
    predicted, accepted = unforced.num_prediction_tokens or 0, unforced.num_accepted_tokens
    parts = [Share(PREDICTION, predicted, min(predicted, accepted))] if predicted else []
    if drafted := unforced.num_draft_tokens - predicted:
        parts.append(Share(facts.source(unforced), drafted, max(0, accepted - predicted)))
    return parts


def usage(choices: Sequence[ChoiceState], n: int) -> dict[str, Any]:
    """OpenAI's token counts so far; every chunk may have them. A prompt with `n` answers counts once."""
    details: dict[str, int] = {}
    if any(choice.thought_tokens is not None for choice in choices):
        details["reasoning_tokens"] = sum(choice.thought_tokens or 0 for choice in choices)
    if any(choice.job.row.prediction for choice in choices):
        details |= {
            "accepted_prediction_tokens": sum(choice.stats.accepted_prediction_tokens or 0 for choice in choices),
            "rejected_prediction_tokens": sum(choice.stats.rejected_prediction_tokens or 0 for choice in choices),
        }
    prompt = sum(choice.job.row.prompt_length for choice in choices[::n])
    completion = sum(choice.stats.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in choices[::n])},
    } | ({"completion_tokens_details": details} if details else {})


def speculative_decoding(rounds: Sequence[Round], *, is_detailed: bool) -> dict[str, Any]:
    """Acceptance of an answer in the form that AIPerf reads, where a round is a step.

    The histogram counts rounds by accepted draft tokens. Tokens that a constraint forced are left out, as everywhere.
    is_detailed: with the counts of every round.
    """
    unforced = [round.without_forced for round in rounds]
    accepted = [round.num_accepted_tokens for round in unforced]
    histogram = [accepted.count(n) for n in range(max(accepted, default=0) + 1)]
    stats = Stats.of(rounds)
    steps = {"per_step_accepted": accepted, "per_step_drafted": [round.num_draft_tokens for round in unforced]}
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(rounds) if rounds else 0.0,
        "draft_acceptance_rate": stats.acceptance_rate or 0.0,
        "acceptance_histogram": histogram if rounds else [],
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_steps": len(rounds),
        "estimated_speed_up": stats.estimated_speed_up,
    } | (steps if is_detailed else {})


def timings(choice: ChoiceState) -> dict[str, Any]:
    """llama.cpp's report on a text, in milliseconds."""
    started, last = choice.started or 0.0, choice.last or choice.started or 0.0
    first, count = choice.first or last, len(choice.token_ids)
    stats = choice.stats
    return {
        "prompt_n": len(choice.prompt) - choice.cached,
        "prompt_ms": 1000 * (first - started),
        "predicted_n": count,
        "predicted_ms": 1000 * (last - first),
        "predicted_per_second": (count - 1) / (last - first) if last > first else None,
        "draft_n": stats.num_draft_tokens,
        "draft_n_accepted": stats.num_accepted_tokens,
    }


def shown_round(piece: Piece, index: int, facts: ModelFacts) -> dict[str, Any]:
    """A round as the page shows it: every token with its origin, and what the round cost.

    The source of an accepted token is "prediction" or a drafter; the source of the round is its drafter.
    """
    round = piece.round
    assert round is not None
    unforced, drafters = round.without_forced, shares(round, facts)
    seconds = asdict(round.seconds)
    total = seconds.pop("total")
    accepted = iter([share.source for share in drafters for _ in range(share.accepted)])
    tokens = [
        {
            "id": token,
            "text": facts.token_text(token),
            "origin": origin,
            "source": next(accepted) if origin == "accepted" else None,
        }
        for token, origin in zip(round.tokens, round.origins, strict=True)
    ]
    return {
        "tokens": tokens,
        "round": {
            "index": index,
            "drafted": unforced.num_draft_tokens,
            "accepted": unforced.num_accepted_tokens,
            "forced": round.origins.count("forced"),
            "predicted": unforced.num_prediction_tokens or 0,
            "rejected": [facts.token_text(token) for token in unforced.unaccepted] if unforced.rejected else [],
            "source": facts.source(unforced) if unforced.draft else None,
            "seconds": seconds | {"overhead": max(0.0, total - sum(seconds.values()))},
        },
    }


def receipt(choice: ChoiceState, facts: ModelFacts) -> dict[str, Any]:
    """All that is needed to repeat a text, and what it cost. Leaves out the prediction, which changes no text."""
    row = choice.job.row
    params = {name: value for name, value in params_of(row).to_dict().items() if name not in ("n", "prediction")}
    ids = json.dumps(choice.prompt, separators=(",", ":"))
    return {
        "fingerprint": facts.fingerprint,
        "model": facts.name,
        "seed": row.seed,
        "params": params | {"seed": row.seed},
        "prompt_token_ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
        "token_ids": choice.token_ids,
        "rounds": len(choice.rounds),
        "stats": choice.stats.to_dict(),
        "reproducible": facts.reproducible and not params_of(row).logits_processors,
    }
