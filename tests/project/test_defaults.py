"""One set of defaults: every door has the same, and the page of the documentation is made from the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream import SamplingParams
from slipstream.apps import cli
from slipstream.apps.server.request_reading import sampling_params
from slipstream.apps.server.request_rows import COMPLETION_TOKENS, TEMPERATURE
from slipstream.apps.server.schemas import ChatFields
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.sampling.params import DEFAULT_MAX_TOKENS, OWN_OPTIONS

ROOT = Path(__file__).parents[2]
UNSET = SamplingParams().unset
OPTIONS = (*OWN_OPTIONS, "max_tokens", "seed")
MEASURING = (("compare", "bench", "sweep", "tune"), ("verify",), ("demo",))
COMMANDS: Any = typer.main.get_command(cli.app)


def flag(command: str, name: str) -> Any:
    return next((option for option in COMMANDS.commands[command].params if option.name == name), None)


@pytest.mark.parametrize("command", ["generate", "batch", "chat"])
def test_commands_leave_to_python_and_the_model_what_the_user_leaves_out(command: str) -> None:
    for name, value in UNSET.items():
        option = flag(command, name)
        assert option.default is None and f"{value:g}" in option.help
        assert ("the model's own" in option.help) is (name in OWN_OPTIONS)
    assert flag(command, "greedy").is_flag


@pytest.mark.parametrize("command", ["compare", "bench", "sweep", "tune"])
def test_commands_that_measure_say_everything(command: str) -> None:
    values = {name: flag(command, name).default for name in OWN_OPTIONS}
    assert values == {name: UNSET[name] for name in OWN_OPTIONS} and flag(command, "greedy").is_flag


def test_a_request_that_says_nothing_leaves_everything_to_the_model() -> None:
    fields = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    assert sampling_params(fields, 7, 100).unset.keys() == set(OWN_OPTIONS)


def test_the_server_has_the_same_default_length_with_its_usual_window() -> None:
    assert ServerSettings().limits(4096).default_max_tokens == DEFAULT_MAX_TOKENS == UNSET["max_tokens"]


def test_the_page_sends_only_what_is_typed() -> None:
    html = (ROOT / "src/slipstream/apps/server/page/index.html").read_text()
    inputs = dict(re.findall(r'<input id="(\w+)"([^>]*)>', html))
    assert inputs.keys() >= {"temperature", "top_p", "max_tokens", "seed", "num_draft_tokens"}
    assert not any("value=" in attributes for attributes in inputs.values())


def table() -> str:
    """The table of the documentation."""
    measuring = [", ".join(f"`{name}`" for name in names) for names in MEASURING]
    doors = ("Python, `generate`, `batch`, `chat`", "server, page", *measuring)
    rows = [f"| | {' | '.join(doors)} |", f"|{'---|' * (len(doors) + 1)}"]
    for name in OPTIONS:
        if name in OWN_OPTIONS:
            own = [f"own, or {UNSET[name]:g}", "same"]
            if name == "temperature":
                own[1] = f"own, or {TEMPERATURE:g}"
        elif name == "seed":
            own = ["fresh, printed", "same"]
        else:
            own = [
                f"{DEFAULT_MAX_TOKENS}",
                f"{DEFAULT_MAX_TOKENS}, or a quarter of the window; completions: {COMPLETION_TOKENS}",
            ]
        for commands in MEASURING:
            (measured,) = {None if (option := flag(command, name)) is None else option.default for command in commands}
            own.append(f"{UNSET[name] if measured is None else measured:g}" if name != "seed" else "fixed")
        rows.append(f"| `{name}` | {' | '.join(own)} |")
    return "\n".join(rows)


def test_the_documentation_has_the_table_of_the_code() -> None:
    print(table())
    assert table() in (ROOT / "docs" / "defaults.md").read_text()
