"""Coding agents do three tasks with a server whose model's answers are scripted.

The agents are the real programs, run headless with empty home folders and no network. Each answers a question; reads a
file, and changes it with its own tools; runs a command. What a tool returned is in the next scripted answer only if it
was in the prompt, so a result that was lost on the way fails the test.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.models.cache_folder import cache_folder
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models
from tests.support.chat_templates import REAL, TEMPLATES
from tests.support.client_runs import needs, node_program, program, run_agent, run_script
from tests.support.running_server import RunningServer, running_server
from tests.support.scripted_model import scripted_decoder

pytestmark = pytest.mark.slow

QUESTION = "Which river did the heron share with the sparrow?"
CHANGE = "In notes.txt, make the heron's color green."
COMMAND = "How many herons does the program count.py count?"
BOTH = "What is the heron's color in notes.txt, and how many herons does count.py count?"
NOTES = "bird: heron\ncolor: grey7\n"
PROGRAM = "print('herons:', 6 * 7)\n"


@dataclass(frozen=True)
class Form:
    """A chat template, and how a model writes with it."""

    template: str
    opening: str  # of an answer
    tool: str  # how a tool is listed, with a place for its name
    call: str  # with a place for its JSON
    thought: str = ""
    window: int = 1 << 18  # bytes, of which these agents send 6,000 to 90,000 at first


MARKS = "<tool_call>\n{}\n</tool_call>"
FORMS = {
    # Qwen3.5's traps: only one system message, and thoughts that come back
    "thoughts": Form(
        TEMPLATES["system first"], "<|assistant|>\n", "tool {}\n", MARKS, "<think>I should do that.</think>\n"
    ),
    "no tools": Form(TEMPLATES["no tools"], "<|assistant|>\n", '"name": "{}"', MARKS),
}
if "qwen0.5b" in REAL:  # this model often forgets the marks
    FORMS["qwen2.5-coder"] = Form(
        REAL["qwen0.5b"], "<|im_start|>assistant\n", '"name": "{}"', "```json\n{}\n```", window=32768
    )
ANSWERS = {
    QUESTION: "They shared the river Thaya.",
    CHANGE: "The heron is green now.",
    COMMAND: "It counts 42 herons.",
    BOTH: "The heron is grey7, and there are 42.",
}
CASES = [
    pytest.param(FORMS[form], task, id=f"{form} {kind}", marks=pytest.mark.models if form == "qwen2.5-coder" else ())
    for form, kind, task in (
        ("thoughts", "question", QUESTION),
        ("thoughts", "change", CHANGE),
        ("thoughts", "command", COMMAND),
        ("thoughts", "both", BOTH),
        ("no tools", "change", CHANGE),
        ("qwen2.5-coder", "command", COMMAND),
    )
    if form in FORMS
]


@dataclass(frozen=True)
class Agent:
    """A coding agent's command line, and how its tools are called."""

    read: Callable[[Path], tuple[str, Any]]  # a file
    edit: Callable[[Path, str, str], tuple[str, Any]]  # old and new text
    shell: Callable[[str], tuple[str, Any]]  # a command
    words: Callable[[str, Path, str], list[str]] = lambda url, home, task: []  # of a server, an empty home and a task
    last: str | None = None  # the tool that takes the answer, if calls are forced


def launched(client: str, *words: str) -> Callable[[str, Path, str], list[str]]:
    start = [sys.executable, "-m", "slipstream", "launch", client]
    return lambda url, home, task: [*start, "--url", url, "--", *(task if word == "TASK" else word for word in words)]


def cline_words(url: str, home: Path, task: str) -> list[str]:
    settings = {"provider": "openai-compatible", "apiKey": "none", "model": "tiny", "baseUrl": f"{url}/v1"}
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    file = home / "settings" / "providers.json"
    file.parent.mkdir()
    providers = {"openai-compatible": provider}
    file.write_text(json.dumps({"version": 1, "lastUsedProvider": "openai-compatible", "providers": providers}))
    return [str(node_program("cline", "cline")), "--data-dir", str(home), task]


