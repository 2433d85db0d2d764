"""Every command reports at once that the hub cannot be reached; models downloaded before are used."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slipstream import SlipstreamError, SpeculativeDecoder
from slipstream.models.weights import hub
from slipstream.models.weights.resolve import resolve
from tests.support.command_line import run
from tests.support.tiny_models import prompts, reference, shared, tokenizer

CLOSES = b""
ANSWERS = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Hub:
    """A server in place of the hub that gives every connection the same answer and counts them."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.connections = answer, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # it is closed
                return
            self.connections += 1
            with connection:
                if self.answer:
                    connection.recv(65536)
                    connection.sendall(self.answer)


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    fake_hub = Hub(request.param)
    with closing(fake_hub.listener):
        for name, value in (
            ("HF_HUB_OFFLINE", False),
            ("ENDPOINT", fake_hub.url),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr(hub, "PAUSE_SECONDS", 0.01)
        hub._why_unreachable.cache_clear()
        yield fake_hub
    hub._why_unreachable.cache_clear()


unreachable = pytest.mark.parametrize("served", [CLOSES], indirect=True)


@pytest.mark.slow
@unreachable
@pytest.mark.parametrize(
    "arguments",
    [
        ("models", "check", "toy", "nothere"),
        ("models", "check", "toy", "org/x-GGUF:nothere"),
        ("models", "pull", "org/x-GGUF:nothere"),
        ("models", "check", "org/nothere", "toy"),
        ("models", "pull", "org/nothere"),
        ("generate", "--target", "nothere", "A"),
        ("generate", "--target", "toy", "--draft", "org/nothere", "A"),
        ("chat", "--target", "org/x-GGUF:nothere"),
        ("serve", "--target", "nothere"),
        ("batch", "--target", "org/x-GGUF:nothere", "in.jsonl", "out.jsonl"),
        ("compare", "--target", "org/x-GGUF:nothere", "A"),
        ("bench", "--target", "org/x-GGUF:nothere", "--out", "runs"),
        ("sweep", "--target", "org/x-GGUF:nothere"),
        ("tune", "--target", "org/x-GGUF:nothere"),
        ("verify", "--target", "org/x-GGUF:nothere"),
        ("train", "--target", "org/x-GGUF:nothere", "--out", "head"),
    ],
    ids=" ".join,
)
def test_every_command_reports_an_unreachable_hub_in_one_line(
    arguments: tuple[str, ...],
    served: Hub,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "A"}\n')
    code, out, err = run(capsys, monkeypatch, *arguments)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 1 and not out and len(errors) == 1 and "Traceback" not in err
    assert "nothere' was not found locally" in errors[0] and "no connection (" in errors[0]
    assert served.connections <= 2  # huggingface_hub would try seven times, for each of several files


@unreachable
def test_a_model_downloaded_before_is_used_with_a_warning(
    served: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--org--small"
    folder = repository / "snapshots" / commit
    shared("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert resolve("org/small") == str(folder)
    assert "using the earlier download of org/small" in caplog.text
    decoder = SpeculativeDecoder("org/small", dtype="float32", device="cpu", reproducible=False)
    prompt = prompts([9])[0]
    assert decoder.generate(prompt, max_tokens=8).token_ids == reference(shared("llama"), prompt, 8)
    assert decoder.target.name == "org/small"
    assert resolve("org/small", {"local_files_only": True}) == "org/small"
    for options in ({"revision": "v2"}, {"subfolder": "part"}, {"cache_dir": str(tmp_path / "other")}):
        with pytest.raises(SlipstreamError, match="no connection"):
            resolve("org/small", options)
    assert served.connections <= 2


@pytest.mark.parametrize("words", [("models", "pull", "org/nothere"), ("generate", "--target", "org/nothere", "A")])
def test_offline_mode_is_named_where_a_model_is_missing(words: tuple[str, ...], capsys: Any, monkeypatch: Any) -> None:
    code, out, err = run(capsys, monkeypatch, *words)  # the tests' own environment sets HF_HUB_OFFLINE
    assert code == 1 and not out and "The hub: it is not asked, as HF_HUB_OFFLINE is set" in err
    assert "downloading" not in err


@pytest.mark.parametrize("served", [ANSWERS], indirect=True)
def test_any_answer_shows_that_the_hub_can_be_reached(served: Hub) -> None:
    assert [resolve("org/small"), resolve("org/other")] == ["org/small", "org/other"]
    assert served.connections == 1
