"""Requests in which a coding agent rewrites a file: their speed with drafts and without, by turns.

    python benchmarks/agent_edits.py --target qwen1.5b.gguf --draft qwen0.5b.gguf --json FILE

Each conversation is an agent's: its rules and tools, a task, a call that reads a file of this package, and its content
with numbered lines, as Claude Code's and opencode's tools give it. The model is forced to call the tool that writes a
file. Each text is generated greedily, in turns with drafts and without; the prompt is read before the clock starts.
Speeds are the server's own. Exit code 1 if drafts change a text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import httpx
from server_soak import end_on_signals, slipstream_serve
from terminal import in_one_line, positive, save

from slipstream.errors import SlipstreamError

SOURCES = Path(__file__).parents[1] / "src" / "slipstream"
TASKS = (
    ("errors.py", "Rename the function `one_line` to `single_line` everywhere in errors.py."),
    ("durable_files.py", "Add the return annotation `-> None` wherever it is missing in durable_files.py."),
    ("models/notices.py", "In models/notices.py, rename `announce` to `tell_user`, at its calls as well."),
    (
        "core/user_objects.py",
        "Add a comment line `# reviewed` at the top of core/user_objects.py, below the docstring.",
    ),
)
RULES = "You are a coding agent. Work only with the tools. Change what the task asks for, and nothing else."
PATH = {"type": "string", "description": "path of the file, relative to the project"}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    """A function that the model may call."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("read", "Read a file. Every line comes with its number.", path=PATH),
    tool("write", "Write a file anew.", path=PATH, content={"type": "string", "description": "its whole content"}),
]


def request(path: str, task: str) -> dict[str, Any]:
    """The turn in which the agent writes the file that it has read."""
    lines = (SOURCES / path).read_text(encoding="utf-8").splitlines()
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
    call = {"name": "read", "arguments": json.dumps({"path": path})}
    messages = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": task},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": numbered},
    ]
    chosen = {"type": "function", "function": {"name": "write"}}
    return {"messages": messages, "tools": TOOLS, "tool_choice": chosen, "temperature": 0}


def answer(client: httpx.Client, body: dict[str, Any]) -> tuple[str, float, float]:
    """What the model wrote, its tokens per second after the first, and its tokens per forward."""
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise SlipstreamError(f"the server refused a request: {response.text}")
    report = response.json()
    message, times = report["choices"][0]["message"], report["timings"]
    written = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    steps = report["metrics"]["speculative_decoding"]["num_spec_steps"]
    text = "".join([message["content"] or "", *written])  # a call that was cut off is content
    return text, times["predicted_per_second"] or 0.0, times["predicted_n"] / steps


def main() -> int:
    """Print a line per task and the mean; exit with 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", metavar="MODEL")
    parser.add_argument("--draft", metavar="MODEL")
    parser.add_argument("--turns", type=positive, default=2, metavar="N", help="of each arm and task [2]")
    parser.add_argument("--max-tokens", type=positive, default=1024, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    arguments = ["--model", options.target, "--served-model-name", "local", "--max-model-len", "8192"]
    arguments += ["--draft", options.draft] if options.draft else []
    rows, num_different = [], 0
    with slipstream_serve(arguments) as url, httpx.Client(base_url=url, timeout=None) as client:
        for path, task in TASKS:
            body = request(path, task) | {"model": "local", "max_tokens": options.max_tokens}
            answer(client, body | {"max_tokens": 1})  # reads the prompt
            arms: dict[str, list[tuple[str, float, float]]] = {"plain": [], "auto": []}
            for turn in range(options.turns):
                for arm in list(arms)[:: -1 if turn % 2 else 1]:
                    arms[arm].append(answer(client, body | ({"num_draft_tokens": 0} if arm == "plain" else {})))
            texts = {text for answers in arms.values() for text, _, _ in answers}
            num_different += len(texts) > 1
            speeds = {arm: median(speed for _, speed, _ in answers) for arm, answers in arms.items()}
            row = {"file": path, "characters": len(arms["auto"][0][0]), **speeds}
            row |= {"ratio": speeds["auto"] / speeds["plain"], "tokens_per_forward": arms["auto"][0][2]}
            row["same_text"] = len(texts) == 1
            rows.append(row)
            print(
                f"{path}: {row['characters']:,} characters, plain {row['plain']:.1f} tok/s, auto {row['auto']:.1f} "
                f"({row['ratio']:.2f} times), {row['tokens_per_forward']:.1f} tokens per forward, "
                f"texts {'identical' if row['same_text'] else 'DIFFERENT'}",
                flush=True,
            )
    mean = geometric_mean([row["ratio"] for row in rows])
    print(f"auto is {mean:.2f} times as fast as plain decoding; {num_different} of {len(rows)} texts differ")
    save(options.json, {"target": options.target, "draft": options.draft, "rows": rows})
    return int(num_different > 0)


if __name__ == "__main__":
    end_on_signals()
    in_one_line(main)
