"""The report in a real browser: it is filled in, readable, and never wider than its window."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest

from slipstream.bench.report import write_report
from slipstream.models.toy import ToyTokenizer
from tests.support.toy_runs import make

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, google-chrome or chromium-browser on PATH"),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
NARROW, PHONE, WIDE = 320, 400, 1200  # pixels
# the page measures itself and puts the result into the title of the page around it; sizes in CSS pixels
PROBE = """<script>
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
const values = { page: document.documentElement.scrollWidth, window: innerWidth,
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
top.document.title = Object.entries(values).map(([name, value]) => name + '=' + value).join(';');
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("runs") / "bench", batches=[1], repeats=1)
    return write_report(folder, ToyTokenizer())


def browse(page: Path, folder: Path, *more: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture
def measured(page: Path, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Measurements from a copy of the page that contains the probe; only the copy may run scripts.

    The copy is shown in a frame, since the window of a browser has a minimum width.
    """

    def measure(width: int, *more: str, edit: Callable[[str], str] = lambda text: text) -> dict[str, float]:
        text = page.read_text()
        assert text.count("default-src 'none'") == 1 and text.count("</body>") == 1
        text = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
        inner = escape(edit(text).replace("</body>", f"{PROBE}</body>"))
        copy = tmp_path / "copy.html"
        frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{inner}"></iframe>'
        copy.write_text(f'<!DOCTYPE html><meta charset="utf-8"><title></title>{frame}')
        title = re.search(
            r"<title>(.*?)</title>", browse(copy, tmp_path, "--window-size=1300,900", "--dump-dom", *more)
        )
        assert title is not None and "page=" in title[1]
        return {name: float(value) for name, _, value in (part.partition("=") for part in title[1].split(";"))}

    return measure


@pytest.mark.parametrize("width", [NARROW, PHONE, WIDE])
def test_the_report_has_no_empty_cells_draws_its_charts_and_fits_the_window(measured, width: int) -> None:
    values = measured(width)
    assert values["window"] == width and values["page"] <= width and values["outside"] == 0
    assert values["rows"] >= 12 and values["empty"] == 0
    assert values["charts"] == values["drawn"] == 4
    assert values["smallest"] >= 13 and values["tokens"] > 20
    assert values["sticky"] <= 1 and values["first"] <= max(150, width / 4)  # the first column stays visible
    assert values["head"] <= 60  # no blank band above the first column's head


@pytest.mark.parametrize("width", [NARROW, PHONE, WIDE])
def test_options_of_a_command_are_not_broken(measured, width: int) -> None:
    """Each word is as high as one line."""
    options = " ".join(["--drafter hybrid --num-draft-tokens 4 --max-batch-size 8"] * 4)
    words = "".join(f'<span class="whole">{word}</span> ' for word in options.split())

    def edit(text: str) -> str:
        return text.replace("<main>", f'<main><p><code class="command">{words}</code></p>', 1)

    assert measured(width, edit=edit)["broken"] == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_colour_schemes(measured, scheme: str) -> None:
    values = measured(PHONE, f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    assert (values["paper"] > 0.5) == (scheme == "light")
    assert values["contrast"] >= 4.5  # WCAG 2.2, 1.4.3
    assert values["label"] >= 8  # the height of a letter's line, in a picture shrunk to the window


def test_the_browser_probe_notices_a_page_that_is_too_wide(measured) -> None:
    values = measured(PHONE, edit=lambda text: text.replace("overflow-x: auto", "overflow-x: visible"))
    assert values["page"] > PHONE


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_a_screenshot_of_the_report_can_be_taken(page: Path, tmp_path: Path, width: int) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path, f"--window-size={width},900", f"--screenshot={picture}")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20]) == width
