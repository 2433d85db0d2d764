"""The page's chat, in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_browser import Opened, ask, browsers, canned
from tests.support.running_server import PATIENCE, Gate, RunningServer, running_server

pytestmark = [browsers, pytest.mark.slow]


def test_an_answer_is_shown_token_by_token_with_its_origins(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    ask(page, max_tokens=40, seed=3)
    page.wait_for_selector(".receipt")
    body = {"messages": [{"role": "user", "content": "the cat sat on the mat, the cat"}]}
    answer = server.http.post("/v1/chat/completions", json=body | {"max_tokens": 40, "seed": 3})
    assert page.text_content(".answer") == answer.json()["choices"][0]["message"]["content"]
    assert "seed 3" in page.text_content(".facts")
    kinds = set(page.eval_on_selector_all(".answer .t", "all => all.map((one) => one.classList[1])"))
    assert kinds <= {"accepted", "recovered", "bonus", "plain"} and len(kinds) > 1
    assert page.locator(".round").count() < page.locator(".answer .t").count() == 40
    assert not page.is_visible(".answer") and page.is_visible("article > .markdown")
    page.click('text="Tokens"')
    assert page.is_visible(".answer") and not page.is_visible("article > .markdown")
    page.focus(".answer")
    page.keyboard.press("ArrowRight")
    assert "Round 1:" in page.text_content("#tip") and "Round 1:" in page.text_content("#live")
    page.click(".receipt summary")
    page.click("text=Replay plainly")
    assert "Identical" in page.wait_for_selector(".receipt .seal").text_content()


def test_the_shapes_below_an_answer_are_explained(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    ask(page, max_tokens=40, seed=3)
    page.wait_for_selector(".receipt")
    shapes = page.eval_on_selector_all(".ticker .cell", "all => all.map((one) => one.classList[1])")
    words = {"missed": "rejected"}
    assert set(page.locator(".key span").all_text_contents()) == {words.get(shape, shape) for shape in shapes}


def test_chats_are_found_by_what_was_said_and_can_be_renamed(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    for number, text in enumerate(("a heron", "a stone"), 1):
        page.click("#new-chat")
        ask(page, text, max_tokens=5)
        page.wait_for_selector(".facts")
        assert page.locator("#chats option").count() == number
    page.fill("#find", "HERON")
    assert page.locator("#chats option").all_text_contents() == ["1 found", "a heron"]
    page.select_option("#chats", label="a heron")
    assert page.text_content(".said") == "a heron"
    page.once("dialog", lambda dialog: dialog.accept("Birds"))
    page.click("#rename-chat")
    page.fill("#find", "")
    page.reload()
    assert page.locator("#chats option").all_text_contents() == ["New chat", "Birds", "a stone"]


def test_a_phones_first_screen_shows_the_examples(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url, viewport={"width": 390, "height": 844})
    page.wait_for_selector("#served[data-up]")
    boxes = [page.locator(place).bounding_box() for place in ("#hello", "#composer", ".examples button:last-child")]
    hello, composer, example = boxes
    assert hello["y"] < 844 / 4 and example["y"] + example["height"] <= composer["y"]
    assert page.locator("#options summary").bounding_box()["y"] > composer["y"]
    assert not page.is_visible("#export-chat")
    page.click("#more summary")
    page.click("#find")


def test_a_thought_is_folded_above_the_answer_and_is_not_sent_back(server: RunningServer, opened: Opened) -> None:
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        parts = [{"reasoning_content": "It *flies*."}, {"content": "A **heron**."}]
        chunks = [{"choices": [{"index": 0, "delta": part, "finish_reason": None}]} for part in parts]
        chunks[-1]["choices"][0]["finish_reason"] = "stop"
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        route.fulfill(content_type="text/event-stream", body="".join([*lines, "data: [DONE]\n\n"]))

    page = opened(server.url, lambda page: page.route("**/v1/chat/completions", answer))
    ask(page)
    page.wait_for_selector(".thought summary")
    assert page.text_content("article > .markdown") == "A heron." and not page.is_visible("text=flies")
    page.click(".thought summary")
    assert page.text_content(".thought .markdown") == "It flies." and page.is_visible(".thought em")
    ask(page)
    page.wait_for_selector("article:nth-of-type(4) .thought summary")
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "A **heron**."}


def test_tokens_that_form_one_character_are_shown_together(server: RunningServer, opened: Opened) -> None:
    tokens = ["\ufffd", "\ufffd", " b", "token_id:0", "{"]
    page = opened(server.url, canned(["\u00e9 b{"], lambda text: tokens, origin="forced"))
    ask(page)
    page.wait_for_selector(".facts")
    assert page.locator(".answer .forced").all_text_contents() == ["\u00e9", " b", "{"]


def test_an_answer_can_be_stopped_and_regenerated(opened: Opened) -> None:
    gate = Gate()
    with running_server(gate.load) as server:
        page = opened(server.url)
        try:
            ask(page, max_tokens=9)
            assert gate.reached.wait(PATIENCE)
            page.keyboard.press("Escape")
            page.wait_for_selector("text=stopped by you")
        finally:
            gate.opened.set()
        server.wait_until(lambda: not server.service.live)
        page.click("text=Regenerate")
        page.wait_for_selector(".receipt")
        assert page.locator("#messages .answer").count() == 1
        page.click("text=Edit")
        page.fill(".user textarea", "a bittern")
        page.click("text=Send from here")
        page.wait_for_selector(".receipt")
        assert page.text_content(".said") == "a bittern" and page.locator(".message").count() == 2
        page.reload()
        assert "a bittern" in page.text_content("#chats")


def test_refusals_are_shown_in_the_servers_words(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    ask(page, "x" * 5000)
    assert "4096" in page.wait_for_selector(".message .problem").text_content()
    page.fill("#temperature", "hot")
    page.fill("#ask", "again")
    page.keyboard.press("Enter")
    assert page.text_content("#settings-problem") == "Temperature: hot; allowed: a number from 0 to 100"
    assert page.input_value("#ask") == "again" and page.get_attribute("#temperature", "aria-invalid") == "true"


def test_schemas_and_predictions_are_sent_and_the_prediction_is_compared_with_the_answer(
    server: RunningServer, opened: Opened
) -> None:
    sent: list[Any] = []
    page = opened(server.url, canned(["one\ntwo\nfour"], origin="accepted", source="prediction"))
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    ask(page, schema='{"type": "object"}', prediction="one\ntwo\nthree\n")
    diff = page.wait_for_selector(".diff pre").text_content()
    assert diff == "  one  two\N{MINUS SIGN} three+ four"
    assert page.locator(".answer .prediction").count() == page.locator(".ticker .cell.prediction").count() == 12
    assert "12 from the prediction" in page.text_content(".message footer .facts")
    assert sent[0]["prediction"] == {"type": "content", "content": "one\ntwo\nthree\n"}
    assert sent[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.click("#raw")
    assert "--curl" not in page.text_content("#raw-body") and "extra_body={" in page.text_content("#raw-body")


def test_a_key_is_asked_for_and_kept_only_for_the_tab(opened: Opened, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("reader:correct-horse\n")
    with running_server(api_key_file=str(keys)) as server:
        page = opened(server.url)
        page.fill("#key", "wrong-horse")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "correct-horse")
        page.keyboard.press("Enter")
        ask(page, max_tokens=5)
        page.wait_for_selector(".receipt")
        assert "correct-horse" in page.evaluate("JSON.stringify(sessionStorage)")
        assert "horse" not in page.evaluate("JSON.stringify(localStorage)") + page.evaluate("document.cookie")


def test_a_dead_server_is_reported_and_found_again(opened: Opened) -> None:
    with running_server() as server:
        port = int(server.url.rpartition(":")[2])
        page = opened(server.url)
        ask(page, max_tokens=9)
        page.wait_for_selector(".receipt")
    page.fill("#ask", "is anyone there?")
    page.keyboard.press("Enter")  # before or after the page has noticed
    page.wait_for_selector("#lost:visible")
    page.wait_for_selector("#served.down:not([data-up])")
    assert page.text_content("#served") == "no server" and "slipstream serve" in page.text_content("#lost")
    if page.locator(".message .problem").count():
        assert page.text_content(".message .problem") == "The server does not answer."
    else:
        assert page.input_value("#ask") == "is anyone there?"
    page.fill("#ask", "still there?")
    page.keyboard.press("Enter")
    page.click("#look")
    assert page.input_value("#ask") == "still there?" and page.is_visible("#lost")
    with running_server(port=port):
        page.wait_for_selector("#served[data-up]")
        assert page.is_hidden("#lost") and page.input_value("#ask") == "still there?"
        page.focus("#ask")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message:last-child .receipt")


def test_a_server_lost_during_an_answer_is_one_line_and_the_question_can_be_retried(opened: Opened) -> None:
    gate = Gate()
    with running_server(gate.load) as server:
        page = opened(server.url)
        ask(page, "a long story", max_tokens=9)
        assert gate.reached.wait(PATIENCE)
        gate.opened.set()
        cut = 'data: {"choices": [{"index": 0, "delta": {"content": "Once"}, "finish_reason": null}]}\n\n'
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
        page.wait_for_selector(".receipt")
        page.click("text=Regenerate")
        problem = page.wait_for_selector(".message .problem").text_content()
        assert problem == "The server went away before the answer was complete."
        assert page.text_content("article > .markdown") == "Once" and page.text_content(".said") == "a long story"
        page.unroute("**/v1/chat/completions")
        page.click("text=Try again")
        page.wait_for_selector(".receipt")
        assert page.locator(".message .problem").count() == 0


def test_typed_text_survives_a_reload(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    page.fill("#ask", "half a thought")
    page.reload()
    assert page.input_value("#ask") == "half a thought"
    ask(page, "a whole one", max_tokens=5)
    page.wait_for_selector(".receipt")
    page.reload()
    assert page.input_value("#ask") == ""


def test_rejected_drafts_are_shown_but_are_not_part_of_the_text(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    ask(page, max_tokens=60, seed=3, temperature="1.5")
    page.wait_for_selector(".receipt")
    page.click('text="Tokens"')
    shown = page.eval_on_selector_all(
        ".recovered[data-rejected]",
        "all => all.map(e => [e.dataset.rejected, getComputedStyle(e, '::before').content, e.textContent])",
    )
    shown = [piece for piece in shown if "rejected" not in piece[0]]  # without the legend's
    assert shown and all(before.strip('"') and text != rejected for rejected, before, text in shown)


def test_the_shown_request_is_the_one_that_would_be_sent(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url)
    ask(page, "a first question", max_tokens=5)
    page.wait_for_selector(".receipt")
    page.click("#raw")
    request = page.text_content("#raw-body")
    assert "a first question" in request and "Name three birds" not in request and "authorization" not in request


def focused(page: Any) -> Any:
    return page.evaluate("document.activeElement.id")


def test_the_keyboard_keeps_its_place_and_the_end_of_an_answer_is_announced(opened: Opened) -> None:
    gate = Gate()
    with running_server(gate.load) as server:
        page = opened(server.url)
        try:
            page.wait_for_selector("#served[data-up]")
            page.fill("#max_tokens", "9")
            page.fill("#ask", "the cat sat")
            page.keyboard.press("Tab")
            assert focused(page) == "send"
            page.keyboard.press("Enter")
            assert gate.reached.wait(PATIENCE)
            assert page.is_disabled("#send") and focused(page) == "ask"
            page.keyboard.press("Tab")
            assert focused(page) == "stop"
            page.keyboard.press("Enter")
            page.wait_for_selector("text=stopped by you")
            assert page.is_hidden("#stop") and focused(page) == "ask"
            assert "Stopped by you." in page.text_content("#live")
        finally:
            gate.opened.set()
        server.wait_until(lambda: not server.service.live)
        page.focus("text=Regenerate")
        page.keyboard.press("Enter")
        page.wait_for_selector(".receipt")
        assert focused(page) == "ask" and "Cut at max tokens." in page.text_content("#live")
        page.click("#new-chat")
        page.focus("#examples button")
        page.keyboard.press("Enter")
        page.wait_for_selector(".receipt")
        assert focused(page) == "ask"


def test_the_end_of_a_whole_answer_is_announced(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url, canned(["the whole answer"], lambda text: [text]))
    ask(page)
    page.wait_for_selector(".facts")
    assert "End of the answer." in page.text_content("#live")
    assert page.locator("#unloaded").count() == 0


@pytest.mark.parametrize("files", ["**/page/*", "**/page/app.js"])
def test_a_page_whose_script_does_not_load_says_so(server: RunningServer, opened: Opened, files: str) -> None:
    page = opened(server.url, lambda page: page.route(files, lambda route: route.fulfill(status=404)))
    page.wait_for_selector("#unloaded", state="visible")
    assert "the address must end with a slash" in page.text_content("#unloaded")
