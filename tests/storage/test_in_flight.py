"""Reads run at once up to a limit, and end when their results are not needed."""

from __future__ import annotations

import threading

import pytest

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.contract import Span
from ckptctl.storage.in_flight import read_in_flight


def spans(n: int, length: int = 1) -> list[Span]:
    return [Span(str(i), 0, length) for i in range(n)]


def test_as_many_reads_as_the_width_run_at_once_and_no_more():
    together = threading.Barrier(4)

    def read(span: Span) -> bytes:
        together.wait(30)
        return span.path.encode()

    found = [data for _, data in read_in_flight(read, spans(12), width=4)]
    assert found == [str(i).encode() for i in range(12)]


def test_bytes_that_nobody_takes_bound_what_is_asked_for():
    asked: list[str] = []

    def read(span: Span) -> bytes:
        asked.append(span.path)
        return bytes(span.length)

    reading = read_in_flight(read, spans(20, 10), width=16, max_bytes=30)
    for n in range(5):
        next(reading)
        assert len(asked) <= n + 4
    assert len(list(reading)) == 15


def test_one_span_larger_than_the_bound_is_read_alone():
    (read,) = read_in_flight(lambda span: bytes(span.length), spans(1, 100), max_bytes=10)
    assert len(read[1]) == 100


def test_an_error_comes_at_its_turn_and_ends_the_reading():
    def read(span: Span) -> bytes:
        if span.path == "3":
            raise StorageUnavailable("broken by the test")
        return b"x"

    reading = read_in_flight(read, spans(100), width=2)
    assert [next(reading)[0].path for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(StorageUnavailable):
        next(reading)
    assert list(reading) == []


def test_the_threads_end_with_the_reading():
    others = set(threading.enumerate())
    reading = read_in_flight(lambda span: b"x", spans(100))
    next(reading)
    started = set(threading.enumerate()) - others
    assert started
    reading.close()
    for thread in started:
        thread.join()
        assert not thread.is_alive()
