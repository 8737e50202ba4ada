"""The store with which tests inject faults injects exactly those."""

from __future__ import annotations

import uuid

import pytest
from storage.faulty import FaultyStore

from ckptctl.errors import StorageUnavailable
from ckptctl.storage.contract import Span, Store, StoreKind
from ckptctl.storage.opening import open_store

ERROR = StorageUnavailable("broken by the test")


@pytest.fixture
def store() -> FaultyStore:
    """Two files in memory."""
    below = open_store(f"memory://{uuid.uuid4().hex}")
    below.put("a", b"1")
    below.put("b", b"2")
    return FaultyStore(below)


def test_it_is_a_store_and_changes_nothing_by_itself(store):
    same: Store = store
    with same:
        assert [i.path for i in same.list_dir()] == [i.path for i in same.list_tree()]
        assert [data for _, data in same.read_spans([Span("a", 0, 1), Span("b", 0, 1)])] == [
            b"1",
            b"2",
        ]
    assert store.calls == {"list_dir": 1, "list_tree": 1, "read_spans": 1, "span": 2}


def test_only_the_call_that_was_named_fails(store):
    store.fail("read", ERROR, nth=2)
    assert store.read("a", limit=1) == b"1"
    with pytest.raises(StorageUnavailable):
        store.read("a", limit=1)
    assert store.read("a", limit=1) == b"1"


def test_a_fault_that_lasts_goes_on(store):
    store.fail("list_dir", ERROR, nth=2, lasts=True)
    store.list_dir()
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            store.list_dir()


def test_a_fault_of_one_path_leaves_the_others(store):
    store.fail("span", ERROR, path="b")
    reading = store.read_spans([Span("a", 0, 1), Span("b", 0, 1)])
    assert next(reading)[1] == b"1"
    with pytest.raises(StorageUnavailable):
        next(reading)


def test_listings_can_be_changed_and_the_price_too(store):
    store.show(lambda listing: [info for info in listing if info.path != "a"])
    assert [info.path for info in store.list_dir()] == ["b"]
    assert FaultyStore(store, kind=StoreKind.NETWORK).kind is StoreKind.NETWORK
