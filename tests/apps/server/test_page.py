"""The server's page: its files, and its views in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from slipstream.apps.server.answer_state import ModelFacts, Piece, shown_round
from slipstream.core.rounds import Round
from tests.support.page_browser import Opened, ask, browsers, canned
from tests.support.running_server import PATIENCE, Gate, RunningServer, running_server

MOST_BYTES = 84 * 1024
FILES = ("app.js", "elements.js", "index.html", "markdown.js", "style.css")
VIEWS = ("chat", "race", "engine")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b&gt; "


def source(name: str) -> str:
    return (resources.files("slipstream.apps.server") / "page" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "name"), [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)])
def test_files_are_served_unchanged_under_a_content_security_policy(
    server: RunningServer, path: str, name: str
) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 200 and answer.text == source(name)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = server.http.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


def test_the_page_is_small_and_fetches_nothing_from_elsewhere() -> None:
    texts = [source(name) for name in FILES]
    assert sum(len(text.encode()) for text in texts) <= MOST_BYTES
    namespaces = {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert {url for text in texts for url in re.findall(r"https?://[^\s\"')]+", text)} <= namespaces


def test_page_sources_never_turn_text_into_markup_or_code() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|javascript:"
    for name in ("app.js", "elements.js", "markdown.js"):
        assert not re.search(sinks, source(name)), name
    assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style|<script(?![^>]*\ssrc=)|javascript:", source("index.html"))


def test_a_round_credits_its_prediction_with_the_tokens_taken_from_it() -> None:
    def shown(predicted: int | None) -> list[Any]:
        round = Round(0, 0, 1, 5, draft=(7, 8, 9), tokens=(7, 8, 3), num_accepted_tokens=2, rejected=True)
        round = replace(round, num_prediction_tokens=predicted)
        facts = ModelFacts("toy", "slip-0", True, lambda round: "suffix", True, None)
        tokens = shown_round(Piece(0, "", round.tokens, round=round), 0, facts)["tokens"]
        return [(token["origin"], token["source"]) for token in tokens]

    assert shown(1) == [("accepted", "prediction"), ("accepted", "suffix"), ("recovered", None)]
    assert shown(None) == [("accepted", "suffix"), ("accepted", "suffix"), ("recovered", None)]


@browsers
@pytest.mark.slow
def test_hostile_text_stays_text(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url, canned([HOSTILE] * 3))
    ask(page, HOSTILE, prediction=HOSTILE)
    page.wait_for_selector(".diff")
    assert page.text_content(".answer") == HOSTILE and page.text_content(".said") == HOSTILE
    assert page.text_content("article > .markdown") == HOSTILE.strip()
    page.goto(f"{server.url}/#race")
    page.fill("#race-ask", HOSTILE)
    page.click("#race-go")
    page.wait_for_selector("#verdict .seal")
    assert page.text_content(".lane .answer") == HOSTILE
    assert page.locator("main img, main script").count() == 0 and page.title() == "Slipstream"


@browsers
@pytest.mark.slow
def test_a_race_of_equal_texts_shows_that_they_are_equal(server: RunningServer, opened: Opened) -> None:
    page = opened(f"{server.url}/#race", reduced_motion="no-preference")
    page.wait_for_selector("#served[data-up]")
    page.fill("#max_tokens", "24")
    page.fill("#seed", "3")
    for start in ("#race-go", "#race-again", "input[value=both]", "#race-go"):
        page.click(start)
        page.wait_for_selector("#race-stop", state="hidden")
        assert "equal to the last byte" in page.text_content("#verdict .seal:not(.bad)")
        plain, quick = page.locator(".lane .answer").all_text_contents()
        assert plain == quick and len(plain) == 24
        assert page.locator(".lane").first.locator(".t:not(.plain)").count() == 0


@pytest.mark.slow
@browsers
def test_a_race_of_different_texts_shows_the_first_difference(server: RunningServer, opened: Opened) -> None:
    page = opened(f"{server.url}/#race", canned(["a heron stands", "a heron waits"]))
    page.wait_for_selector("#served[data-up]")
    page.click("#race-go")
    verdict = page.wait_for_selector("#verdict .seal.bad").text_content()
    assert "character 9" in verdict and '"a heron stands"' in verdict and "Identical" not in verdict


@pytest.mark.slow
@browsers
def test_the_engine_room_shows_running_rows(opened: Opened) -> None:
    gate = Gate()
    with running_server(gate.load, max_queued_requests=5) as server:
        page = opened(server.url)
        try:
            ask(page, max_tokens=9)
            assert gate.reached.wait(PATIENCE)
            page.click("text=Engine room")
            page.wait_for_selector("text=0 of 9 tokens")
            assert "of 5" in page.text_content("#engine")
        finally:
            gate.opened.set()
        page.wait_for_selector("text=0 of 9 tokens", state="detached")


@pytest.mark.slow
@browsers
@pytest.mark.parametrize(("width", "theme"), [(320, "dark"), (1280, "light")])
def test_every_view_fits_and_has_no_accessibility_violations(
    server: RunningServer, opened: Opened, width: int, theme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    page = opened(server.url, color_scheme=theme)
    ask(page, "W" * 200, max_tokens=60)
    page.wait_for_selector(".receipt")
    page.click(".receipt summary")
    page.click('text="Tokens"')
    for view in VIEWS:
        page.click(f'nav a[href="#{view}"]')
        page.wait_for_selector({"chat": ".receipt", "race": ".lane", "engine": "#engine .card"}[view])
        for across in (1600 - width, width):
            page.set_viewport_size({"width": across, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= across, view
        violations = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert violations == [], [
            (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in violations
        ]


@pytest.mark.slow
@browsers
def test_the_theme_can_be_switched_and_is_remembered(server: RunningServer, opened: Opened) -> None:
    page = opened(server.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    page.click("#theme")
    assert page.text_content("#theme") == "Theme: dark" and page.evaluate(ground) != light
    page.reload()
    assert page.text_content("#theme") == "Theme: dark" and page.evaluate(ground) != light


@pytest.mark.slow
@browsers
def test_the_page_asks_the_model_that_is_chosen(opened: Opened) -> None:
    with running_server(several={"low": {}, "high": {}}) as server:
        page = opened(server.url)
        page.wait_for_selector("#served[data-up]")
        assert page.locator("#models option").all_text_contents() == ["low", "high"]
        page.select_option("#models", "high")
        ask(page, max_tokens=9)
        page.wait_for_selector(".receipt")
        assert "high" in page.text_content(".message:not(.user) header") and page.input_value("#models") == "high"
        assert [service.state for service in server.models.services] == ["unloaded", "loaded"]
        page.click("text=Engine room")
        page.wait_for_selector("text=/high, drafter/")
    with running_server() as server:
        page = opened(server.url)
        page.wait_for_selector("#served[data-up]")
        assert page.is_hidden("#models")
