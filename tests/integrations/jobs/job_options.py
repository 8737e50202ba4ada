"""What the small jobs of all frameworks share: arguments, how they end, the code of their pages."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptctl import CkptctlError

PAGES = Path(__file__).resolve().parents[3] / "docs" / "frameworks"


def job_options() -> argparse.Namespace:
    """Where a job saves, how far it trains, how it resumes, and when it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=12)
    parser.add_argument("--epoch", type=int, default=12, help="steps in an epoch")
    parser.add_argument("--sharded", action="store_true", help="each rank saves its part")
    parser.add_argument("--dpo", action="store_true", help="train by preferences")
    parser.add_argument("--without-scheduler", action="store_true", help="leave it as it begins")
    parser.add_argument("--keep", type=int, help="how many steps the framework keeps")
    parser.add_argument("--kill-at", type=int, default=0, help="call `die` at this step")
    parser.add_argument("--wrong", action="store_true", help="train with other weights than loaded")
    parser.add_argument("--stop", action="store_true", help="end with 30 on a discontinuous loss")
    return parser.parse_args()


def define_torchvision_operators() -> None:
    """Let torchvision be imported where its operators are built for CUDA."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


def die() -> None:
    """SIGKILL on every rank, once the save before is sealed: it would else depend on chance."""
    import torch

    for thread in threading.enumerate():
        if thread.name == "ckptctl-seal":
            thread.join()
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def ending(options: argparse.Namespace) -> Iterator[None]:
    """End the job with the exit code of an error of ckptctl, on every rank as `--stop` asks."""
    import torch

    try:
        yield
    except CkptctlError as error:
        print(f"error: {error}", file=sys.stderr)
        if options.stop:  # on every rank: torchrun ends the others once one has left
            torch.distributed.barrier()
        sys.exit(error.exit_code)


def run_recipe(
    page: str, changes: dict[str, str], *, part: int = 0, **names: Any
) -> dict[str, Any]:
    """Run a part of the Python code of a page, with `changes` to its text; its names afterwards.

    `names` are what the code of a reader would have made before.
    """
    text = (PAGES / f"{page}.md").read_text()
    code = re.findall(r"^```python [^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[part]
    for written, wanted in changes.items():
        assert written in code, f"{page}.md has no {written}"
        code = code.replace(written, wanted)
    exec(compile(code, f"{page}.md", "exec"), names)
    return names
