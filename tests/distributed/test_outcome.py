"""An error of one rank arrives on another as it was raised, whatever its class."""

from __future__ import annotations

import pickle
import threading
from functools import partial

import pytest
from error_classes import every_error

from ckptctl.distributed.process_group import RankOutcome, _raise, raise_interruption
from ckptctl.errors import CkptctlError, RanksLost, UsageError

pytestmark = pytest.mark.torch


def test_an_error_of_any_class_is_raised_again_with_its_fields():
    kinds = set(every_error())
    assert len(kinds) > 40
    for kind in kinds:
        fields = {"next_command": "ckptctl explain 1", "extra": 7, "message": "full"}
        sent = pickle.dumps(RankOutcome(error=(kind, "full", fields)))
        with pytest.raises(kind) as caught:
            pickle.loads(sent).get("rank 3 on a: ")
        assert type(caught.value) is kind
        assert caught.value.message == "rank 3 on a: full"
        assert vars(caught.value)["extra"] == 7
        assert caught.value.next_command == "ckptctl explain 1"


def test_an_error_that_cannot_be_sent_arrives_with_its_message_and_exit_code():
    class OfTheJob(UsageError):
        pass

    for error in (OfTheJob("full", next_command="ckptctl scan a"), UsageError("full")):
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        sent = pickle.dumps(RankOutcome.of(partial(_raise, error)))
        with pytest.raises(CkptctlError, match="rank 3 on a: full") as caught:
            pickle.loads(sent).get("rank 3 on a: ")
        assert (caught.value.exit_code, caught.value.next_command) == (2, error.next_command)


class Preempted(Exception):
    """What the handler of a signal in a training script raises."""


Preempted.__module__ = "__main__"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Preempted])
def test_an_interruption_is_raised_on_its_rank_and_ends_the_others(kind):
    failures = {0: (ValueError("a"), None), 2: (kind(), None)}
    with pytest.raises(kind):
        raise_interruption(failures, 2)
    with pytest.raises(
        CkptctlError, match=rf"rank 2 was interrupted \({kind.__name__}\)"
    ) as caught:
        raise_interruption(failures, 0)
    # Where the rank shares its exception, the others take part in that.
    assert type(caught.value) is (CkptctlError if kind is Preempted else RanksLost)
    raise_interruption({0: failures[0]}, 0)
