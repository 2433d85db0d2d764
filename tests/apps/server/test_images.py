"""Images in requests of all four APIs reach a model that sees them, and wrong ones are refused by field."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import SpeculativeDecoder
from tests.support.running_server import RunningServer, running_server
from tests.support.vision_models import picture, png, vision_folder

COUNT = 8
FIRST, SECOND, THIRD = (b64encode(png(picture(seed))).decode() for seed in (1, 2, 3))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = str(vision_folder("llava", tmp_path_factory.mktemp("llava")))
    with running_server(lambda: SpeculativeDecoder(folder, device="cpu", reproducible=False)) as running:
        yield running


def chat(server: RunningServer, *parts: Any, **fields: Any) -> Any:
    return server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": COUNT, **fields},
    )


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def shown(image: str, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{image}"}}


def counted(answer: Any) -> tuple[int, int]:
    details = answer["usage"]
    return details["prompt_tokens"], details["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_a_chat_shows_images_where_they_stand(server: RunningServer) -> None:
    answers = [
        chat(server, text("look at "), shown(image), text(", what is it?")).json() for image in (THIRD, SECOND, THIRD)
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[2] != texts[1]
    (prompt, _), (same, cached), (_, all_cached) = map(counted, answers)
    assert prompt == same and cached == len("u:look at ") and all_cached == prompt - 1
    moved = chat(server, shown(THIRD), text("look at , what is it?")).json()  # no other test begins with this image
    assert counted(moved) == (prompt, len("u:"))


def test_all_apis_show_the_same_image(server: RunningServer) -> None:
    post, question = server.http.post, [shown(FIRST), text("what?")]
    chosen = chat(server, *question).json()["choices"][0]["message"]["content"]
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FIRST}},
        {"type": "text", "text": "what?"},
    ]
    message = post(
        "/v1/messages",
        json={"model": "", "max_tokens": COUNT, "temperature": 0, "messages": [{"role": "user", "content": blocks}]},
    ).json()
    assert message["content"][0]["text"] == chosen
    items = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{FIRST}"},
        {"type": "input_text", "text": "what?"},
    ]
    response = post(
        "/v1/responses",
        json={"input": [{"role": "user", "content": items}], "temperature": 0, "max_output_tokens": COUNT},
    ).json()
    assert response["output"][-1]["content"][0]["text"] == chosen
    options = {"temperature": 0, "num_predict": COUNT}
    asked = {"model": server.http.get("/api/tags").json()["models"][0]["name"], "stream": False, "options": options}
    said = post("/api/chat", json=asked | {"messages": [{"role": "user", "content": "what?", "images": [FIRST]}]})
    assert said.json()["message"]["content"] == chosen
    generated = post("/api/generate", json=asked | {"prompt": "what?", "images": [FIRST]})
    assert generated.json()["response"] == chosen


def test_images_of_tools_results_are_shown_after_them(server: RunningServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("done"), shown(FIRST)]},
    ]
    fields = {"messages": messages, "temperature": 0, "max_tokens": COUNT}
    first = server.http.post("/v1/chat/completions", json=fields).json()
    messages[-1] = messages[-1] | {"content": [text("done"), shown(SECOND)]}
    second = server.http.post("/v1/chat/completions", json=fields).json()
    assert first["choices"][0]["message"] != second["choices"][0]["message"]
    result = {"type": "tool_result", "tool_use_id": "c"}
    result["content"] = [
        {"type": "text", "text": "done"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FIRST}},
    ]
    turns = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    answer = server.http.post(
        "/v1/messages", json={"model": "", "max_tokens": COUNT, "temperature": 0, "messages": turns}
    ).json()
    assert answer["content"][0]["text"] == first["choices"][0]["message"]["content"]
    output = {"type": "function_call_output", "call_id": "c"}
    output["output"] = [
        {"type": "input_text", "text": "done"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{FIRST}"},
    ]
    items = [
        {"role": "user", "content": "see"},
        {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
        output,
    ]
    response = server.http.post(
        "/v1/responses", json={"input": items, "temperature": 0, "max_output_tokens": COUNT}
    ).json()
    assert response["output"][-1]["content"][0]["text"] == first["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "image, message",
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "is a web address"),
        (shown("aGk="), "is no image that can be read"),
        (shown(FIRST, "text/plain"), "allowed: a PNG, JPEG, WebP or GIF"),
        (shown(FIRST[:-80]), "is a damaged image"),
        ({"type": "image_url"}, "is of type NoneType"),
    ],
)
def test_a_wrong_image_is_refused_by_its_field(server: RunningServer, image: Any, message: str) -> None:
    answer = chat(server, text("see"), image)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and "\n" not in error["message"]
    assert error["message"].startswith("messages.0.content.1")


def test_a_text_that_contains_the_token_of_images_is_refused(server: RunningServer) -> None:
    error = chat(server, text("<image>"), shown(FIRST)).json()["error"]
    assert "writes '<image>' 2 times for 1 images" in error["message"]
    cut = chat(server, shown(FIRST), truncate_prompt_tokens=5)
    assert cut.json()["error"]["param"] == "truncate_prompt_tokens"


def test_images_are_counted(server: RunningServer) -> None:
    messages = [{"role": "user", "content": [shown(FIRST), text("what?")]}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert tokens == chat(server, *messages[0]["content"]).json()["usage"]["prompt_tokens"]
