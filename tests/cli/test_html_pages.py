"""The pages of a transcript and a drill: they need nothing else, and fit a phone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import run_ckptctl

from ckptctl.drill.results import Drilled, Trial, as_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAMES = ("transcript", "drill")
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
    """A page of each kind, of a root whose name is markup."""
    folder = tmp_path_factory.mktemp("pages")
    root = folder / "<script>alert(1)<&script>"
    shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", root)
    (root / "step_30" / ".metadata").unlink()
    run_ckptctl("runbook", "run", "rb-7", root, "--dry-run", "--transcript", folder)
    made = {name: folder / f"{name}.html" for name in NAMES}
    made["drill"].write_text(as_html(drilled(str(root))))
    return made


def drilled(root: str) -> Drilled:
    """A drill with a fault that the job survives and one that it does not."""
    known = dict.fromkeys(field.name for field in fields(Trial))
    known |= dict.fromkeys(("ranks", "nodes", "excluded", "evidence", "problems"), ())
    known |= {"description": "rank 1 was killed", "folder": f"{root}/" + "long/" * 40}
    survived = Trial(**known | {"fault": "rank-killed"})
    failed = Trial(**known | {"fault": "rank-stopped", "problems": ("the job was not resumed",)})
    trials, grade = (survived, failed), "the job survives 1 of 2 faults, not rank-stopped"
    return Drilled(("./train",), root, 20, 0, "copy", True, True, trials, grade, 33, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_well_formed_and_needs_nothing_else(pages, name):
    page = Page(pages[name])
    assert len(page.texts["h1"]) == 1
    assert not {"script", "link", "iframe"} & page.texts.keys()
    assert re.findall(r"(?:href|src|url)\s*[=(]", page.source) == []


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
