"""The page renders Markdown as elements, and text can inject nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.page_browser import Opened, browsers
from tests.support.running_server import RunningServer

pytestmark = [browsers, pytest.mark.slow]
RENDERED = """([text]) => import('./page/markdown.js').then(({ markdown }) => {
  const box = document.createElement('div'); box.append(...markdown(text)); return box.innerHTML; })"""
CODE_HEAD = '<div class="code-block"><div class="bar"><span class="hint">{}</span></div>'
CODE = CODE_HEAD + '<pre tabindex="0" role="region" aria-label="{}"><code>{}</code></pre></div>'
LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
CASES = [
    ("Some *soft*, **loud** and ***both***, ~~gone~~.",
     "<p>Some <em>soft</em>, <strong>loud</strong> and <strong><em>both</em></strong>, <del>gone</del>.</p>"),
    ("2 * 3 * 4, snake_case_name, 5*3", "<p>2 * 3 * 4, snake_case_name, 5*3</p>"),
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# Title\ntext", "<h4>Title</h4><p>text</p>"),
    ("#Practice", "<p>#Practice</p>"),
    ("`a < b` and ``with ` inside``", "<p><code>a &lt; b</code> and <code>with ` inside</code></p>"),
    ("```python\ndef f():\n    return **1\n```\nafter",
     CODE.format("python", "Code, python", "def f():\n    return **1") + "<p>after</p>"),
    ("```\nstill open", CODE.format("code", "Code", "still open")),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
    ("1. a\n   ```\n   x\n   ```\n2. b", "<ol><li>a" + CODE.format("code", "Code", "x") + "</li><li>b</li></ol>"),
    ("> said\n> twice", "<blockquote><p>said\ntwice</p></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("| a | b |\n|---|--:|\n| 1 | 2 |",
     '<div tabindex="0" role="region" aria-label="Table" class="scroll"><table><thead><tr><th>a</th>'
     '<th class="right">b</th></tr></thead><tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>'),
    ("[docs](https://example.org/a_b_c) https://example.org/x.",
     "<p>" + LINK.format("https://example.org/a_b_c", "docs") + " "
     + LINK.format("https://example.org/x", "https://example.org/x") + ".</p>"),
    ("![a heron](https://example.org/heron.png)",
     "<p>" + LINK.format("https://example.org/heron.png", "a heron") + "</p>"),
    (r"\*not soft\*", "<p>*not soft*</p>"),
    ("**unfinished and *open", "<p>**unfinished and *open</p>"),
]  # fmt: skip
HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "[click](javascript:document.title='owned')",
    "[click](JaVaScRiPt:document.title='owned')",
    "[click](data:text/html,<script>document.title='owned'</script>)",
    "![x](javascript:document.title='owned')",
    "[a](https://example.org\" onmouseover=\"document.title='owned')",
    "<a href=\"javascript:document.title='owned'\">x</a>",
    "```x\" onload=\"document.title='owned'\n<svg onload=document.title='owned'>\n```",
    "| <img src=x onerror=document.title='owned'> |\n|---|\n| <b>x</b> |",
    "> - 1. <iframe srcdoc='<script>top.document.title=1</script>'>",
    "[x]: javascript:document.title='owned'\n\n[x]",
    "<https://example.org/><style>body{display:none}</style>",
]
ALLOWED = {
    "DIV", "P", "PRE", "CODE", "SPAN", "A", "EM", "STRONG", "DEL", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "TABLE",
    "THEAD", "TBODY", "TR", "TH", "TD", "H4", "H5", "H6",
}  # fmt: skip
FOUND = """([text]) => import('./page/markdown.js').then(({ markdown }) => {
  const box = document.createElement('div'); document.body.append(box); box.append(...markdown(text));
  const all = [...box.querySelectorAll('*')];
  return { tags: all.map(e => e.tagName), attributes: all.flatMap(e => e.getAttributeNames()),
    links: all.filter(e => e.href).map(e => e.protocol), title: document.title }; })"""


@pytest.fixture
def page(server: RunningServer, opened: Opened) -> Any:
    return opened(server.url)


def test_markdown_becomes_elements(page: Any) -> None:
    for text, expected in CASES:
        assert page.evaluate(RENDERED, [text]) == expected, text


def test_hostile_text_becomes_no_markup_and_runs_no_script(page: Any) -> None:
    for text in HOSTILE:
        rendered = page.evaluate(FOUND, [text])
        assert set(rendered["tags"]) <= ALLOWED, (text, rendered)
        attributes = {"class", "tabindex", "role", "aria-label", "href", "target", "rel", "start"}
        assert set(rendered["attributes"]) <= attributes
        assert set(rendered["links"]) <= {"https:", "http:", "mailto:"} and rendered["title"] == "Slipstream"


def test_long_and_deeply_nested_texts_render_within_ten_seconds(page: Any) -> None:
    for text in ("*a " * 30_000, "> " * 5_000 + "x", "- " * 5_000 + "x", "[" * 20_000, "`" * 20_001, "|-" * 10_000):
        took = page.evaluate(
            "([text]) => import('./page/markdown.js').then(({ markdown }) => Math.min(...[1, 2, 3].map(() => {"
            "const begun = performance.now(); markdown(text); return performance.now() - begun; })))",
            [text],
        )
        assert took < 10_000, text[:10]


def test_every_prefix_of_a_text_renders(page: Any) -> None:
    text = "\n\n".join(case for case, _ in CASES)
    count = page.evaluate(
        "([text]) => import('./page/markdown.js').then(({ markdown }) => { let count = 0;"
        "for (let end = 0; end <= text.length; end++) { markdown(text.slice(0, end)); count++; } return count; })",
        [text],
    )
    assert count == len(text) + 1
