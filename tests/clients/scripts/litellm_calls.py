"""Calls a server through litellm: python litellm_calls.py URL MODEL BODIES. Prints the responses as one line of JSON.

BODIES: JSON with `asked` (fields of a chat), `prompt`, `form` (a response format), `tools`, and `predicted` (a text).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def main(url: str, model: str, bodies: str) -> dict[str, Any]:
    inputs = json.loads(bodies)
    asked: dict[str, Any] = inputs["asked"]
    common: dict[str, Any] = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "none"}

    def chat(**more: Any) -> Any:
        return litellm.completion(**common | asked | more)

    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    scored = chat(logprobs=True, top_logprobs=2)
    call = chat(tools=inputs["tools"], tool_choice="required", parallel_tool_calls=False, max_tokens=200).choices[0]
    predicted = chat(prediction={"type": "content", "content": inputs["predicted"]})
    completed = litellm.text_completion(**common, prompt=inputs["prompt"], max_tokens=20, temperature=0)
    answers: dict[str, Any] = {
        "whole": whole.choices[0].message.content,
        "reason": whole.choices[0].finish_reason,
        "usage": whole.usage.completion_tokens,
        "stream": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "stream_usage": [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)][-1],
        "async": asyncio.run(litellm.acompletion(**common, **asked)).choices[0].message.content,
        "logprobs": [entry.logprob for entry in scored.choices[0].logprobs.content],
        "form": chat(response_format=inputs["form"], max_tokens=200).choices[0].message.content,
        "call": [entry.function.model_dump() for entry in call.message.tool_calls],
        "call_reason": call.finish_reason,
        "predicted": predicted.choices[0].message.content,
        "accepted": predicted.usage.completion_tokens_details.accepted_prediction_tokens,
        "completion": completed.choices[0].text,
        "errors": {},
    }
    wrong: dict[str, dict[str, Any]] = {
        "bad field": {"top_logprobs": 21},
        "too long": {"messages": [{"role": "user", "content": "heron " * 100_000}]},
    }
    for name, fields in wrong.items():
        try:
            litellm.completion(**common | asked | fields, num_retries=0)
        except Exception as error:
            answers["errors"][name] = type(error).__name__
    return answers


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
