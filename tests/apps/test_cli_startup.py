"""Help and wrong use come at once: neither PyTorch nor transformers is imported for them."""

import subprocess
import sys

import pytest

from slipstream.apps.cli.application import COMMANDS
from tests.support.markers import mostly_slow

PROGRAM = """
import sys
sys.argv[0] = "slipstream"
from slipstream.apps.cli import main
try:
    main()
except SystemExit as done:
    heavy = [name for name in ("torch", "transformers", "numpy", "prompt_toolkit") if name in sys.modules]
    print("imported:", heavy, file=sys.stderr)
    raise
"""
TOY = ("--target", "toy", "-p", "A")
HELP = [(*name.split(), "--help") for names in COMMANDS.values() for name in (*names, "models check")]
ASKING = [("--help",), ("--version",), *dict.fromkeys(HELP)]
WRONG = [
    ("frobnicate",),
    ("generate",),
    ("generate", "--no-such-flag"),
    ("serve", "--host", "0.0.0.0"),
    ("serve", "--port", "70000"),
    ("chat", "--url", "nowhere"),
    ("chat", "--model", "x"),
    ("generate", *TOY, "--temperature", "abc"),
    ("generate", *TOY, "--temperature", "-1"),
    ("generate", *TOY, "--num-draft-tokens", "many"),
    ("generate", *TOY, "--stop", ""),
    ("generate", *TOY, "--json", "/no/such/folder/x.json"),
    ("generate", *TOY, "--drafter", "none", "--num-draft-tokens", "3"),
    ("generate", *TOY, "--drafter", "nonsense"),
    ("generate", *TOY, "--acceptance", "nonsense"),
    ("generate", "--target", "toy", "--prompt-file", "/nowhere.txt"),
    ("compare", *TOY, "--repeats", "0"),
    ("verify", "--category", "stories"),
    ("sweep", "--lengths", "8-0"),
    ("bench", "--batch-sizes", "0"),
    ("bench", "--out", "/dev/null/folder"),
    ("tune", "--budget", "0"),
    ("simulate", "--target-params", "x"),
    ("simulate", "--alpha", "0.5", "--stats", "x.json"),
    ("report", "--ids", "--markdown", "x"),
]


def started(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("arguments",), mostly_slow(zip(ASKING), (("generate", "--help"),)), ids=" ".join)
def test_help_imports_no_library(arguments: tuple[str, ...]) -> None:
    code, out, err = started(*arguments)
    assert code == 0 and out and err.strip() == "imported: []"


@pytest.mark.parametrize(("arguments",), mostly_slow(zip(WRONG), (("generate", "--no-such-flag"),)), ids=" ".join)
def test_wrong_use_imports_no_library(arguments: tuple[str, ...]) -> None:
    code, out, err = started(*arguments)
    lines = err.strip().splitlines()
    assert code == 2 and not out and len(lines) == 2, err
    assert lines[0].startswith("error: ") and lines[1] == "imported: []"


@pytest.mark.slow
def test_the_check_notices_an_import() -> None:
    code, _, err = started("generate", *TOY, "--max-tokens", "1")
    assert code == 0 and "torch" in err.splitlines()[-1]


def test_every_command_is_listed_with_a_whole_sentence() -> None:
    lines = started("--help")[1].splitlines()
    for name in (name for names in COMMANDS.values() for name in names):
        assert any(line.split()[:1] == [name] for line in lines)
    assert not any(line.endswith("...") for line in lines[1:])
