"""Every call of the storage fails, one after the other: the answer is right, or unknown."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage.faulty import VERBS, FaultyStore

import ckptctl
from ckptctl import AccessDenied, Answer, Level, StorageError, StorageUnavailable, Verdict
from ckptctl.distributed.launcher import RESTART_COUNTERS
from ckptctl.errors import PathNotFound
from ckptctl.selection import targets, verifying
from ckptctl.selection.choosing import NoStepReason
from ckptctl.selection.history import put_sentinel, read_history
from ckptctl.storage.contract import ShortRead, Store, StoreKind
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.torch

NO_ANSWER = StorageUnavailable("no answer after 4 tries in 31 s")


@pytest.fixture
def root(checkpoints: Path) -> Path:
    """Steps 10 and 20 of four ranks."""
    return checkpoints / "run_bare4"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that breaks each store that is opened from now on; the store below is real."""

    def breaks(order: Callable[[FaultyStore], None], kind: StoreKind | None = None) -> None:
        def opened(url: str, *args: object, **kwargs: object) -> Store:
            store = FaultyStore(open_store(url, *args, **kwargs), kind=kind)
            order(store)
            return store

        for module in (targets, verifying):
            monkeypatch.setattr(module, "open_store", opened)

    yield breaks
    monkeypatch.undo()


def n_calls(broken: Callable[..., None], ask: Callable[[], object]) -> dict[str, int]:
    made: list[FaultyStore] = []
    broken(made.append)
    ask()
    return {verb: sum(store.calls[verb] for store in made) for verb in (*VERBS, "span")}


def outcome(root: Path) -> object:
    """The step that `pick` takes, or its answer and exit code."""
    try:
        found = ckptctl.pick(str(root))
    except StorageError as error:
        return Answer.UNKNOWN, error.exit_code
    return found.step if found.chosen is not None else (found.answer, found.exit_code)


@pytest.mark.parametrize("error", [NO_ANSWER, AccessDenied("denied")])
@pytest.mark.parametrize("lasts", [False, True])
def test_pick_is_right_or_says_that_it_does_not_know(root, broken, error, lasts):
    calls = n_calls(broken, lambda: ckptctl.pick(str(root)))
    assert sum(calls.values()) > 5
    for verb, n in calls.items():
        for nth in range(1, n + 1):
            broken(lambda store, v=verb, k=nth: store.fail(v, error, nth=k, lasts=lasts))
            assert outcome(root) in (20, (Answer.UNKNOWN, error.exit_code))


def test_scan_shows_a_folder_named_by_a_number_that_could_not_be_listed(root, tmp_path, broken):
    run = tmp_path / "run"
    for number in ("10", "20"):
        shutil.copytree(root / f"step_{number}", run / number)
    broken(lambda store: store.fail("list_tree", NO_ANSWER, lasts=True, path="20"))
    found = ckptctl.scan(str(run))
    assert (found.reason, found.exit_code) == (NoStepReason.NOT_INSPECTED, 75)
    verdicts = [(report.number, report.verdict) for report in found.reports]
    assert verdicts == [(20, Verdict.UNKNOWN), (10, Verdict.COMPLETE)]


def test_scan_and_verify_never_call_a_step_damaged_that_they_could_not_look_at(root, broken):
    def ask() -> list[ckptctl.Report]:
        scanned = ckptctl.scan(str(root), level=Level.STRUCTURE)
        return [*scanned.reports, ckptctl.verify(f"{root}@20", level=Level.STRUCTURE)]

    for verb, n in n_calls(broken, ask).items():
        for nth in range(1, n + 1):
            broken(lambda store, v=verb, k=nth: store.fail(v, NO_ANSWER, nth=k))
            try:
                reports = ask()
            except StorageUnavailable:
                continue
            assert {r.verdict for r in reports} <= {Verdict.COMPLETE, Verdict.UNKNOWN}


def test_a_file_that_a_read_misses_and_every_listing_shows_is_no_change_and_no_damage(root, broken):
    for error in (PathNotFound("gone"), ShortRead("shorter")):
        for verb in ("read", "span"):
            broken(lambda store, v=verb, e=error: store.fail(v, e))
            report = ckptctl.verify(f"{root}@20", level=Level.STRUCTURE)
            assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, 75)
            assert [f.code for f in report.findings if f.verdict] == ["step.unknown"]
            assert "contradicts itself" in report.findings[0].message
            assert ckptctl.pick(str(root), level=Level.STRUCTURE).answer is Answer.UNKNOWN


def test_a_file_that_is_deleted_since_the_listing_is_a_change(copy_of, root, broken):
    copy = copy_of(root)

    def order(store: FaultyStore) -> None:
        def delete(listed):
            (copy / "step_20" / "__1_0.distcp").unlink(missing_ok=True)
            return listed

        store.show(delete)

    broken(order)
    report = ckptctl.verify(f"{copy}/step_20", level=Level.STRUCTURE)
    assert (report.verdict, report.exit_code) == (Verdict.CHANGED, 26)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_listing_that_leaves_out_a_file_is_not_believed_where_storage_is_far_away(
    root, broken, name
):
    def order(store: FaultyStore) -> None:
        store.show(lambda listed: [file for file in listed if not file.path.endswith(name)])

    broken(order, kind=StoreKind.OBJECT)
    report = ckptctl.verify(f"{root}@20")
    assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, 75)
    assert ckptctl.pick(str(root)).answer is Answer.UNKNOWN


