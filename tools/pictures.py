"""Draw the pictures of the README from what the commands print.

    python tools/pictures.py

`ckptctl scan` on a root with three damaged steps, and `ckptctl loss` on the log of a
resume that lost its optimizer, as SVG for light and dark pages, in `docs/images/`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "images"
COLUMNS = 84
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
NORMAL = ((36, 41, 47), (207, 34, 46), (17, 99, 41), (125, 78, 0), (9, 105, 218))
BRIGHT = ((230, 237, 243), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255))


def theme(back: tuple[int, int, int], colors: tuple[tuple[int, int, int], ...]) -> TerminalTheme:
    """Text in the first color, then red, green, yellow, blue; magenta and cyan are blue, too."""
    text, red, green, yellow, blue = colors
    gray = (110, 119, 129)
    return TerminalTheme(back, text, [text, red, green, yellow, blue, blue, blue, gray])


THEMES = {
    "light": theme((246, 248, 250), NORMAL),
    "dark": theme((13, 17, 23), BRIGHT),
}


def main() -> int:
    """Draw all pictures anew."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        damaged_root(folder / "ckpt")
        lost_optimizer(folder / "train.jsonl")
        draw("scan", folder, "scan", "ckpt")
        draw("loss", folder, "loss", "train.jsonl")
    return 0


def damaged_root(root: Path) -> None:
    """Five steps that four ranks wrote, and three of them damaged as failures do it."""
    make = (sys.executable, REPOSITORY / "fixtures" / "make.py")
    subprocess.run([*make, "--out", root.parent, "--only", "run_fsdp4"], check=True)
    (root.parent / "run_fsdp4").rename(root)
    (root / "expected.json").unlink()
    now = time.time()
    for number in range(1, 6):
        step = root / f"step_{number}00"
        if number == 5:
            (step / ".metadata").unlink()
        if number == 4:
            (step / "__1_0.distcp").unlink()
        if number == 3:
            os.truncate(step / "__2_0.distcp", 1000)
        for path in step.rglob("*"):
            os.utime(path, (now - (6 - number) * 3600,) * 2)


def lost_optimizer(log: Path) -> None:
    """A run that trains steps 101 to 112 again with another loss."""
    with log.open("w") as written:
        for attempt, steps in enumerate((range(1, 113), range(101, 161))):
            for step in steps:
                lost = attempt * 0.35 * math.exp((100 - step) / 12)
                loss = 2 + 3 / math.sqrt(step) + 0.02 * math.sin(37 * step) + lost
                row = {"step": step, "loss": round(loss, 4), "lr": 3e-4, "tokens": 4096 * step}
                written.write(json.dumps({**row, "attempt": attempt}) + "\n")


def draw(name: str, folder: Path, *command: str) -> None:
    """Run a command and draw what a terminal of `COLUMNS` columns shows."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ckptctl", *command, "--color", "always"],
        check=False,  # `loss` ends with 30
        cwd=folder,
        env={**os.environ, "CKPTCTL_COLUMNS": str(COLUMNS), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    shown = Text.from_ansi(f"\x1b[1m$ ckptctl {' '.join(command)}\x1b[0m\n{done.stdout}".rstrip())
    form = CONSOLE_SVG_FORMAT
    start, end = form.index("    @font-face"), form.index("    .{unique_id}-matrix")
    form = (form[:start] + form[end:]).replace("Fira Code, monospace", FONT)
    form = form.replace("{chrome}", '<rect width="100%" height="100%" rx="8" fill="{back}"/>')
    for page, colors in THEMES.items():
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(shown, soft_wrap=True, highlight=False)
        drawn = console.export_svg(
            title=f"ckptctl {name}",
            theme=colors,
            code_format=form.replace("{back}", colors.background_color.hex),
            unique_id=f"{name}-{page}",
        )
        (IMAGES / f"{name}-{page}.svg").write_text(drawn)


if __name__ == "__main__":
    sys.exit(main())