def continue_words(url: str, home: Path, task: str) -> list[str]:
    model = {"name": "tiny", "provider": "openai", "model": "tiny", "apiBase": f"{url}/v1", "apiKey": "none"}
    config = home / "config.yaml"
    config.write_text(json.dumps({"name": "test", "version": "1.0.0", "schema": "v1", "models": [model]}))
    return [str(node_program("continue", "cn")), "-p", "--auto", "--config", str(config), task]


def aider_words(url: str, task: str, *words: str) -> list[str]:
    start = [str(program("aider", "aider")), "--model", "openai/tiny", "--openai-api-base", f"{url}/v1"]
    start += ["--openai-api-key", "none", "--no-git", "--analytics-disable"]
    start += ["--no-check-update", "--yes-always", "--no-show-model-warnings", "--no-pretty", "--no-detect-urls"]
    return [*start, "--message", task, *words]


AGENTS = {
    "claude": Agent(
        lambda path: ("Read", {"file_path": str(path)}),
        lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        lambda command: ("Bash", {"command": command, "description": "Runs it"}),
        launched("claude", "-p", "TASK", "--allowedTools", "Read,Edit,Bash"),
    ),
    "codex": Agent(
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        lambda path, old, new: ("exec_command", {"cmd": f"sed -i 's/{old}/{new}/' {path}"}),
        lambda command: ("exec_command", {"cmd": command}),
        launched("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "TASK"),
    ),
    "opencode": Agent(
        lambda path: ("read", {"filePath": str(path)}),
        lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
        lambda command: ("bash", {"command": command, "description": "Runs it"}),
        launched("opencode", "run", "--auto", "TASK"),
    ),
    "cline": Agent(
        lambda path: ("read_files", {"files": [{"path": str(path)}]}),
        lambda path, old, new: ("editor", {"path": str(path), "old_text": old, "new_text": new}),
        lambda command: ("run_commands", {"commands": [command]}),
        cline_words,
    ),
    "continue": Agent(
        lambda path: ("Read", {"filepath": str(path)}),
        lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        lambda command: ("Bash", {"command": command}),
        continue_words,
    ),
}


def found(pattern: str, prompt: str) -> str:
    """The last match in a prompt, which a tool's result has put there."""
    matches = re.findall(pattern, prompt)
    return matches[-1] if matches else "nothing"


@dataclass
class Playbook:
    """The script of a task. Requests without tools, such as for a title, get a text of their own."""

    form: Form
    agent: Agent
    folder: Path
    turns: dict[str, list[int]] = field(default_factory=lambda: {task: [] for task in ANSWERS})  # that were asked for

    def __call__(self, prompt: str) -> str:
        task = next((task for task in ANSWERS if task in prompt), None)
        if task is None or self.form.tool.format(self.agent.shell("")[0]) not in prompt:
            return "Herons"
        conversation = prompt[prompt.find(task) :]
        turn, steps = conversation.count(self.form.opening) - 1, self.steps(task, conversation)
        self.turns[task].append(turn)
        return self.form.thought + (steps[turn] if turn < len(steps) else "There is nothing left to do.")

    def steps(self, task: str, conversation: str = "") -> list[str]:
        """The answers, turn by turn; conversation: from the task on."""
        path, color = self.folder / "notes.txt", found(r"color: (\w+)", conversation)
        read, count = self.agent.read(path), self.agent.shell(f"{sys.executable} {self.folder / 'count.py'}")
        calls = {
            QUESTION: [],
            CHANGE: [[read], [self.agent.edit(path, color, "green")]],
            COMMAND: [[count]],
            BOTH: [[read, count]],
        }[task]
        number = found(r"herons: ([0-9]+)", conversation)
        answer = ANSWERS[task].replace("42", number).replace("grey7", color)
        if self.agent.last is not None:
            calls.append([(self.agent.last, {"answer": answer})])
        texts = ["\n".join(map(self.written, turn)) for turn in calls]
        return texts if self.agent.last else [*texts, answer]

    def written(self, call: tuple[str, Any]) -> str:
        return self.form.call.format(json.dumps({"name": call[0], "arguments": call[1]}))


@cache
def tokenizer(template: str) -> HFTokenizer:
    """The tokenizer of a template: the model's own, or one token per byte."""
    if template == REAL.get("qwen0.5b"):
        return HFTokenizer(AutoTokenizer.from_pretrained(cache_folder() / "qwen0.5b"))
    return HFTokenizer(tiny_models.byte_tokenizer(template))


@contextmanager
def playing(playbook: Playbook) -> Iterator[RunningServer]:
    """A server of a scripted model, and the files of the tasks; in the end every turn has been asked for, once."""
    (playbook.folder / "notes.txt").write_text(NOTES)
    (playbook.folder / "count.py").write_text(PROGRAM)
    form = playbook.form
    decoder = scripted_decoder(tokenizer(form.template), form.opening, playbook, form.window)
    with running_server(lambda: decoder, served_model_name="tiny", max_model_len=form.window) as server:
        yield server
    for task, turns in playbook.turns.items():
        assert turns in ([], list(range(len(playbook.steps(task))))), task
    changed = NOTES.replace("grey7", "green") if playbook.turns[CHANGE] else NOTES
    assert (playbook.folder / "notes.txt").read_text() == changed


@pytest.mark.parametrize(("form", "task"), CASES)
@pytest.mark.parametrize("agent", [pytest.param(a, id=name, marks=needs(name)) for name, a in AGENTS.items()])
def test_agents_do_their_tasks(agent: Agent, form: Form, task: str, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    with playing(Playbook(form, agent, folder)) as server:
        printed = run_agent(agent.words(server.url, home, task), home, folder)
    assert ANSWERS[task] in printed


@needs("claude")
def test_claude_code_calls_a_tool_that_it_has_searched_for(tmp_path: Path) -> None:
    """The search's result describes the tool, and the beginning of the prompt stays."""
    home, folder, form = tmp_path / "home", tmp_path / "work", FORMS["thoughts"]
    home.mkdir()
    folder.mkdir()
    notebook = folder / "notes.ipynb"
    cell = {"cell_type": "code", "id": "a", "source": NOTES, "metadata": {}, "outputs": [], "execution_count": None}
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    prompts: list[str] = []

    def script(prompt: str) -> str:
        if CHANGE not in prompt:
            return "Herons"
        edit = {"notebook_path": str(notebook), "cell_id": "a", "new_source": "green"}
        calls = [
            ("ToolSearch", {"query": "select:NotebookEdit"}),
            AGENTS["claude"].read(notebook),
            (found(r'<function>{"name": "(\w+)"', prompt), edit),
        ]
        written = [form.call.format(json.dumps({"name": name, "arguments": value})) for name, value in calls]
        prompts.append(prompt)
        return form.thought + [*written, ANSWERS[CHANGE]][len(prompts) - 1]

    decoder = scripted_decoder(tokenizer(form.template), form.opening, script, form.window)
    with running_server(lambda: decoder, served_model_name="tiny", max_model_len=form.window) as server:
        words = launched("claude", "-p", "TASK", "--allowedTools", "ToolSearch,Read,NotebookEdit")
        printed = run_agent(words(server.url, home, CHANGE), home, folder)
    assert ANSWERS[CHANGE] in printed and json.loads(notebook.read_text())["cells"][0]["source"] == "green"
    assert len(prompts) == 4 and all(later.startswith(prompt) for prompt, later in pairwise(prompts))


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ("claude", "codex")])
def test_a_conversation_that_fills_the_window_is_summarized(name: str, tmp_path: Path) -> None:
    """`slipstream launch` tells these agents the window. The model reads a file again and again."""
    home, folder, form, summary = tmp_path / "home", tmp_path / "work", FORMS["thoughts"], "Herons were counted."
    home.mkdir()
    folder.mkdir()
    (folder / "notes.txt").write_text(NOTES * 400)
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        if summary in prompt:
            return form.thought + ANSWERS[QUESTION]
        if re.search("detailed summary|handoff summary", prompt[-6000:]):
            return f"<summary>{summary}</summary>"
        if QUESTION not in prompt:
            return "Herons"
        tool, arguments = AGENTS[name].read(folder / "notes.txt")
        return form.thought + form.call.format(json.dumps({"name": tool, "arguments": arguments}))

    window = 64_000
    decoder = scripted_decoder(tokenizer(form.template), form.opening, script, window)
    with running_server(lambda: decoder, served_model_name="tiny", max_model_len=window) as server:
        printed = run_agent(AGENTS[name].words(server.url, home, QUESTION), home, folder)
    assert ANSWERS[QUESTION] in printed
    assert len(prompts) > 3 and len(prompts[-1]) < len(prompts[-2])


