"""Which candidate the policy takes, with reports made by hand: no storage is involved."""

from dataclasses import dataclass, field, replace

import pytest

from ckptctl.findings import Finding, Report, Verdict, verdict_of
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.inspection.train_state import NO_STATE
from ckptctl.model import STATE_KINDS, Level, StatePart, TrainState, WorldSize
from ckptctl.options import PickPolicy
from ckptctl.selection.candidates import Candidate, in_order
from ckptctl.selection.choosing import NoStepReason, Search, absent_kinds, demanded

ALL = STATE_KINDS


def state(held: tuple[str, ...]) -> TrainState:
    return replace(NO_STATE, **{kind: StatePart(True, (kind,)) for kind in held})


def report(number: int, code: str | None = None, held: tuple[str, ...] = ALL) -> Report:
    findings = (Finding(code, "here", f"found {code}"),) if code else ()
    verdict = verdict_of(findings)
    exit_code = 77 if code == "step.denied" else verdict.exit_code
    return Report(
        url=f"/root/step_{number}",
        number=number,
        layout="dcp",
        verdict=verdict,
        exit_code=exit_code,
        level=Level.LISTING,
        findings=findings,
        state=state(held),
        world_size=None,
        n_bytes=1,
        n_files=1,
        n_tensors=1,
        n_records=1,
        bytes_read=1,
        written_s=None,
        parts=("",),
        digests=(),
    )


@dataclass
class Root:
    """Reports by (root, number), and the level at which each was inspected."""

    reports: dict[tuple[int, int], Report]
    inspected: list[tuple[int, Level]] = field(default_factory=list)

    @property
    def candidates(self) -> list[Candidate]:
        return [Candidate(t, StepName(f"step_{n}", n, "dcp")) for t, n in self.reports]

    def look(self, candidate: Candidate, level: Level) -> Report:
        self.inspected.append((candidate.named.number, level))
        return self.reports[candidate.root_index, candidate.named.number]

    def choose(self, policy: PickPolicy | None = None):
        policy = policy or PickPolicy()
        search = Search(self.look, policy)
        search.choose(in_order(self.candidates, policy))
        return search


def steps(*reports: Report) -> Root:
    return Root({(0, r.number): r for r in reports})


def test_the_newest_whole_step_is_taken_and_no_other_is_looked_at():
    made = steps(report(1), report(10), report(9))
    assert made.choose().chosen.number == 10
    assert made.inspected == [(10, Level.LISTING)]


@pytest.mark.parametrize(
    "code",
    ["metadata.missing", "shard.missing", "metadata.unsafe", "coverage.gap", "step.in-progress"],
)
def test_a_step_with_a_fault_is_passed_over_with_its_reason(code):
    choice = steps(report(2, code), report(1)).choose()
    assert choice.chosen.number == 1
    (over,) = choice.passed_over
    assert over.report.number == 2
    assert f"found {code}" in over.reason


def test_a_step_that_could_not_be_looked_at_stops_the_search():
    choice = steps(report(2, "step.unknown"), report(1)).choose()
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.NOT_INSPECTED)
    assert [one.exit_code for one in choice.unknown] == [75]


def test_denied_access_stops_the_search_with_its_own_exit_code():
    choice = steps(report(2, "step.denied"), report(1)).choose()
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.NOT_INSPECTED)
    assert [one.exit_code for one in choice.unknown] == [77]


def test_another_root_that_holds_the_unknown_step_answers_for_it():
    made = Root({(0, 2): report(2, "step.unknown"), (1, 2): report(2), (1, 1): report(1)})
    assert made.choose().chosen is made.reports[1, 2]


def test_an_unknown_step_is_not_forgiven_because_another_root_holds_it_damaged():
    made = Root(
        {(0, 2): report(2, "step.unknown"), (1, 2): report(2, "shard.truncated"), (1, 1): report(1)}
    )
    choice = made.choose()
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.NOT_INSPECTED)


def test_skip_names_the_step_that_does_not_answer():
    choice = steps(report(2, "step.unknown"), report(1)).choose(PickPolicy(skip={2}))
    assert choice.chosen.number == 1


