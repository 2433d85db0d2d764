"""Calls a server through Anthropic's and Ollama's own clients, and prints what came back as JSON.

Arguments: the address, the model, a question, a schema of a tool's arguments.
"""

from __future__ import annotations

import json
import sys

import anthropic
import ollama

url, model, question, schema = *sys.argv[1:4], json.loads(sys.argv[4])
asked = {"model": model, "messages": [{"role": "user", "content": question}]}
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
options = {**asked, "max_tokens": 30, "extra_body": {"temperature": 0}}
whole = client.messages.create(**options)
with client.messages.stream(**options) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
tool = {"name": "measure", "description": "what it does", "input_schema": schema}
choice = {"type": "tool", "name": "measure", "disable_parallel_tool_use": True}
forced = {**asked, "max_tokens": 300, "tools": [tool], "tool_choice": choice}
with client.messages.stream(**forced) as stream:
    (used,) = stream.get_final_message().content
result = {"type": "tool_result", "tool_use_id": used.id, "content": "seven"}
turns = [*asked["messages"], {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
later = client.messages.create(**options | {"messages": turns, "tools": [tool]})
count = client.messages.count_tokens(**asked, tools=[tool], system="Be brief.").input_tokens
try:
    client.messages.create(**options | {"messages": [{"role": "user", "content": "x" * 5000}]})
    error = ""
except anthropic.BadRequestError as refusal:
    error = refusal.message

local = ollama.Client(url)
plain = {"temperature": 0, "num_predict": 30}
chat = local.chat(**asked, options=plain)
chunks = [chunk.message.content or "" for chunk in local.chat(**asked, options=plain, stream=True)]
generated = local.generate(model=model, prompt=question, options=plain).response
function = {"type": "function", "function": {"name": "measure", "parameters": schema}}
offered = local.chat(**asked, tools=[function], options=plain, think=True)
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "stream": streamed,
            "final": [final.content[0].text, final.stop_reason, final.usage.output_tokens],
            "call": [used.name, used.input],
            "later": later.role,
            "count": count,
            "error": error,
            "chat": chat.message.content,
            "chunks": "".join(chunks),
            "generated": generated,
            "offered": offered.done_reason,
            "models": [item.model for item in local.list().models],
            "capabilities": local.show(model).capabilities,
            "loaded": [item.context_length for item in local.ps().models],
        }
    )
)
