"""Each command that reads a step, while another process writes to it: the answer is a change.

What happens does so when the command opens or lists a file, so that each run is the same. Every
answer but 26 must be that of the step as it was when it was listed.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from every_case import all_cases
from made_roots import script

import ckptctl
from ckptctl.errors import CkptctlError

pytestmark = pytest.mark.torch

MAX_MOMENTS = 6


class _Moments:
    """Counts what is opened or listed under a folder, and acts once before the `nth`.

    A thread of the command may act: the watch ends after it.
    """

    def __init__(self) -> None:
        self.under: str | None = None
        self.seen: list[str] = []
        self.nth = 0
        self.act: Callable[[], object] = lambda: None
        self._one_acts = threading.RLock()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        under = self.under
        if under is None or event not in ("open", "os.scandir"):
            return
        path = str(args[0])
        if path.startswith("/") and not path.startswith(under):
            return
        with self._one_acts:
            if self.under is None:
                return
            self.seen.append(path)
            if len(self.seen) == self.nth:
                self.under = None
                self.act()
                self.under = under

    @contextmanager
    def watched(self, folder: Path, nth: int, act: Callable[[], object]) -> Iterator[None]:
        self.under, self.seen, self.nth, self.act = str(folder), [], nth, act
        try:
            yield
        finally:
            with self._one_acts:
                self.under = None


@pytest.fixture(scope="module")
def moments() -> _Moments:
    return _Moments()


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100 and 200 without a seal, and another save of step 200."""
    folder = tmp_path_factory.mktemp("saves")
    for name in ("run", "other"):
        with script(folder / name) as ckpt:
            ckpt.resume("none")
            for number in (100, 200):
                ckpt.save(number, tokens=number if name == "run" else 10**12)
        for own in folder.rglob(".ckptctl"):
            shutil.rmtree(own)
    return folder


def overwritten(step: Path, other: Path) -> None:
    """The save of a job that keeps the names of the files."""
    for file in sorted(other.iterdir(), reverse=True):
        (step / file.name).write_bytes(file.read_bytes())


def replaced(step: Path, other: Path) -> None:
    """A save that was made aside."""
    step.rename(step.parent / "aside")
    shutil.copytree(other, step)


def cut(step: Path, _: Path) -> None:
    """A save over the step has begun."""
    shard = next(iter(step.glob("*.distcp")))
    os.truncate(shard, shard.stat().st_size // 2)


def removed(step: Path, _: Path) -> None:
    """The rotation of a job."""
    shutil.rmtree(step)


def without_shard(step: Path, _: Path) -> None:
    next(iter(step.glob("*.distcp"))).unlink()


CHANGES = (overwritten, replaced, cut, removed, without_shard)
COMMANDS: dict[str, Callable[[str, str, str], object]] = {
    "verify at listing": lambda step, *_: ckptctl.verify(step, level="listing"),
    "verify": lambda step, *_: ckptctl.verify(step),
    "verify at content": lambda step, *_: ckptctl.verify(step, level="content"),
    "show": lambda step, *_: ckptctl.show(step),
    "seal": lambda step, *_: ckptctl.seal(step),
    "pin": lambda step, *_: ckptctl.mark(step, "pinned"),
    "diff": lambda step, older, _: ckptctl.diff(older, step),
    "diff of values": lambda step, older, _: ckptctl.diff(step, older, values=True),
    "reshard": lambda step, _, new: ckptctl.reshard(step, f"{new}/step_200", world_size=2),
    "convert": lambda step, _, new: ckptctl.convert(step, f"{new}/model.pt"),
}


def code_of(ask: Callable[[str, str, str], object], root: Path, new: Path) -> int:
    try:
        answer = ask(str(root / "step_200"), str(root / "step_100"), str(new))
    except CkptctlError as error:
        return error.exit_code
    return answer.exit_code  # type: ignore[attr-defined]


def fresh(saves: Path, root: Path) -> Path:
    for folder in (root, root.with_name("new")):
        shutil.rmtree(folder, ignore_errors=True)
    root.with_name("new").mkdir()
    return Path(shutil.copytree(saves / "run", root))


def moments_of(seen: list[str], name: str) -> list[int]:
    """A few of the moments behind the listing of a step, the first and the last among them."""
    names = [path.rpartition("/")[2] for path in seen]
    opened = (at for at, each in enumerate(names[:-1]) if each == name and names[at + 1].isdigit())
    first, last = next(opened) + 3, len(seen)
    n = min(MAX_MOMENTS, last - first + 1)
    return sorted({first + (last - first) * each // max(1, n - 1) for each in range(n)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_that_changes_while_it_is_read_is_neither_damaged_nor_missing(
    saves, tmp_path, moments, command
):
    ask, root, new = COMMANDS[command], tmp_path / "root", tmp_path / "new"
    code_of(ask, fresh(saves, root), new)  # imports
    fresh(saves, root)
    with moments.watched(root, 0, lambda: None):
        quiet = code_of(ask, root, new)
    opened = moments.seen
    with all_cases() as case:
        for change, nth in product(CHANGES, moments_of(opened, "step_200")):
            step = fresh(saves, root) / "step_200"
            other = saves / "other" / "step_200"
            with case(f"{change.__name__} before {opened[nth - 1]} ({nth})"):
                with moments.watched(root, nth, partial(change, step, other)):
                    code = code_of(ask, root, new)
                assert code in (26, quiet)


@pytest.mark.parametrize("command", ["seal", "verify at content"])
def test_a_shard_that_returns_between_a_listing_and_a_read_contradicts_nothing(
    saves, tmp_path, moments, command
):
    ask, root, new = COMMANDS[command], tmp_path / "root", tmp_path / "new"
    with moments.watched(fresh(saves, root), 0, lambda: None):
        quiet = code_of(ask, root, new)
    last = len(moments.seen)
    with all_cases() as case:
        for nth, later in product(range(last - 5, last + 1), range(1, 5)):
            (shard,) = (fresh(saves, root) / "step_200").glob("*.distcp")
            bytes_of_shard = shard.read_bytes()

            def vanish(shard: Path = shard, data: bytes = bytes_of_shard, n: int = later) -> None:
                shard.unlink()
                moments.nth += n
                moments.act = partial(shard.write_bytes, data)

            with case(f"gone before opening {nth}, back {later} later"):
                with moments.watched(root, nth, vanish):
                    code = code_of(ask, root, new)
                assert code in (26, quiet)


def test_pick_inspects_a_step_again_that_another_save_replaced(saves, tmp_path, moments):
    root = tmp_path / "root"
    ckptctl.pick(str(fresh(saves, root)))
    with moments.watched(root, 0, lambda: None):
        ckptctl.pick(str(root))
    opened = moments.seen
    for level in ("listing", "structure", "content"):
        for nth in moments_of(opened, "step_200"):
            step = fresh(saves, root) / "step_200"
            act = partial(replaced, step, saves / "other" / "step_200")
            with moments.watched(root, nth, act):
                found = ckptctl.pick(str(root), level=level)
            assert found.path == str(step), (level, nth)
