"""`suffix` of completions and of Ollama's API: the text that plain decoding of the infill's tokens gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.infill import infill
from tests.apps.server.test_ollama_api import lines
from tests.support import vocabularies
from tests.support.markers import subcases
from tests.support.running_server import RunningServer, running_server
from tests.tokenization.test_infill import PREFIX, QWEN, SUFFIX, with_tokens

OPTIONS = {"temperature": 0, "num_predict": 20}


def coder() -> SpeculativeDecoder:
    return SpeculativeDecoder(
        vocabularies.speaking("bytes"),
        tokenizer=with_tokens("bytes").inner,
        drafter="suffix",
        num_draft_tokens=4,
        acceptance="match",
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(coder, served_model_name=("tiny",)) as running:
        yield running


def expected() -> str:
    decoder = coder().using("none")
    parts = infill(HFTokenizer(with_tokens("bytes").inner), PREFIX, SUFFIX)
    return decoder.generate(parts.ids, max_tokens=20, stop_token_ids=parts.ends).text


@pytest.mark.slow
def test_every_door_gives_the_plain_text(server: RunningServer) -> None:
    text = expected()
    assert server.text(PREFIX, suffix=SUFFIX, temperature=0, max_tokens=20) == text
    chunks = server.chunks("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 20})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    body = {"model": "tiny", "prompt": PREFIX, "suffix": SUFFIX, "options": OPTIONS}
    for raw in (False, True):
        assert "".join(line["response"] for line in lines(server, "/api/generate", body | {"raw": raw})) == text
    shown = server.http.post("/api/show", json={"model": "tiny"}).json()
    assert "insert" in shown["capabilities"] and ".Suffix" in shown["template"]


def test_the_gap_may_begin_the_text(server: RunningServer) -> None:
    body = {"model": "tiny", "suffix": SUFFIX, "options": OPTIONS, "stream": False}
    assert server.http.post("/api/generate", json=body).json()["response"]
    assert server.text("", suffix=SUFFIX, temperature=0)
    assert server.text(PREFIX, suffix="", temperature=0) == server.text(PREFIX, temperature=0)


def test_a_token_for_infilling_ends_the_text(server: RunningServer) -> None:
    pad = str(with_tokens("bytes").vocabulary()[QWEN[3]])
    choice = server.complete(PREFIX, suffix=SUFFIX, logit_bias={pad: 10_000}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@subcases(
    "body, param, why",
    [
        ({"prompt": [1, 2]}, "suffix", "suffix with prompts as token ids; allowed: with prompts as strings"),
        ({"echo": True}, "suffix", "suffix with echo or truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5}, "suffix", "suffix with echo or truncate_prompt_tokens"),
    ],
)
def test_what_an_infill_cannot_be_is_refused(server: RunningServer, body: dict[str, Any], param: str, why: str) -> None:
    error = server.complete(**{"prompt": PREFIX, "suffix": SUFFIX} | body).json()["error"]
    assert (error["param"], why in error["message"]) == (param, True), error


@pytest.mark.parametrize("name", ["system", "think"])
def test_ollamas_fields_of_the_template_are_refused(server: RunningServer, name: str) -> None:
    for way in ({"suffix": SUFFIX}, {"raw": True}):
        body = {"model": "tiny", "prompt": PREFIX, name: "on"} | way
        assert server.http.post("/api/generate", json=body).json()["error"].startswith(f"{name} with raw or suffix")


def test_models_without_such_tokens_refuse_it() -> None:
    with running_server() as server:
        error = server.complete(PREFIX, suffix=SUFFIX).json()["error"]
        assert error["param"] == "suffix" and "no tokens for infilling" in error["message"]
