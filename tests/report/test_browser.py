"""Headless Chromium lays out the page wide and narrow, light and dark, and prints it."""

import html
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from hierfl.report import Report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("HIERFL_CHROMIUM") or next(
    (path for path in map(shutil.which, NAMES) if path), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium or Chrome on the path: install one, or set HIERFL_CHROMIUM"
)
WIDE, NARROW = 1280, 360

# Measures inside the page what a person would see: overflow, pictures, contrast and the tab order.
MEASURE = """
<script>
addEventListener("load", () => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)\
.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length && (c.length < 4 || c[3] > 0)) return c; } return [255, 255, 255]; };
  const contrasts = [...document.querySelectorAll("h1,h2,p,li,td,th,caption,figcaption,a,footer,strong,span")]\
.filter(e =>
    e.textContent.trim() && !e.classList.contains("skip")).map(e => {
      const pair = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => b - a);
      return [(pair[0] + 0.05) / (pair[1] + 0.05), e.tagName + " " + e.textContent.trim().slice(0, 30)]; })\
.sort((a, b) => a[0] - b[0]);
  const images = [...document.images];
  const found = {
    inner: innerWidth, wide: document.documentElement.scrollWidth, ground: ground(document.body), \
contrast: contrasts[0],
    broken: images.filter(i => !i.complete || !i.naturalWidth).length, images: images.length,
    stretched: images.filter(i => Math.abs(i.width / i.height - i.naturalWidth / i.naturalHeight) > 0.15).length,
    small: Math.min(...images.map(i => i.getBoundingClientRect().width / i.getAttribute("width"))),
    fetched: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
    focus: [...document.querySelectorAll("a[href],[tabindex]")].filter(e => e.tabIndex >= 0)
      .map(e => e.tagName + (e.getAttribute("href") || "")),
    forced: [...document.querySelectorAll("[tabindex]")].filter(e => e.tabIndex > 0).length,
  };
  const out = document.createElement("pre"); out.id = "measured"; out.textContent = JSON.stringify(found);
  parent.document.body.append(out);
});
</script>
"""


@pytest.fixture
def page(report: Report) -> Path:
    return report.path


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the browser once, with its own profile and no network."""
    assert BROWSER is not None
    switches = "headless no-sandbox disable-gpu hide-scrollbars proxy-server=127.0.0.1:9"
    switches += " no-first-run disable-extensions disable-dev-shm-usage"
    fixed = [f"--{switch}" for switch in switches.split()]
    command = [BROWSER, *fixed, f"--user-data-dir={page.parent / 'profile'}", *options]
    piped: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    return subprocess.run([*command, page.as_uri()], timeout=240, **piped)


@cache
def laid_out(page: Path, width: int, dark: bool) -> dict[str, Any]:
    probe = page.with_name(f"probe-{width}-{dark}.html")
    text = page.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>")
    if width < 500:  # a window cannot be narrower than 500 pixels, but a frame can
        frame = f'style="width: {width}px; height: 900px; border: 0"'
        text = f'<!DOCTYPE html><html><body><iframe {frame} srcdoc="{html.escape(text)}"></iframe></body></html>'
    probe.write_text(text, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    window = f"--window-size={max(width, 500)},900"
    done = browse(probe, "--dump-dom", "--virtual-time-budget=4000", window, scheme)
    shown = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown, done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(shown[1]))
    return measured


@pytest.mark.slow("1280")
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_fits_every_width_and_shows_all_pictures(page: Path, width: int) -> None:
    measured = laid_out(page, width, False)
    assert measured["inner"] == width and measured["wide"] <= width
    assert measured["images"] >= 8 and measured["broken"] == measured["stretched"] == 0
    # figures are shown at this share of the size at which their letters are 12 pixels high
    assert measured["small"] > (0.95 if width > 1000 else 0.6)
    assert measured["fetched"] == []


@pytest.mark.slow("False")
@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast_in_light_and_dark_mode(page: Path, dark: bool) -> None:
    measured = laid_out(page, WIDE, dark)
    assert (sum(measured["ground"][:3]) < 200) == dark
    assert measured["contrast"][0] >= 4.5, measured["contrast"]  # WCAG 2.2, level AA


def test_the_keyboard_reaches_everything_in_page_order(page: Path) -> None:
    measured = laid_out(page, WIDE, False)
    assert measured["focus"][0] == "A#main" and measured["forced"] == 0
    links = [name for name in measured["focus"] if name.startswith("A#")][1:]
    assert links[0] == "A#summary" and links[-1] == "A#checks"
    assert len(set(links)) == 9  # the count of checks leads to them too
    assert measured["focus"].count("DIV") >= 5  # scrollable tables


def test_the_page_prints_on_several_pages(page: Path, tmp_path: Path) -> None:
    printed = tmp_path / "report.pdf"
    done = browse(page, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    assert printed.exists(), done.stderr[-2000:]
    content = printed.read_bytes()
    assert content.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", content)) >= 3


def test_a_screenshot_is_not_blank(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "report.png"
    done = browse(page, f"--screenshot={shot}", f"--window-size={WIDE},2000")
    assert shot.exists(), done.stderr[-2000:]
    picture = imread(shot)
    assert picture.shape[:2] == (2000, WIDE) and picture[..., :3].std() > 0.05
