"""The report in a real browser: it is filled in, readable, and never wider than its window."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.report import write_report
from slipstream.models.toy import ToyTokenizer
from tests.support.page_browser import Opened, browsers
from tests.support.toy_runs import make

pytestmark = [pytest.mark.slow, browsers]

NARROW, PHONE, WIDE = 320, 400, 1200  # pixels
# what the page measures of itself, in CSS pixels
PROBE = """() => {
const all = [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('svg'));
const shown = e => e.getBoundingClientRect().width > 0;
const texts = [...document.querySelectorAll('p, td, th, li, figcaption, dt, dd, .text')].filter(shown);
const labels = [...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect());
const luminance = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const paper = luminance(getComputedStyle(document.body).backgroundColor);
const contrast = e => { const ink = luminance(getComputedStyle(e).color);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); };
const scrolled = [...document.querySelectorAll('.scroll')];
scrolled.forEach(e => { e.scrollLeft = 9999; });
const tokens = [...document.querySelectorAll('.acc, .rej, .own')];
return { page: document.documentElement.scrollWidth, window: innerWidth,
  outside: all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length,
  rows: document.querySelectorAll('tbody tr').length,
  broken: [...document.querySelectorAll('.whole')].filter(e => e.offsetHeight > 1.6 * parseFloat(
    getComputedStyle(e).fontSize)).length,
  empty: [...document.querySelectorAll('td')].filter(e => !e.textContent.trim()).length,
  charts: document.querySelectorAll('figure svg').length, drawn: [...document.querySelectorAll('figure svg')]
    .filter(e => e.querySelectorAll('path').length > 20 && e.getBoundingClientRect().height > 100).length,
  smallest: Math.min(...texts.map(e => parseFloat(getComputedStyle(e).fontSize))),
  label: Math.min(...labels.map(r => Math.max(r.width, r.height))),
  sticky: Math.max(...scrolled.map(e => Math.abs(e.querySelector('td').getBoundingClientRect().left -
    e.getBoundingClientRect().left))), first: Math.max(...scrolled.map(e => e.querySelector('td').offsetWidth)),
  head: Math.max(...[...document.querySelectorAll('thead')].map(e => e.offsetHeight)),
  contrast: Math.min(...[...texts, ...tokens].map(contrast)), paper: paper, tokens: tokens.length };
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("runs") / "bench", batches=[1], repeats=1)
    return write_report(folder, ToyTokenizer())


Measure = Callable[..., dict[str, float]]


@pytest.fixture
def measured(page: Path, tmp_path: Path, opened: Opened) -> Measure:
    """Measures the page in a window of this width. edit: changes its text before."""

    def measure(width: int, edit: Callable[[str], str] = str, **context: Any) -> dict[str, float]:
        copy = tmp_path / "copy.html"
        copy.write_text(edit(page.read_text()))
        window = opened(copy.as_uri(), viewport={"width": width, "height": 900}, **context)
        values: dict[str, float] = window.evaluate(PROBE)
        return values

    return measure


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_report_has_no_empty_cells_draws_its_charts_and_fits_the_window(measured: Measure, width: int) -> None:
    values = measured(width)
    assert values["window"] == width and values["page"] <= width and values["outside"] == 0
    assert values["rows"] >= 12 and values["empty"] == 0
    assert values["charts"] == values["drawn"] == 4
    assert values["smallest"] >= 13 and values["tokens"] > 20
    assert values["sticky"] <= 1 and values["first"] <= max(150, width / 4)  # the first column stays visible
    assert values["head"] <= 60  # no blank band above the first column's head


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_options_of_a_command_are_not_broken(measured: Measure, width: int) -> None:
    """Each word is as high as one line."""
    options = " ".join(["--drafter hybrid --num-draft-tokens 4 --max-batch-size 8"] * 4)
    words = "".join(f'<span class="whole">{word}</span> ' for word in options.split())

    def edit(text: str) -> str:
        return text.replace("<main>", f'<main><p><code class="command">{words}</code></p>', 1)

    assert measured(width, edit=edit)["broken"] == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_color_schemes(measured: Measure, scheme: str) -> None:
    values = measured(PHONE, color_scheme=scheme)
    assert (values["paper"] > 0.5) == (scheme == "light")
    assert values["contrast"] >= 4.5  # WCAG 2.2, 1.4.3
    assert values["label"] >= 8  # the height of a letter's line, in a picture shrunk to the window


@pytest.mark.exhaustive
def test_the_browser_probe_notices_a_page_that_is_too_wide(measured: Measure) -> None:
    values = measured(PHONE, edit=lambda text: text.replace("overflow-x: auto", "overflow-x: visible"))
    assert values["page"] > PHONE
