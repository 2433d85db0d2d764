"""Mistakes on the command line and unwritable files are one line, before the work begins where possible."""

import errno
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream import SamplingParams
from slipstream.apps import cli
from slipstream.apps.cli.demo import caption
from slipstream.bench.comparison import PLAIN, SPECULATIVE, Comparison, Run
from slipstream.decoder import SpeculativeDecoder
from slipstream.text.prompt_sets import NamedPrompt
from tests.support.command_line import run
from tests.support.markers import mostly_exhaustive

pytestmark = pytest.mark.slow

TOY = ("--target", "toy")
PROMPT = ("-p", "The heron")
COMMAND = [sys.executable, "-c", "from slipstream.apps.cli import main; main()"]


def refused(capsys, monkeypatch, *arguments: str) -> str:
    code, out, err = run(capsys, monkeypatch, *arguments)
    lines = err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and not out, err
    return lines[0]


WRITERS = [
    ("generate", *PROMPT, "--json"),
    ("compare", *PROMPT, "--json"),
    ("verify", "--json"),
    ("bench", "--json"),
    ("bench", "--out"),
    ("sweep", "--json"),
    ("sweep", "--out"),
    ("tune", "--json"),
    ("tune", "--out"),
    ("train", "--out", "head", "--json"),
    ("train", "--out"),
    ("simulate", "--json"),
]


@pytest.mark.parametrize("arguments", WRITERS, ids=lambda words: f"{words[0]} {words[-1]}")
def test_output_files_are_checked_before_a_model_is_loaded(
    capsys, monkeypatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    def load(self, *args, **options):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    (tmp_path / "file").touch()
    where = str(tmp_path / "file" / "below")
    message = refused(capsys, monkeypatch, arguments[0], *TOY, *arguments[1:], where)
    assert f"{arguments[-1]} {where!r} cannot be written" in message
    if arguments[-1] != "--out":
        assert "it is a folder" in refused(capsys, monkeypatch, arguments[0], *TOY, *arguments[1:], str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_default_output_folder_is_checked_before_a_model_is_loaded(capsys, monkeypatch, tmp_path: Path) -> None:
    def load(self, *args, **options):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    assert "/runs' is not a folder" in refused(capsys, monkeypatch, "tune", *TOY)


def test_standard_input_that_is_no_text_is_refused(capsys, monkeypatch) -> None:
    for errors in ("strict", "surrogateescape"):  # the second is Python's choice in the locale C.UTF-8
        stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stream)
        message = refused(capsys, monkeypatch, "generate", *TOY, "-p", "-")
        assert "standard input is not valid UTF-8 at byte 0" in message


GENERATE = ("generate", *TOY, "--max-tokens", "4")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    mostly_exhaustive(
        [("<&-", GENERATE, 2), (">&-", ("--help",), 0), ("2>&-", (*GENERATE, *PROMPT), 0)],
        *(("<&-", GENERATE, 2), (">&-", ("--help",), 0)),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_closed_standard_streams_count_as_empty(closed: str, arguments: tuple[str, ...], code: int) -> None:
    words = [*COMMAND, *arguments]
    process = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True)
    assert process.returncode == code and "Traceback" not in process.stderr
    assert ("standard input is empty" in process.stderr) == (closed == "<&-")
    assert bool(process.stdout) == (closed == "2>&-")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        *(
            pytest.param(command, marks=pytest.mark.exhaustive)
            for command in (("generate", *TOY, *PROMPT), ("simulate",), ("models",), ("generate", "--help"))
        ),
    ],
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    lines = [line for line in process.stderr.splitlines() if line.startswith("error:")]
    assert process.returncode == 1 and lines == ["error: standard output: no space left on device"]
    assert "Traceback" not in process.stderr and "Exception ignored" not in process.stderr


@pytest.mark.parametrize("arguments", [("generate", *TOY, *PROMPT), ("models",)], ids=lambda words: words[0])
def test_a_closed_pipe_is_one_line(arguments: tuple[str, ...]) -> None:
    words = [*COMMAND, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait()
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert code == 1 and lines == ["error: standard output was closed before all output was written"]
    assert "Traceback" not in errors and "Exception ignored" not in errors


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lack_of_memory_is_one_line(capsys, monkeypatch, error: Exception) -> None:
    def load(self, *args, **options):
        raise error

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    code, out, errors = run(capsys, monkeypatch, *GENERATE, *PROMPT)
    assert (code, out) == (1, "")
    assert errors == "error: out of memory; allowed: a quantized file, a smaller --max-batch-size, shorter texts\n"


def test_other_errors_of_a_programs_own_keep_their_traceback(capsys, monkeypatch) -> None:
    def load(self, *args, **options):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    monkeypatch.setattr(sys, "argv", ["slipstream", *GENERATE, *PROMPT])
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main()


@pytest.mark.exhaustive
def test_a_full_disk_behind_standard_error_ends_with_exit_code_1() -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run([*COMMAND, "generate", *TOY, *PROMPT], stdout=subprocess.PIPE, stderr=full)
    assert process.returncode == 1


def test_an_unused_draft_model_is_warned_about(capsys, monkeypatch, caplog) -> None:
    flags = ("--max-tokens", "4", "--draft", "toy:2")
    assert run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *flags, "--drafter", "ngram")[0] == 0
    assert _warnings(caplog) == ["the draft model is loaded but not used: drafter='ngram' needs none"]
    caplog.clear()
    assert run(capsys, monkeypatch, "generate", *TOY, *PROMPT, *flags)[0] == 0
    assert _warnings(caplog) == []


@pytest.mark.parametrize(("seconds", "beginning"), [(0.5, "2.00x (faster)"), (2.0, "0.50x (slower)")])
def test_a_caption_of_the_demo_follows_from_its_measurements(seconds: float, beginning: str) -> None:
    result = SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens=3).generate(
        "The heron, the heron, the heron", SamplingParams(max_tokens=20)
    )
    runs = {
        PLAIN: Run([1] * 20, 1.0, repeats=(1.0, 1.0)),
        SPECULATIVE: Run([1] * 20, seconds, None, result, (seconds,) * 2),
    }
    line = caption(Comparison(NamedPrompt("A", "story"), runs), "new text")
    assert line.startswith(f"{beginning}: ") and line.endswith("; new text")
    assert f"of {result.stats.num_draft_tokens} drafted tokens accepted" in line


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_retries_of_the_hub_client_are_not_logged() -> None:
    """In a process of its own, as importing the client sets its log level."""
    code = (
        "from slipstream.models.weights.model_files import quiet; quiet(); "
        "import logging, huggingface_hub.file_download; "
        "print(logging.getLogger('huggingface_hub').isEnabledFor(logging.ERROR))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False"]


def test_a_missing_prompt_toolkit_is_named_before_a_model_is_loaded(capsys, monkeypatch, tmp_path: Path) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("slipstream.apps.cli.chat.sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(SpeculativeDecoder, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, errors = run(capsys, monkeypatch, "chat", *TOY, "--no-history")
    assert (code, errors) == (1, "error: prompt_toolkit is not installed; run: pip install prompt_toolkit\n")
