"""The conversation at a real terminal: typed, completed, interrupted and left."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.apps.chat.slash_commands import COMMANDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux, which plays the terminal, is not installed"),
]
START, ANSWER = 300.0, 300.0  # seconds: upper limits, not delays


class Terminal:
    """A chat in a tmux session of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._socket, self.history = f"slipstream-{os.getpid()}-{folder.name}", folder / "history"
        program = [sys.executable, "-c", "from slipstream.apps.cli import main; main()"]
        chat = [*program, "chat", "--target", "toy", "--history", str(self.history), *flags]
        start = ("new-session", "-d", "-x", "130", "-y", "40", "-c", str(folder))
        where = ("-e", f"SLIPSTREAM_MODELS={folder}", "-e", "HF_HUB_OFFLINE=1", "-e", "COLUMNS=130")
        self._tmux("-f", os.devnull, *start, *where, f"{shlex.join(chat)}; echo ended with $?; exec sleep 600")

    def _tmux(self, *arguments: str) -> str:
        process = subprocess.run(["tmux", "-L", self._socket, *arguments], capture_output=True, text=True, check=True)
        return process.stdout

    @property
    def screen(self) -> str:
        """The text on the screen and above it, without empty lines at the end."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-1000").rstrip("\n")

    def wait_for(self, *parts: str, limit: float = ANSWER) -> str:
        """The screen as soon as it shows all the parts."""
        end = time.monotonic() + limit
        while not all(part in (screen := self.screen) for part in parts):
            assert time.monotonic() < end, f"no {parts} after {limit} s:\n{screen}"
            time.sleep(0.05)
        return screen

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def type(self, line: str) -> None:
        """Type a line on an emptied screen."""
        self.press("C-l")
        end = time.monotonic() + ANSWER
        while self._tmux("capture-pane", "-p").strip() != ">":
            assert time.monotonic() < end, f"no empty prompt:\n{self.screen}"
            time.sleep(0.05)
        self._tmux("clear-history")
        self._tmux("send-keys", "-l", line)
        self.press("Enter")

    def wait_for_end(self) -> int:
        """The exit code."""
        return int(self.wait_for("ended with ").rpartition("ended with ")[2])

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, "--max-tokens", "24")
    try:
        made.wait_for("/help lists the commands", "\n>", limit=START)
        yield made
    finally:
        made.close()


COMMAND_LINES = [
    ("/help", "/quit"),
    ("/draft toy:2", "drafter: hybrid"),
    ("/drafter ngram", "drafter: ngram"),
    ("/draft-length 3", "draft length: 3"),
    ("/acceptance match", "acceptance: match"),
    ("/length 30", "max_tokens: 30"),
    ("/seed 7", "seed: 7"),
    ("/temperature 0.5", "temperature: 0.5"),
    ("/top-p none", "top_p: 1.0"),
    ("/sampling nucleus 0.7 0.9", "temperature=0.7, top_k=0, top_p=0.9"),
    ("/set repetition_penalty 1.1", "repetition_penalty: 1.1"),
    ("/system A fable.", "system: A fable."),
    ("/debug on", "debug: on"),
    ("/retry", "accepted/drafted"),
    ("/debug off", "debug: off"),
    ("/compare", "text identical"),
    ("/speculative off", "speculative: off, drafter: none"),
    ("/cache", "cache: on; "),
    ("/stats", "2 turns, 0 interrupted"),
    ("/thought", "the last answer has no thought"),
    ("/target toy:4", "target: toy:4"),
    ("/save talk.json", "4 messages written to talk.json"),
    ("/load talk.json", "4 messages of talk.json"),
    ("/file talk.json", "with the next message: talk.json"),
    ("/file none", "with the next message: no file"),
    ("/reset", "the conversation is empty"),
    ("/draft-lenght 3", "did you mean /draft-length"),
]


def test_every_slash_command_works_in_one_conversation_from_start_to_quit(terminal: Terminal, tmp_path: Path) -> None:
    assert {line.split()[0] for line, _ in COMMAND_LINES} | {"/quit"} >= set(COMMANDS)
    terminal.type("The heron")
    terminal.wait_for("24 tokens, ", "ended by length", "no chat template")
    terminal.type("The sparrow")
    assert "no chat template" not in terminal.wait_for("24 tokens, ", "ended by length")
    for line, expected in COMMAND_LINES:
        terminal.type(line)
        terminal.wait_for(expected)
    assert len(json.loads((tmp_path / "talk.json").read_text())["turns"]) == 2

    terminal.type("/sampling greedy")
    terminal.wait_for("temperature=0.0")
    terminal.type("/set ignore_eos on")
    terminal.wait_for("ignore_eos: True")
    terminal.type("/length 40000")
    terminal.wait_for("max_tokens: 40000")
    terminal.type("The heron")
    terminal.wait_for(" slow")  # the answer has begun
    terminal.press("C-c")
    terminal.wait_for("none: nothing drafted", "ended by interrupted")
    terminal.type("/stats")
    terminal.wait_for("1 turn, 1 interrupted")

    terminal.type("/quit")
    assert terminal.wait_for_end() == 0
    assert "+/draft-lenght 3" in terminal.history.read_text()
    kept = tmp_path / "last_conversation.json"
    assert [file.stat().st_mode & 0o777 for file in (kept, terminal.history)] == [0o600, 0o600]
    last = json.loads(kept.read_text())["messages"][-1]["content"].split()
    goes_on = Terminal(tmp_path, "--continue", "--max-tokens", "24")  # of the same tmux server, which the fixture ends
    assert len(last) > 3 and last[0] in goes_on.wait_for("2 messages of", kept.name, last[2], limit=START)


def test_editing_completion_history_and_ctrl_d_work(terminal: Terminal) -> None:
    terminal.press("/", "s", "p", "e")
    terminal.wait_for("/speculative")  # on offer below the line
    terminal.press("Tab")
    terminal.wait_for("> /speculative")
    terminal.press("C-c")
    terminal.wait_for("Ctrl-D or /quit leaves\n>")
    terminal.type("/length 5")
    terminal.wait_for("max_tokens: 5")
    terminal.press("C-l", "o", "n", "e", "M-Enter", "t", "w", "o")
    terminal.wait_for("> one\n  two")
    terminal.press("Enter")
    terminal.wait_for("5 tokens, ")
    terminal.press("C-l", "Up", "Up", "Up")
    terminal.wait_for("> /length 5")
    terminal.press("C-c")
    terminal.wait_for("leaves\n>")
    terminal.press("C-d")
    assert terminal.wait_for_end() == 0