LIBRARIES = {
    "openai": "agent_sdks",
    "openai-agents responses": "agent_sdks",
    "openai-agents stream": "agent_sdks",
    "openai-agents chat": "agent_sdks",
    "pydantic-ai chat": "agent_sdks",
    "pydantic-ai responses": "agent_sdks",
    "pydantic-ai messages": "agent_sdks",
    "smolagents": "agent_sdks",
    "langchain openai": "langchain",
    "langchain anthropic": "langchain",
    "langchain ollama": "langchain",
    "anthropic": "sdks",
    "ollama": "sdks",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(where)) for name, where in LIBRARIES.items()])
@pytest.mark.parametrize("form", ["thoughts", "no tools"])
def test_loops_of_libraries_do_their_tasks(name: str, form: str, tmp_path: Path) -> None:
    tools = Agent(
        read=lambda path: ("read_file", {"path": str(path)}),
        edit=lambda path, old, new: ("edit_file", {"path": str(path), "old": old, "new": new}),
        shell=lambda command: ("run_command", {"command": command}),
        last="final_answer" if name == "smolagents" else None,
    )
    tasks = [QUESTION, COMMAND, BOTH, CHANGE]
    with playing(Playbook(FORMS[form], tools, tmp_path)) as server:
        answers = run_script(LIBRARIES[name], "agent_loops.py", name, server.url, "tiny", *tasks)
    assert answers == [ANSWERS[task] for task in tasks]