def test_the_earlier_root_is_preferred_at_the_same_step():
    made = Root({(1, 2): report(2), (0, 2): report(2), (0, 1): report(1)})
    assert made.choose().chosen is made.reports[0, 2]


def test_the_newest_step_of_all_roots_is_taken():
    made = Root({(0, 1): report(1), (1, 2): report(2)})
    assert made.choose().chosen.number == 2


def test_before_leaves_out_that_step_and_all_newer_ones():
    made = steps(report(3), report(2), report(1))
    assert made.choose(PickPolicy(before=3)).chosen.number == 2
    assert [number for number, _ in made.inspected] == [2]


def test_two_damaged_steps_are_passed_over_and_the_third_ends_the_search():
    damaged = [report(n, "record.framing") for n in (5, 4, 3)]
    assert steps(*damaged[:2], report(1)).choose().chosen.number == 1
    choice = steps(*damaged, report(1)).choose()
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.TOO_MANY_DAMAGED)


def test_interrupted_saves_do_not_count_as_damaged():
    interrupted = [report(n, "metadata.missing") for n in range(9, 2, -1)]
    assert steps(*interrupted, report(1)).choose().chosen.number == 1


def test_max_fallback_0_takes_the_newest_or_nothing():
    choice = steps(report(2, "shard.truncated"), report(1)).choose(PickPolicy(max_fallback=0))
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.TOO_MANY_DAMAGED)


def test_after_a_damaged_step_the_next_is_looked_at_more_closely():
    made = steps(report(3, "shard.truncated"), report(2))
    assert made.choose().chosen.number == 2
    assert made.inspected == [(3, Level.LISTING), (2, Level.STRUCTURE)]


def test_a_copy_in_another_root_does_not_make_a_step_damaged_twice():
    made = Root(
        {
            (0, 2): report(2, "shard.truncated"),
            (1, 2): report(2, "shard.truncated"),
            (0, 1): report(1),
        }
    )
    assert made.choose(PickPolicy(max_fallback=1)).chosen.number == 1


def test_two_damaged_steps_make_the_storage_path_suspect():
    choice = steps(report(3, "shard.truncated"), report(2, "range.overlap"), report(1)).choose()
    (finding,) = choice.suspect_storage()
    assert finding.code == "root.suspect"
    assert "3, 2" in finding.message


def test_one_damaged_step_does_not():
    assert list(steps(report(3, "shard.truncated"), report(2)).choose().suspect_storage()) == []


def test_a_step_that_lacks_what_its_predecessor_holds_is_passed_over():
    choice = steps(report(3, held=("model",)), report(2)).choose()
    assert choice.chosen.number == 2
    (over,) = choice.passed_over
    assert over.reason.startswith("lacks optimizer, scheduler, rng, dataloader, step")


def test_weights_ok_takes_it_all_the_same():
    choice = steps(report(3, held=("model",)), report(2)).choose(
        PickPolicy(allow_missing_state=True)
    )
    assert choice.chosen.number == 3


def test_a_step_that_lacks_what_no_step_holds_is_taken():
    held = ("model", "optimizer", "step")
    assert steps(report(3, held=held), report(2, held=held)).choose().chosen.number == 3


def test_a_second_weights_only_step_does_not_excuse_the_first():
    weights = ("model",)
    choice = steps(report(4, held=weights), report(3, held=weights), report(2)).choose()
    assert choice.chosen.number == 2


def test_a_part_that_the_predecessor_holds_is_lacking():
    both = ("actor/dist_ckpt", "critic/dist_ckpt")
    newest, older = replace(report(3), parts=both[:1]), replace(report(2), parts=both)
    choice = steps(newest, older).choose()
    assert choice.chosen.number == 2
    assert "lacks the part critic/dist_ckpt, which step 2 holds" in choice.passed_over[0].reason
    assert steps(newest, older).choose(PickPolicy(allow_missing_state=True)).chosen.number == 3


def with_ranks(number: int, n_ranks: int, n_writers: int = 4) -> Report:
    made = report(number)
    rng = StatePart(True, ("random_states_0.pkl",), n_ranks)
    size = WorldSize(n_writers, "shard-files")
    return replace(made, state=replace(made.state, rng=rng), world_size=size)


