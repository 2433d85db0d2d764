"""Coding agents and libraries do three tasks with the model of a running server.

    slipstream serve --model MODEL --greedy --max-model-len 32768
    python -m tests.clients.real_model http://127.0.0.1:8000 [CLIENT ...]

They run as in `test_agents.py`, but nothing is scripted. A line per client says which tasks were done, and
runs/clients.jsonl has what it printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from tests.clients.test_agents import AGENTS, LIBRARIES, NOTES, aider_words
from tests.support.client_runs import ROOT, run_agent, run_script

PROGRAM = "print('herons:', 91 * 7)\n"
TASKS = {
    "answer": "What is 6 times 7? Answer with the number only.",
    "change": "Read the file notes.txt, then change the heron's color in it to green.",
    "command": "Run the command `python3 count.py` and tell me the number that it prints.",
}
CLIENTS = [*AGENTS, "aider", *LIBRARIES]


def printed_by(client: str, task: str, url: str, home: Path, folder: Path, seconds: float) -> str:
    """What a client prints that does a task in a folder."""
    if client in AGENTS:
        return run_agent(AGENTS[client].words(url, home, task), home, folder, seconds)
    if client == "aider":
        return run_agent(aider_words(url, task, "notes.txt"), home, folder, seconds)
    arguments = [client, url, "tiny", task]
    (answer,) = run_script(LIBRARIES[client], "agent_loops.py", *arguments, folder=folder, seconds=seconds)
    return str(answer)


def result(client: str, kind: str, url: str, seconds: float) -> dict[str, object]:
    """A client's run of a task in new folders."""
    with tempfile.TemporaryDirectory() as root:
        home, folder = Path(root) / "home", Path(root) / "work"
        home.mkdir()
        folder.mkdir()
        (folder / "notes.txt").write_text(NOTES)
        (folder / "count.py").write_text(PROGRAM)
        start, printed, failure = time.monotonic(), "", ""
        try:
            printed = printed_by(client, TASKS[kind], url, home, folder, seconds)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        notes = (folder / "notes.txt").read_text()
    is_changed = notes == NOTES.replace("grey7", "green")
    is_done = {"answer": "42" in printed, "change": is_changed, "command": "637" in printed}[kind]
    row = {"client": client, "task": kind, "done": is_done, "seconds": round(time.monotonic() - start)}
    return row | {"printed": printed, "notes": notes, "failure": failure}


def main() -> None:
    """Print a line per client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("clients", nargs="*", choices=[[], *CLIENTS], metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--seconds", type=float, default=600.0, help="of a task, at most [600]")
    options = parser.parse_args()
    file = ROOT / "runs" / "clients.jsonl"
    file.parent.mkdir(exist_ok=True)
    for client in options.clients or CLIENTS:
        results = [result(client, kind, options.url, options.seconds) for kind in TASKS]
        with file.open("a") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in results)
        print(
            f"{client}:",
            ", ".join(f"{row['task']} {'done' if row['done'] else 'failed'}" for row in results),
            flush=True,
        )


if __name__ == "__main__":
    main()
