"""`--html`: pages that need nothing else, say what the terminal says, and fit a phone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAMES = ("scan", "loss", "history")
VOID = {"meta", "img", "rect", "line", "circle", "path", "polyline", "br"}


class Page(HTMLParser):
    """The text of a page by tag; a tag that is not closed in order is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.source = path.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


@pytest.fixture(scope="module")
def pages(framework_roots, tmp_path_factory) -> dict[str, Path]:
    """A page of each command, of a root whose name is markup."""
    folder = tmp_path_factory.mktemp("pages")
    root = folder / "<script>alert(1)<&script>"
    shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", root)
    (root / "step_30" / ".metadata").unlink()
    log = folder / "train.jsonl"
    rows = [(step, 3.0 - step / 100) for step in range(1, 41)]
    rows += [(step, 3.6 - step / 100) for step in range(31, 60)]
    log.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in rows))
    job = ("--", sys.executable, "-c", "raise SystemExit(9)")
    run_ckptctl("run", "--root", root, "--max-restarts", 1, "--backoff", "0s", *job)
    made = {name: folder / f"{name}.html" for name in ("scan", "loss", "history")}
    for name, path in made.items():
        done = run_ckptctl(name, log if name == "loss" else root, "--html", path, "--timeout", 99)
        assert path.exists(), done.stderr
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_well_formed_and_needs_nothing_else(pages, name):
    page = Page(pages[name])
    assert len(page.texts["h1"]) == 1
    assert not {"script", "link", "iframe"} & page.texts.keys()
    assert re.findall(r"(?:href|src|url)\s*[=(]", page.source) == []


def test_the_page_of_a_scan_has_every_step_and_its_verdict(pages, tmp_path):
    page = Page(pages["scan"])
    assert page.texts["h1"][0].startswith("resume from step 20: complete")
    block, _ = page.texts["pre"]  # the other one is for a phone
    rows = re.findall(r"^. +(30|20|10) +(\w+)(.*(?:\n    .*)*)", block, re.M)
    assert [row[:2] for row in rows] == [
        ("30", "incomplete"),
        ("20", "complete"),
        ("10", "complete"),
    ]
    assert "metadata.missing" in rows[0][2]
    assert "← pick" in rows[1][2]
    assert re.search("^next: ckptctl verify .* --timeout 99", block, re.M)
    assert max(map(len, block.splitlines()[:-1])) <= 120


def test_the_page_of_a_loss_has_the_verdict_and_the_table(pages):
    page = Page(pages["loss"])
    assert page.texts["h1"][0].startswith("discontinuous: ")
    assert "<svg" in page.source
    assert any("difference" in text and "+" in text for text in page.texts["pre"])


def test_the_page_of_a_history_has_every_attempt(pages, tmp_path):
    page = Page(pages["history"])
    (block,) = page.texts["pre"]
    assert block.count("unknown cause") == 2


def test_a_page_that_cannot_be_written_ends_with_2(framework_roots, tmp_path):
    root = framework_roots / "kempnerforge" / "checkpoints"
    done = run_ckptctl("scan", root, "--html", tmp_path / "missing" / "page.html", "--json")
    assert done.returncode == 2
    assert "the page cannot be written" in validated(done.stdout)["message"]


PROBE = """<script>
addEventListener("load", () => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  function over(color, under) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b].map((each, i) => (each * a + under[i] * (255 - a)) / 255);
  }
  function luminance(rgb) {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((each) => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  let least = 21;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const box = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || box.closest("svg, script")) continue;
    const boxes = [];
    for (let each = box; each; each = each.parentElement) boxes.unshift(each);
    let back = dark ? [18, 18, 18] : [255, 255, 255];
    for (const each of boxes) back = over(getComputedStyle(each).backgroundColor, back);
    const text = luminance(over(getComputedStyle(box).color, back));
    const [low, high] = [text, luminance(back)].sort((a, b) => a - b);
    least = Math.min(least, (high + 0.05) / (low + 0.05));
  }
  frameElement.title = [document.documentElement.scrollWidth, least.toFixed(2), dark].join(" ");
});
</script></body>"""
"""States the width of the page, and the lowest contrast of a text as WCAG 2 defines it.

Before the page is loaded, the browser may not know the colour scheme yet."""


@pytest.fixture(scope="module", params=["dark", "light"])
def measured(pages, tmp_path_factory, request) -> tuple[str, dict[str, list[str]]]:
    """What `PROBE` states about each page in a browser with a colour scheme.

    All are frames of one document: to start a browser costs a second of processor time.
    """
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("browser")
    frames = []
    for name, page in pages.items():
        source = page.read_text()
        assert "content=\"default-src 'none';" in source
        source = source.replace("default-src 'none'", "script-src 'unsafe-inline'")
        source = html.escape(source.replace("</body>", PROBE))
        frames.append(
            f'<iframe id="{name}" width="500" frameborder="0" srcdoc="{source}"></iframe>'
        )
    whole = folder / "frames.html"
    whole.write_text(f"<!doctype html><meta charset='utf-8'>{''.join(frames)}")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--window-size=600,900"),
            f"--blink-settings=preferredColorScheme={['dark', 'light'].index(request.param)}",
            *(f"--user-data-dir={folder / 'profile'}", "--dump-dom", whole.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r'<iframe id="(\w+)".*? title="(.*?)"></iframe>', done.stdout, re.DOTALL)
    return request.param, {name: title.split() for name, title in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_a_phone_and_has_the_contrast_of_wcag_aa(measured, name):
    scheme, stated = measured
    width, contrast, dark = stated[name]
    assert (int(width) <= 500, dark) == (True, str(scheme == "dark").lower())
    assert float(contrast) >= 4.5


def test_a_scan_has_lines_for_a_phone(pages):
    """What is wider than the screen of a phone scrolls sideways, but for a whole command."""
    narrow = pages["scan"].read_text().partition("<div class=narrow>")[2]
    (text,) = re.findall("<pre tabindex=0>(.*?)</pre>", narrow, re.S)
    lines = html.unescape(re.sub("<[^>]*>", "", text)).splitlines()
    assert [line for line in lines if len(line) > 46 and not re.match(r"next:|  /", line)] == []
    assert any(line[1:].startswith("    20  complete") for line in lines)
    width = re.search(r'viewBox="0 0 ([0-9]+) ', narrow)
    assert width is not None
    assert int(width[1]) <= 380
