"""A record that is compared with a template is accepted only if `open_record` accepts it."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import TAIL, View
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.structure import Structure, read_structure
from ckptctl.records.opening import HEAD, Expected, Need, OpenRecord, Templates, Unfit, open_record
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.local import LocalStore

VERSIONS = ["torch-2.2.2", "torch-2.4.1", "torch-2.6.0", "torch-2.9.1"]


def steps(root: Path) -> Iterator[Path]:
    yield from sorted(path.parent for path in root.rglob(".metadata"))


def records(step: Path) -> Iterator[tuple[int, str, int, bytes, Expected]]:
    """The records of the tensors of a step: number, file, offset, bytes, and what they hold."""
    ranges = Ranges([decode_metadata((step / ".metadata").read_bytes())])
    for number in range(len(ranges)):
        owner = ranges.owner(number)
        if hasattr(owner.entry, "chunks") and not owner.transforms:
            name = ranges.file_names[ranges.files[number]]
            at, length = ranges.starts[number], ranges.lengths[number]
            data = (step / name).read_bytes()[at : at + length]
            yield number, name, at, data, Expected.chunk(owner.entry, owner.chunk)


def views(data: bytes) -> list[View]:
    """A record as it is read whole, and by its head and its tail."""
    whole = View(len(data), data, data)
    if len(data) <= HEAD + TAIL:
        return [whole]
    return [whole, View(len(data), data[:HEAD], data[-TAIL:])]


def opened(view: View, expected: Expected) -> OpenRecord | Need | None:
    try:
        return open_record(view, expected)
    except (RecordUnreadable, Unfit):
        return None


def pairs(step: Path) -> list[tuple[bytes, bytes, Expected]]:
    """Two records of each dtype and shape that has several."""
    found: dict[tuple[int, Expected], list[bytes]] = {}
    for _, _, _, data, expected in records(step):
        found.setdefault((len(data), expected), []).append(data)
    return [(a, b, expected) for (_, expected), (a, b, *_) in several(found)]


def several(found: dict) -> list:
    return [item for item in found.items() if len(item[1]) > 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_byte_beside_the_elements_that_is_damaged_is_noticed(dcp_versions, version):
    rng = random.Random(version)
    tried = [pair for step in steps(dcp_versions / version) for pair in pairs(step)]
    n_alike = n_flips = 0
    for first, second, expected in rng.sample(tried, min(len(tried), 6)):
        for view, like in zip(views(first), views(second), strict=True):
            templates = Templates()
            if isinstance(templates.open(view, expected), Need):
                continue
            alike = templates.like(like, expected)
            if alike is None:
                continue
            n_alike += 1
            assert alike.opened() == opened(like, expected)
            for at in {*range(min(HEAD, len(second))), *range(-min(TAIL, len(second)), 0)}:
                damaged = bytearray(second)
                damaged[at] ^= rng.choice((0xFF, 1 << rng.randrange(8)))
                n_flips += 1
                seen = bytes(damaged)
                seen_view = View(len(seen), seen[: len(like.head)], seen[-len(like.tail) :])
                accepted = templates.like(seen_view, expected)
                if accepted is not None:
                    assert accepted.opened() == opened(seen_view, expected), at
    assert n_alike >= 2
    assert n_flips > 1000


@pytest.mark.parametrize("version", VERSIONS)
def test_a_template_opens_every_record_as_it_is_opened_without_one(dcp_versions, version):
    for step in steps(dcp_versions / version):
        templates = Templates()
        for _, _, _, data, expected in records(step):
            for view in views(data):
                assert templates.open(view, expected) == open_record(view, expected)


def test_a_template_is_of_one_dtype_and_one_shape(checkpoints):
    for first, second, expected in pairs(next(steps(checkpoints / "fsdp_8"))):
        templates = Templates()
        templates.open(View(len(first), first, first), expected)
        view = View(len(second), second, second)
        # A tensor without elements has no checksum behind them: its record is parsed.
        assert (templates.like(view, expected) is None) is (0 in expected.sizes)
        assert templates.like(view, expected._replace(dtype="int32")) is None
        assert templates.like(view, expected._replace(sizes=(*expected.sizes, 1))) is None


def structure_of(step: Path) -> Structure:
    ranges = Ranges([decode_metadata((step / ".metadata").read_bytes())])
    store = LocalStore(str(step))
    return read_structure(RecordSource(store, "", ranges), store.list_tree())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_step_with_a_damaged_byte_has_the_same_findings_without_templates(
    checkpoints, tmp_path, monkeypatch, seed
):
    rng = random.Random(seed)
    step = tmp_path / "step"
    shutil.copytree(next(steps(checkpoints / "fsdp_8")), step)
    taken: list[bytes] = []
    like = Templates.like

    def noting(self: Templates, view: View, expected: Expected) -> object:
        alike = like(self, view, expected)
        if alike is not None:
            taken.append(view.head[:HEAD])
        return alike

    with monkeypatch.context() as patched:
        patched.setattr(Templates, "like", noting)
        assert structure_of(step).findings == ()
    by_template = [each for each in records(step) if each[3][:HEAD] in taken]
    assert len(by_template) > 10
    n_found = 0
    for _ in range(150):
        _, name, at, data, _ = rng.choice(by_template)
        n_head, n_tail = min(HEAD, len(data)), min(TAIL, len(data))
        within = rng.choice((rng.randrange(n_head), len(data) - 1 - rng.randrange(n_tail)))
        where = at + within
        path = step / name
        sound = path.read_bytes()
        path.write_bytes(sound[:where] + bytes([sound[where] ^ 0xFF]) + sound[where + 1 :])
        found = structure_of(step)
        with monkeypatch.context() as patched:
            patched.setattr(Templates, "like", lambda *_: None)
            expected = structure_of(step)
        assert (found.findings, found.crcs) == (expected.findings, expected.crcs)
        n_found += bool(found.findings)
        path.write_bytes(sound)
    assert n_found > 75
