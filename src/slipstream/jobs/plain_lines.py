"""Plain lines: {"id": ..., "prompt": ..., and any sampling options}; answers are one flat object each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.constraints.constraint import Constraint
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.jobs.job_lines import Line
from slipstream.jobs.line_kinds import JobOptions, check_model, seed_of
from slipstream.sampling.params import SamplingParams
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.requests import further_seeds
from slipstream.text.results import Result, result_of

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

OWN = ("id", "prompt", "chat", "model")


@dataclass
class PlainRequest:
    """A plain line. Rows are in the order of its n texts."""

    line: Line
    digest: str
    rows: list[Row]
    kind: PlainLines = field(repr=False)

    def answer(self) -> dict[str, Any]:
        """The first text with all that is known of it, the others as alternatives."""
        failed = next((row.error for row in self.rows if row.error is not None), None)
        if failed is not None:
            raise failed
        results = [result_of(row, self.kind.tokenizer, lossless=True) for row in self.rows]
        first, others = self._text(results[0]), [self._text(result) for result in results[1:]]
        return (
            {"id": self.line.id}
            | first
            | {"prompt_tokens": len(results[0].prompt_token_ids)}
            | ({"alternatives": others} if others else {})
            | {"fingerprint": self.kind.fingerprint, "request": self.digest}
        )

    def _text(self, result: Result) -> dict[str, Any]:
        found: dict[str, Any] = {"text": result.text, "finish_reason": result.finish_reason, "seed": result.seed}
        found["output_tokens"] = len(result.token_ids)
        if self.kind.options.token_ids:
            found["token_ids"] = result.token_ids
        if result.logprobs is not None:
            found["logprobs"] = [asdict(one) for one in result.logprobs]
        return found


class PlainLines:
    """Reads plain lines for one decoder."""

    def __init__(self, decoder: SpeculativeDecoder, options: JobOptions, fingerprint: str) -> None:
        self._decoder, self.options, self.fingerprint = decoder, options, fingerprint
        self.tokenizer: Tokenizer | None = copy.deepcopy(decoder.tokenizer)  # they cannot be shared by threads
        self._model_name = options.model_name or decoder.target.name

    def asked(self, line: Line, digest: str) -> PlainRequest:
        """The rows of a line; UsageError says what is not allowed."""
        item = line.item
        if "prompt" not in item:
            raise UsageError("no prompt; allowed: a text, token ids or a list of chat messages")
        check_model(item.get("model"), self._model_name)
        chat = item.get("chat", self.options.chat)
        if not isinstance(chat, bool):
            raise UsageError(f"chat={chat!r:.80}; allowed: true, false")
        params = self._params(item, str(line.id))
        assert params.seed is not None
        first = self._decoder.rows([item["prompt"]], replace(params, n=1), chat=chat)[0]
        rows = [first]
        for seed in further_seeds(params.seed, params.n):
            rows += self._decoder.rows([first.tokens], replace(params, n=1, seed=seed), chat=chat)
            rows[-1].messages = first.messages
        return PlainRequest(line, digest, rows, self)

    def _params(self, item: Mapping[str, Any], key: str) -> SamplingParams:
        given = {name: value for name, value in item.items() if name not in OWN}
        if "logits_processors" in given:
            raise UsageError("logits_processors are code, which is not read from files; allowed: other options")
        if isinstance(given.get("constraint"), dict):
            given["constraint"] = _constraint(given["constraint"])
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = {_token_id(name): bias for name, bias in given["logit_bias"].items()}
        params = replace(self.options.params, **given)  # names what is unknown or not allowed
        return params if params.seed is not None else replace(params, seed=seed_of(key))


def line_kind(decoder: SpeculativeDecoder, options: JobOptions, fingerprint: str) -> PlainLines:
    """Plain lines for a decoder."""
    return PlainLines(decoder, options, fingerprint)


def _constraint(given: dict[str, Any]) -> Constraint:
    try:
        return Constraint(**given)
    except TypeError:
        raise UsageError(
            f"constraint={given!r:.80}; allowed: one of json_schema, json_object, regex, choice, grammar"
        ) from None


def _token_id(name: object) -> int:
    """A key of logit_bias: text in JSON, a number in a dictionary."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 12:
        return int(name)
    raise UsageError(f"logit_bias: {name!r:.40}; allowed: token ids")
