"""Help and usage errors are fast: they import neither PyTorch nor transformers."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from slipstream.apps.cli.command_classes import COMMANDS
from slipstream.version import __version__

# Runs the command line twice, so that its imports are loaded, then runs each list of arguments in a fork.
PROGRAM = """
import contextlib, io, json, os, sys
from slipstream.apps.cli import main

for arguments in ("--help",), ("generate", "--target", "toy", "-p", "A", "--temperature", "-1"):
    sys.argv = ["slipstream", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main()

def run():
    try:
        main()
    finally:
        heavy = [name for name in ("torch", "transformers", "numpy", "prompt_toolkit") if name in sys.modules]
        print("imported:", heavy, file=sys.stderr)

null = open(os.devnull)
for line in sys.stdin:
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        for to, (_, end) in enumerate(pipes, 1):
            os.dup2(end, to)
        sys.stdin = null
        os.closerange(null.fileno() + 1, 256)
        sys.argv = ["slipstream", *json.loads(line)]
        code = 0
        try:
            run()
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: shutting the interpreter down takes longer than most commands
    texts = []
    for begin, end in pipes:  # a pipe holds all that a command prints
        os.close(end)
        texts.append(open(begin).read())
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts]), flush=True)
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
    ("train",),
    ("train", "--out", "x", "--tokens", "many"),
    ("simulate", "--target-params", "x"),
    ("simulate", "--alpha", "0.5", "--stats", "x.json"),
    ("report", "--ids", "--markdown", "x"),
]

Outcomes = dict[tuple[str, ...], tuple[int, str, str]]  # exit status, standard output, standard error


def started(commands: Sequence[tuple[str, ...]]) -> list[tuple[int, str, str]]:
    """Exit status, standard output and standard error of each command."""
    lines = "".join(json.dumps(arguments) + "\n" for arguments in commands)
    process = subprocess.run([sys.executable, "-c", PROGRAM], input=lines, capture_output=True, text=True, check=True)
    outcomes = [tuple(json.loads(line)) for line in process.stdout.splitlines()]
    assert len(outcomes) == len(commands)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    commands = [*ASKING, *WRONG]
    return dict(zip(commands, started(commands), strict=True))


@pytest.mark.slow
def test_help_imports_no_library(subtests: pytest.Subtests, outcomes: Outcomes) -> None:
    for arguments in ASKING:
        code, out, err = outcomes[arguments]
        with subtests.test(" ".join(arguments)):
            assert code == 0 and out and err.strip() == "imported: []"


@pytest.mark.slow
def test_wrong_use_imports_no_library(subtests: pytest.Subtests, outcomes: Outcomes) -> None:
    for arguments in WRONG:
        code, out, err = outcomes[arguments]
        with subtests.test(" ".join(arguments)):
            lines = err.strip().splitlines()
            assert code == 2 and not out and len(lines) == 2, err
            assert lines[0].startswith("error: ") and lines[1] == "imported: []"


@pytest.mark.exhaustive
def test_the_check_for_imports_notices_pytorch() -> None:
    [(code, _, err)] = started([("generate", *TOY, "--max-tokens", "1")])
    assert code == 0 and "torch" in err.splitlines()[-1]


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    program = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from slipstream.__main__ import main
main()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_pytorch_is_imported_raises_no_exception_in_it() -> None:
    program = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException as error:
                print("raised", type(error).__name__)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["slipstream", "generate", "--model", "toy", "Hi"]
from slipstream.__main__ import main
main()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.slow
def test_every_command_is_listed_with_an_uncut_sentence(outcomes: Outcomes) -> None:
    lines = outcomes["--help",][1].splitlines()
    for name in (name for names in COMMANDS.values() for name in names):
        assert any(line.split()[:1] == [name] for line in lines)
    assert not any(line.endswith("...") for line in lines[1:])


def test_python_ends_without_looking_through_all_objects() -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\n"
        "sys.argv = ['slipstream', '--version']\n"
        "from slipstream.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [__version__, "True"]
