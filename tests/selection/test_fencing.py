"""The fence of a root: one attempt holds it, whatever else lies in the folder of the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import Fenced, UsageError
from ckptctl.selection.history import Token, check_token, holder, take_token
from ckptctl.storage.opening import open_store
from ckptctl.train.ledger import new_attempt


def put(root: Path, name: str) -> None:
    fence = root / ".ckptctl" / "fence"
    fence.mkdir(parents=True, exist_ok=True)
    (fence / name).write_text("{}")


def test_the_attempt_that_takes_the_next_number_holds_the_root(tmp_path):
    with open_store(str(tmp_path)) as store:
        first, second = (take_token(store, lambda _, name=name: name) for name in ("one", "two"))
        assert (first, second) == (Token(1, "one"), Token(2, "two"))
        assert holder(store) == second
        check_token(store, second)
        with pytest.raises(Fenced, match="attempt two took the root over from this attempt, one"):
            check_token(store, first)


@pytest.mark.parametrize("n_before", [0, 3])
def test_a_later_attempt_holds_the_root_although_the_token_of_the_holder_was_deleted(
    tmp_path, n_before
):
    with open_store(str(tmp_path)) as store:
        for _ in range(n_before):
            take_token(store, new_attempt)
        orphan = take_token(store, new_attempt)
        for token in (tmp_path / ".ckptctl" / "fence").iterdir():
            token.unlink()
        check_token(store, orphan)  # nobody has taken the root over
        later = take_token(store, new_attempt)
        check_token(store, later)
        with pytest.raises(Fenced, match=later.attempt):
            check_token(store, orphan)


def test_a_deleted_token_does_not_end_the_attempt_that_holds_the_root(tmp_path):
    with open_store(str(tmp_path)) as store:
        take_token(store, new_attempt)
        held = take_token(store, new_attempt)
        (tmp_path / ".ckptctl" / "fence" / "0000000002.json").unlink()
        check_token(store, held)


@pytest.mark.parametrize("number", [41, 999_999_998])
def test_a_stray_token_is_followed_by_higher_ones(tmp_path, number):
    put(tmp_path, f"{number:010}.json")
    with open_store(str(tmp_path)) as store:
        first, second = (take_token(store, lambda _, name=name: name) for name in ("one", "two"))
        assert (first.number, second.number) == (number + 1, number + 2)
        with pytest.raises(Fenced):
            check_token(store, first)


def test_where_no_higher_number_is_left_no_attempt_takes_the_root(tmp_path):
    put(tmp_path, "9999999999.json")
    with open_store(str(tmp_path)) as store:
        for _ in range(2):
            with pytest.raises(
                UsageError, match=r"fence/9999999999\.json has the highest possible number"
            ):
                take_token(store, lambda _: "one")
        (tmp_path / ".ckptctl" / "fence" / "9999999999.json").unlink()
        assert take_token(store, lambda _: "one").number == 1


@pytest.mark.parametrize("name", ["99999999999.json", "12.json", "9999999999.json.tmp", "x.json"])
def test_a_name_that_no_attempt_writes_is_no_token(tmp_path, name):
    put(tmp_path, name)
    with open_store(str(tmp_path)) as store:
        assert holder(store) is None
        first, second = (take_token(store, lambda _, name=name: name) for name in ("one", "two"))
        with pytest.raises(Fenced):
            check_token(store, first)
        check_token(store, second)
    assert ckptctl.pick(str(tmp_path)).exit_code == 10