def test_a_root_that_lists_empty_once_is_no_fresh_run(root, broken):
    def order(store: FaultyStore) -> None:
        listings = iter([[]])
        store.show(lambda listed: next(listings, listed))

    broken(order, kind=StoreKind.OBJECT)
    for ask in (lambda: ckptctl.pick(str(root)), lambda: ckptctl.verify(f"{root}@20")):
        with pytest.raises(StorageUnavailable, match="two listings"):
            ask()


def test_a_run_that_another_launcher_begins_between_two_listings_begins(tmp_path):
    def begin(listed):
        if not listed:
            (tmp_path / ".ckptctl").mkdir()
            (tmp_path / ".ckptctl" / "supervised.json").touch()
        return listed

    store = FaultyStore(open_store(str(tmp_path)), kind=StoreKind.OBJECT)
    store.show(begin)
    put_sentinel(store)
    assert (tmp_path / ".ckptctl" / "root.json").exists()
    assert read_history(store).never_held


def test_a_step_that_is_saved_over_while_we_look_is_a_change(root, copy_of, broken):
    copy = copy_of(root)
    listings = 0

    def order(store: FaultyStore) -> None:
        def save_over(listed):
            nonlocal listings
            listings += 1
            if listings == 1:
                shutil.copy(copy / "step_10" / "__1_0.distcp", copy / "step_20" / "__1_0.distcp")
            return listed

        store.show(save_over)

    broken(order)
    report = ckptctl.verify(f"{copy}/step_20", level=Level.STRUCTURE)
    assert "step.changed" in [finding.code for finding in report.findings]
    assert report.exit_code == 26


def test_a_step_that_is_deleted_while_we_look_is_a_change(root, copy_of, broken):
    copy = copy_of(root)

    def order(store: FaultyStore) -> None:
        def delete(listed):
            shutil.rmtree(copy / "step_20", ignore_errors=True)
            return listed

        store.show(delete)

    broken(order)
    found = ckptctl.pick(str(copy))
    assert found.passed_over[0].report.verdict is Verdict.CHANGED
    assert found.step == 10


def test_a_root_that_does_not_exist_is_fresh_and_a_mount_that_is_gone_is_not(tmp_path):
    assert ckptctl.pick(str(tmp_path / "run")).exit_code == 10
    assert ckptctl.pick(str(tmp_path / "run"), allow_fresh=True).exit_code == 10
    with pytest.raises(StorageUnavailable, match="mounted"):
        ckptctl.pick(str(tmp_path / "mount" / "run"))


@pytest.mark.parametrize("counter", RESTART_COUNTERS)
def test_a_restarted_job_that_finds_nothing_is_not_fresh(tmp_path, monkeypatch, counter):
    monkeypatch.setenv(counter, "0")
    assert ckptctl.pick(str(tmp_path)).exit_code == 10
    monkeypatch.setenv(counter, "1")
    with pytest.raises(StorageUnavailable, match=counter):
        ckptctl.pick(str(tmp_path))
    (tmp_path / ".ckptctl").mkdir()  # as a probe of the storage leaves it: no sentinel
    with pytest.raises(StorageUnavailable, match=counter):
        ckptctl.pick(str(tmp_path))
    with open_store(str(tmp_path)) as store:
        put_sentinel(store)
    assert ckptctl.pick(str(tmp_path)).exit_code == 10


def test_many_reads_keep_pick_at_the_listing(root, monkeypatch):
    from ckptctl.inspection import stages

    monkeypatch.setattr(stages, "MAX_QUICK_READS", 1)
    chosen = ckptctl.pick(str(root))
    assert chosen.level is Level.LISTING
    assert chosen.level_reason is not None
    assert "reads" in chosen.level_reason


def test_the_next_command_can_be_copied_whatever_the_root_is_called(tmp_path):
    root = tmp_path / "a run; with $(spaces)"
    (root / "step_1").mkdir(parents=True)
    found = ckptctl.pick(str(root))
    assert found.next_command is not None
    assert shlex.split(found.next_command)[-1] == str(root)


def test_an_error_names_a_root_of_any_name_as_the_shell_takes_it(tmp_path, root, broken):
    run = Path(shutil.copytree(root, tmp_path / "a run; with $(spaces)"))
    with pytest.raises(PathNotFound) as caught:
        ckptctl.verify(f"{run}/step_7")
    assert shlex.split(caught.value.next_command or "")[2:] == [str(run)]
    sealed = ckptctl.verify(f"{run}@20", level=Level.CONTENT)
    broken(lambda store: store.fail("read", NO_ANSWER, lasts=True))
    for report in (sealed, ckptctl.verify(f"{run}@20")):
        commands = filter(None, (finding.next_command for finding in report.findings))
        words = {word for command in commands for word in shlex.split(command)}
        assert f"{run}/step_20" in words
        assert "with" not in words


@pytest.mark.parametrize("verb", ["read", "span"])
def test_a_lack_of_memory_is_nothing_against_a_step(broken, root, verb):
    broken(lambda store: store.fail(verb, MemoryError()))
    report = ckptctl.verify(f"{root}@20", level=Level.CONTENT)
    assert [f.code for f in report.findings if f.verdict] == ["step.no-memory"]
    assert report.verdict is Verdict.UNKNOWN
    assert report.exit_code == 75
    chosen = ckptctl.pick(str(root))
    assert (chosen.answer, chosen.chosen, chosen.exit_code) == (Answer.UNKNOWN, None, 75)
