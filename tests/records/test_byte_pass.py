"""Reading many files at once: where the bytes go, and when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from storage.faulty import FaultyStore

from ckptctl.records import byte_pass
from ckptctl.records.byte_pass import Limits, Piece, read_runs
from ckptctl.storage.contract import StoreKind
from ckptctl.storage.local import LocalStore


class Wrong(Exception):
    """What a run raises."""


@dataclass
class Pieces:
    """A run over a file of ten bytes, in pieces of one byte, or in one piece."""

    path: str
    at_once: bool = False
    fails: bool = False
    pause_s: float = 0.0
    others_began: threading.Event = field(default_factory=threading.Event)
    memory: bytearray = field(default_factory=lambda: bytearray(10))
    taken: list[bytes] = field(default_factory=list)
    n_bytes = 10

    def pieces(self, limit: int) -> Iterator[Piece]:
        n_each = 10 if self.at_once else 1
        for at in range(0, 10, n_each):
            yield Piece(at, n_each, into=[memoryview(self.memory)[at : at + n_each]])

    def take(self, piece: Piece, data: memoryview) -> None:
        self.taken.append(bytes(data))
        if self.fails:
            assert self.others_began.wait(60)
            raise Wrong
        self.others_began.set()
        time.sleep(self.pause_s)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    return LocalStore(str(tmp_path))


def test_bytes_are_read_to_where_a_run_wants_them(store):
    runs = [Pieces("a"), Pieces("b")]
    assert read_runs(store, runs, Limits(jobs=2)) == 20
    assert [bytes(run.memory) for run in runs] == [b"0123456789", b"abcdefghij"]


@pytest.mark.parametrize("kind", [StoreKind.LOCAL, StoreKind.OBJECT])
def test_memory_that_is_longer_than_a_read_is_read_part_by_part(store, kind, monkeypatch):
    monkeypatch.setattr(byte_pass, "PIECE_BYTES", 8)
    monkeypatch.setattr(byte_pass, "IN_PLACE_BYTES", 4)
    monkeypatch.setattr(byte_pass, "OBJECT_PIECE_BYTES", 4)
    run = Pieces("b", at_once=True)
    assert read_runs(FaultyStore(store, kind=kind), [run], Limits()) == 10
    assert run.taken == [b"abcd", b"efgh", b"ij"]
    assert bytes(run.memory) == b"abcdefghij"


def test_after_an_error_nothing_is_written_any_more(store):
    slow = Pieces("b", pause_s=0.05)
    failing = Pieces("a", fails=True, others_began=slow.others_began)
    # Other tests may have left a thread that reads from a store which never answers.
    of_others = set(threading.enumerate())
    with pytest.raises(Wrong):
        read_runs(store, [failing, slow], Limits(jobs=2))
    left = bytes(slow.memory)
    for thread in set(threading.enumerate()) - of_others:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert bytes(slow.memory) == left < b"abcdefghij"
