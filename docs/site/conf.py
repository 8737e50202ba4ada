"""The documentation as a site: `make docs` builds it from the same Markdown that the tree shows.

The source is the repository, so every link between documents, code and pages of findings is
the one that is checked and clicked in the tree.
"""

import re
import shutil
from pathlib import Path

from ckptctl.cli.explain import page

project = "ckptctl"
author = "the ckptctl developers"
copyright = "the ckptctl developers"
repository = Path(__file__).resolve().parents[2]
release = re.search(r'^version = "(.+)"', (repository / "pyproject.toml").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx_copybutton"]
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/*/*.md",
    "ckptctl/pages/*.md",
    "examples/*/*.md",
    "runbooks/*.md",
    "fixtures/*.md",
    "bench/results.md",
    "tests/campaign/results.md",
]
exclude_patterns = ["docs/site"]
root_doc = "README"
nitpicky = True

myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = [
    "misc.highlighting_failure",  # the screens of a console hold pictures
    "toc.not_included",
]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["words.css"]
html_title = f"ckptctl {release}"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["index.html"]  # leads to README.html
copybutton_prompt_text = "$ "


def setup(app):
    """Add the table of contents to the README, and the verdict to the page of a finding."""
    contents = (Path(__file__).parent / "contents.md").read_text()

    def add(_, document, source):
        if document == root_doc:
            source[0] += contents
        elif document.startswith("ckptctl/pages/"):
            source[0] = page(document.removeprefix("ckptctl/pages/")).text

    def copy_pictures(app, _):
        # Sphinx copies the pictures of Markdown, and not those of `<picture>`.
        shutil.copytree(repository / "docs/images", app.outdir / "docs/images", dirs_exist_ok=True)

    app.connect("source-read", add)
    app.connect("build-finished", copy_pictures)
