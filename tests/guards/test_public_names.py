"""The public names: whoever adds or removes one changes this list, and says so in the changelog."""

import inspect

import pytest

import ckptctl

PUBLIC = {
    *("doctor", "Advice", "Diagnosis"),
    *("classify", "Classification", "Evidence"),
    *("mark", "pick", "scan", "seal", "show", "verify", "watch", "Watched"),
    *("Answer", "Contents", "Mark", "Marked", "PassedOver", "Pick", "Report", "Scan", "Sealed"),
    "MarkKind",
    *("PruneDecision", "Pruned", "prune"),
    *("Attempt", "NodeOptions", "Supervised", "keep_running"),
    *("Check", "Preflight", "preflight"),
    *("RecoveryCost", "recovery_cost"),
    *("DataUse", "data_use"),
    *("Goodput", "PastAttempt", "RunHistory", "run_history"),
    *("reshard", "RankShare", "Reshard"),
    *("LossReport", "LossVerdict", "check_loss"),
    *("diff", "Diff", "Difference", "convert", "Converted"),
    *("Finding", "Level", "Severity", "StatePart", "TrainState", "Verdict", "WorldSize"),
    *("ContentOptions", "PickPolicy", "Requirements", "StorageOptions", "TrainOptions"),
    *("AccessDenied", "CkptctlError", "MissingExtra", "NothingToResume", "PathNotFound"),
    *("StorageError", "StorageUnavailable", "UsageError"),
}


def test_the_public_names_are_pinned():
    assert set(ckptctl.__all__) == PUBLIC


def test_every_public_name_is_there_and_says_what_it_is():
    for name in ckptctl.__all__:
        assert inspect.getdoc(getattr(ckptctl, name)), name


def test_every_public_name_is_offered_and_no_other_is_invented():
    assert set(dir(ckptctl)) >= PUBLIC
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ckptctl.no_such_name