@needs("aider")
def test_aider_edits_a_file_and_reads_what_its_test_command_prints(tmp_path: Path) -> None:
    """Aider calls no tools: it reads edits from the answer's text, and runs a command that its user has named."""
    (tmp_path / "home").mkdir()
    notes, program_file = tmp_path / "notes.txt", tmp_path / "count.py"
    notes.write_text(NOTES)
    program_file.write_text(f"{PROGRAM}raise SystemExit(1)\n")
    form = FORMS["thoughts"]
    counts: list[str] = []  # of the requests, what the command has printed by then

    def script(prompt: str) -> str:
        if CHANGE not in prompt:  # the model is being measured
            return ""
        counts.append(found(r"herons: ([0-9]+)", prompt))
        color = found(r"color: (\w+)", prompt)
        edit = f"notes.txt\n```\n<<<<<<< SEARCH\ncolor: {color}\n=======\ncolor: green\n>>>>>>> REPLACE\n```\n"
        return form.thought + (edit if counts == ["nothing"] else ANSWERS[COMMAND].replace("42", counts[-1]))

    decoder = scripted_decoder(tokenizer(form.template), form.opening, script, form.window)
    with running_server(lambda: decoder, served_model_name="tiny", max_model_len=form.window) as server:
        command = f"{sys.executable} {program_file}"
        words = aider_words(
            server.url, CHANGE, "--edit-format", "diff", "--auto-test", "--test-cmd", command, str(notes)
        )
        printed = run_agent(words, tmp_path / "home", tmp_path)
    assert notes.read_text() == NOTES.replace("grey7", "green")
    assert counts == ["nothing", "42"] and ANSWERS[COMMAND] in printed
