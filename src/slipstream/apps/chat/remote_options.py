"""Sampling options as fields of a request, named as OpenAI's API and vLLM name them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from slipstream.constraints.constraint import Constraint
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

ALWAYS = ("temperature", "max_tokens")  # the defaults of servers differ
LEFT_OUT = ("n", "logprobs", "logits_processors")  # a chat has one text, shows no probabilities and sends no code


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from their defaults; UsageError names what no request can say."""
    plain, found = SamplingParams(), dict[str, Any]()
    for one in fields(params):
        value = getattr(params, one.name)
        if one.name not in LEFT_OUT and (one.name in ALWAYS or value != getattr(plain, one.name)):
            found[one.name] = value
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"].items()}
    if "prediction" in found:
        found["prediction"] = _prediction(found["prediction"])
    if "constraint" in found:
        found |= _form(found.pop("constraint"))
    return found


def _prediction(given: object) -> dict[str, str]:
    if not isinstance(given, str):
        raise UsageError("--prediction of token ids with --url; allowed: a text")
    return {"type": "content", "content": given}


def _form(constraint: Constraint) -> dict[str, Any]:
    """`response_format` where OpenAI has a form for it, else vLLM's `structured_outputs`."""
    if constraint.whitespace != Constraint.whitespace:
        raise UsageError(
            f"--whitespace {constraint.whitespace!r} with --url, which no request can ask for; "
            f"allowed: {Constraint.whitespace!r}"
        )
    if constraint.schemas:
        raise UsageError("--grammar that names schemas with --url; allowed: a grammar that stands alone")
    if constraint.json_object:
        return {"response_format": {"type": "json_object"}}
    if (schema := constraint.json_schema) is not None:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": read}}}
    return {"structured_outputs": constraint.to_dict()}
