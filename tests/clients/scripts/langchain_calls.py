"""Calls a server through langchain-openai: python langchain_calls.py URL MODEL BODIES; prints one line of JSON.

BODIES: JSON with `messages`, `form` (a JSON schema), `tools`, and `options` of the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def main(url: str, name: str, bodies: str) -> dict[str, Any]:
    inputs = json.loads(bodies)
    place: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": name, "max_retries": 0}
    model = ChatOpenAI(**place, **inputs["options"], stream_usage=True)
    messages = [HumanMessage(message["content"]) for message in inputs["messages"]]
    whole = model.invoke(messages)
    chunks = list(model.stream(messages))
    longer = ChatOpenAI(**place, **inputs["options"] | {"max_tokens": 200})
    bound = longer.bind_tools(inputs["tools"], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke(messages)
    tool_message = ToolMessage("four", tool_call_id=called.tool_calls[0]["id"])
    answers: dict[str, Any] = {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "reason": whole.response_metadata["finish_reason"],
        "stream": "".join(str(chunk.content) for chunk in chunks),
        "stream_usage": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
        "batch": [answer.content for answer in model.batch([messages, messages])],
        "async": asyncio.run(model.ainvoke(messages)).content,
        "form": longer.with_structured_output(inputs["form"], method="json_schema", strict=True).invoke(messages),
        "call": called.tool_calls,
        "after_call": model.invoke([*messages, called, tool_message]).content,
        "logprobs": len(model.bind(logprobs=True).invoke(messages).response_metadata["logprobs"]["content"]),
        "completion": OpenAI(**place, temperature=0, max_tokens=20).invoke("A heron"),
        "errors": {},
    }
    for field, value in {"top_p": 7, "max_completion_tokens": -1}.items():
        try:
            ChatOpenAI(**place | inputs["options"] | {field: value}).invoke(messages)
        except openai.APIStatusError as error:
            answers["errors"][field] = error.status_code
    return answers


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