def test_state_of_fewer_ranks_than_the_predecessor_holds_is_lacking():
    choice = steps(with_ranks(3, 1), with_ranks(2, 4)).choose()
    assert choice.chosen.number == 2
    assert "lacks the rng of 3 of 4 ranks" in choice.passed_over[0].reason


def test_the_shards_of_fewer_ranks_than_the_predecessor_has_are_lacking():
    newest = replace(report(3), parts=("model", "optim"), ranks=(("model", (0,)),))
    older = replace(report(2), parts=("model", "optim"), ranks=(("model", (0, 1)),))
    choice = steps(newest, older).choose()
    assert choice.chosen.number == 2
    assert "lacks the shards of 1 of 2 ranks in model" in choice.passed_over[0].reason


def test_state_of_fewer_ranks_after_a_change_of_the_world_size_is_not():
    assert steps(with_ranks(3, 1, 2), with_ranks(2, 4, 4)).choose().chosen.number == 3


def test_state_that_never_was_there_for_every_rank_is_not():
    assert steps(with_ranks(3, 2), with_ranks(2, 2)).choose().chosen.number == 3


def test_a_whole_step_of_parts_is_taken_though_its_predecessor_does_not_answer():
    newest = replace(report(3), parts=("model", "optim"))
    assert steps(newest, report(2, "step.unknown")).choose().chosen.number == 3


def test_a_damaged_predecessor_is_not_asked_what_it_holds():
    made = steps(report(4, held=("model",)), report(3, "shard.truncated"), report(2))
    assert made.choose().chosen.number == 2


def test_a_weights_only_step_is_not_taken_while_its_predecessor_does_not_answer():
    choice = steps(report(3, held=("model",)), report(2, "step.unknown"), report(1)).choose()
    assert (choice.chosen, choice.stopped) == (None, NoStepReason.NOT_INSPECTED)


def test_an_unverifiable_step_is_taken_only_where_that_is_accepted():
    made = steps(report(3, "format.unsupported"), report(2))
    assert made.choose().chosen.number == 2
    assert made.choose(PickPolicy(accept_unverifiable=True)).chosen.number == 3


def test_a_folder_of_digits_without_tensors_is_no_step():
    made = steps(replace(report(2024, "metadata.missing"), parts=()))
    candidates = [Candidate(0, StepName("2024", 2024, "dcp", bare=True))]
    choice = Search(made.look, PickPolicy())
    choice.choose(candidates)
    assert (choice.passed_over, len(choice.no_steps)) == ([], 1)


def test_every_verdict_but_complete_keeps_a_step_from_being_taken():
    for verdict in Verdict:
        found = replace(report(2), verdict=verdict, exit_code=verdict.exit_code)
        chosen = steps(found, report(1)).choose().chosen
        taken = None if chosen is None else chosen.number
        assert taken == (
            2 if verdict is Verdict.COMPLETE else None if verdict is Verdict.UNKNOWN else 1
        )


def test_what_is_demanded_of_a_step_is_what_the_steps_before_it_hold():
    held = ("model", "optimizer", "rng", "dataloader", "step")
    made = steps(report(3, held=held), report(2, held=held))
    chosen = made.choose().chosen
    assert demanded(chosen, (), PickPolicy()) == held
    assert absent_kinds(chosen) == ("scheduler",)
    assert demanded(chosen, ("tokens",), PickPolicy()) == (*held, "tokens")
    assert demanded(chosen, ("model",), PickPolicy(allow_missing_state=True)) == ("model",)


@pytest.mark.parametrize("kind", ["rng", "dataloader", "scheduler", "optimizer", "step"])
def test_a_step_that_lost_a_kind_is_passed_over_for_one_of_which_it_is_demanded(kind):
    less = tuple(one for one in ALL if one != kind)
    choice = steps(report(3, held=less), report(2)).choose()
    assert choice.chosen.number == 2
    assert kind in choice.passed_over[0].reason
    assert kind in demanded(choice.chosen, (), PickPolicy())
