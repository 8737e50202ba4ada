"""What each command shows of an answer."""

import pytest
from made_results import NO_METADATA, NOW_S, ROOT, contents, pick, report, scan, short, state

from ckptctl.cli.pick import pick_lines
from ckptctl.cli.scan import (
    StepTable,
    chosen_lines,
    foot_lines,
    none_lines,
    state_words,
    usable_urls,
)
from ckptctl.cli.show import contents_lines
from ckptctl.cli.verify import next_command, report_lines
from ckptctl.findings import ByStore, Finding
from ckptctl.formatting import DAY_S
from ckptctl.model import STATE_KINDS, Level, WorldSize
from ckptctl.selection.choosing import NoStepReason, PassedOver
from ckptctl.selection.verifying import TensorRow


def text(lines) -> list[str]:
    return [each.text.rstrip() for each in lines]


def rows(width, *reports, chosen=None):
    table = StepTable(reports[0], chosen, NOW_S, width, unicode=True)
    return [
        *(each.text for each in table.head()),
        *(each.text for one in reports for each in table.row(one)),
    ]


def test_scan_begins_with_the_step_to_resume_from_and_ends_with_a_command():
    assert text(chosen_lines(report(1200)))[:2] == [
        "resume from step 1200: complete (checked: listing; not proven: bytes)",
        f"  {ROOT}/step_1200",
    ]
    assert text(foot_lines(scan(report(1200), chosen=1200), unicode=True))[-1] == (
        f"next: ckptctl pick {ROOT}"
    )


def test_a_row_names_step_verdict_size_ranks_age_and_train_state():
    head, row = rows(None, report(1200), chosen=f"{ROOT}/step_1200")
    assert head.split() == [
        *(
            "step",
            "verdict",
            "claims",
            "checked",
            "size",
            "ranks",
            "age",
            "written",
            "(UTC)",
            "train",
            "state",
        )
    ]
    assert row.split() == [
        *("◇", "1200", "complete", "✓○✓✓✓✓", "listing", "1.2", "GiB", "8", "3", "h"),
        *("2027-01-15", "05:00:00"),
        *("all", "←", "pick"),
    ]


def test_columns_stand_under_their_names():
    head, row = rows(80, report(1200))
    assert head.index("train") == row.index("all")
    assert head.index("verdict") == row.index("complete")


def test_off_a_terminal_the_reason_is_on_the_row_for_grep():
    _, row = rows(None, report(1400, short(3)))
    assert row.endswith(
        "shard.truncated: __3_0.distcp: 4,096 of 10,240 bytes exist; "
        "12 chunks in 9 tensors cannot be read"
    )


def test_on_a_narrow_terminal_the_reason_is_below_the_row():
    _, row, reason = rows(80, report(1400, short(3)))
    assert "shard.truncated" not in row
    assert reason.startswith("    shard.truncated: __3_0.distcp")
    assert len(row.rstrip()) <= 80


def test_further_faults_are_counted():
    _, row = rows(None, report(1400, short(3), short(4)))
    assert row.endswith("(and 1 more)")


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_the_terminal(width):
    lines = rows(width, report(2**63 - 1, NO_METADATA), report(1200))
    assert all(len(each.rstrip()) <= width for each in lines if not each.startswith("    "))


@pytest.mark.parametrize("width", [80, 100, 107, 108, 140])
def test_what_a_step_lacks_is_named_at_every_width(width):
    step = report(1200, state=state("model", "optimizer"))
    _, *lines = rows(width, step, chosen=step.url)
    assert all(len(each) <= width for each in lines)
    assert lines[0].endswith("← pick")
    assert "lacks scheduler, rng, dataloader, step" in "".join(lines)


def test_what_every_step_lacks_is_written_once_where_it_takes_a_line():
    newer, older = (report(step, state=state("model", "optimizer")) for step in (1200, 1100))
    table = StepTable(newer, older.url, NOW_S, 80, unicode=True)
    (row,) = text(table.row(older, above=newer))
    assert row.endswith("  as above  ← pick")
    assert len(text(table.row(older, above=report(1200)))) == 2


def test_a_root_without_steps_says_so():
    message = f"{ROOT} holds no step at all: this is a fresh run"
    assert text(none_lines(scan(pick=pick(None, exit_code=10, message=message)))) == [message]


def test_a_root_without_a_usable_step_says_what_pick_says():
    none = scan(report(200, NO_METADATA), pick=pick(None, message="no usable step (1 inspected)"))
    assert text(none_lines(none))[:2] == ["no usable step (1 inspected)", f"  {ROOT}"]


def test_scan_says_how_many_older_steps_there_are_and_how_to_see_them():
    found = scan(report(200), chosen=200, n_steps=50, n_older=49, more_before=200)
    lines = text(foot_lines(found, unicode=True))
    assert "  49 older steps of 50 not shown (--before 200 continues, --last 0 shows all)" in lines
    assert "  4.0 KiB read of 1 step" in lines


def test_quiet_scan_gives_nothing_where_pick_takes_nothing():
    assert usable_urls(scan(report(300), report(200))) == []


def test_quiet_scan_leaves_out_what_pick_refused():
    refused = ((f"{ROOT}/step_300", "lacks optimizer"),)
    found = scan(report(300), report(200), chosen=200, refused=refused)
    assert usable_urls(found) == [f"{ROOT}/step_200"]


def test_a_whole_step_that_pick_refused_bears_the_reason_of_pick():
    table = StepTable(report(30), None, NOW_S, None, unicode=True)
    why = "lacks the rng of 1 of 4 ranks, which step 20 holds"
    over = PassedOver(report(30), why, NoStepReason.STATE_MISSING)
    (row,) = table.row(over.report, over)
    assert "lacks state" in row.text
    assert row.text.endswith("lacks the rng of 1 of 4 ranks, which step 20 holds")


def test_quiet_scan_gives_the_chosen_step_and_usable_older_ones():
    found = scan(report(300), report(200), report(150, NO_METADATA), report(100), chosen=200)
    assert usable_urls(found) == [f"{ROOT}/step_200", f"{ROOT}/step_100"]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ((), "-"),
        (STATE_KINDS, "all"),
        (("model",), "weights only"),
        (("model", "optimizer", "scheduler", "rng", "step"), "lacks dataloader"),
        (("model", "optimizer", "scheduler", "rng", "dataloader", "step"), "all"),
        (("model", "optimizer"), "lacks scheduler, rng, dataloader, step"),
    ],
)
def test_train_state_is_told_in_few_words(held, said):
    assert state_words(state(*held)) == said


def test_verify_says_the_verdict_first_and_the_next_command_last():
    lines = text(report_lines(report(1200, short(3)), NOW_S, unicode=True))
    assert lines[0] == f"! incomplete: {ROOT}/step_1200"
    assert lines[-1] == f"next: ckptctl pick {ROOT} --before 1200"


def test_verify_says_times_and_sizes_readable_and_exact():
    lines = "\n".join(text(report_lines(report(1200), NOW_S, unicode=True)))
    assert "written 3 h ago, 2027-01-15 05:00:00 UTC" in lines
    assert "1.2 GiB (1,288,490,188 bytes) in 9 files" in lines
    assert "written by 8 ranks (by its shard files)" in lines
    lines = "\n".join(text(report_lines(report(1200), NOW_S - 3 * DAY_S, unicode=True)))
    assert "written in 3 days (do the clocks differ?), 2027-01-15 05:00:00 UTC" in lines


def test_verify_counts_tensors_only_where_it_knows_them():
    known, unknown = (report(1200, n_tensors=n, n_records=3) for n in (2, 0))
    assert ", 2 tensors in 3 records" in "\n".join(text(report_lines(known, NOW_S, unicode=True)))
    assert " files, 3 records\n" in "\n".join(text(report_lines(unknown, NOW_S, unicode=True)))


def test_verify_says_how_deep_it_looked_and_what_was_not_seen():
    lines = "\n".join(text(report_lines(report(1200), NOW_S, unicode=True)))
    assert "checked: listing (4.0 KiB read); the contents of the shard files were not" in lines


def test_verify_says_what_the_store_says_and_that_nothing_was_read_for_it():
    made = report(1200, by_store=ByStore(9, 8, 1 << 30, 2))
    lines = "\n".join(text(report_lines(made, NOW_S, unicode=True)))
    assert "the store's checksums of 8 of 9 files, 1.0 GiB (1,073,741,824 bytes)," in lines
    assert "2 of them sealed with the store's checksum alone" in lines
    assert "their bytes were not read" in " ".join(lines.split())
    none = report(1200, by_store=ByStore(9, 0, 0, 0))
    assert "the store's checksums" not in "\n".join(text(report_lines(none, NOW_S, unicode=True)))


def test_verify_says_what_a_resume_restores_and_what_not():
    made = report(1200, state=state("model", "step"))
    lines = text(report_lines(made, NOW_S, unicode=True))
    assert "  a resume restores model, step" in lines
    assert "  but not optimizer, scheduler, rng, dataloader or tokens" in lines


def test_a_finding_names_its_code_and_the_thing_it_speaks_of():
    lines = text(report_lines(report(1200, short(3)), NOW_S, unicode=True))
    assert any(
        each.startswith("  fault    shard.truncated  __3_0.distcp: 4,096 of") for each in lines
    )


@pytest.mark.parametrize(
    ("made", "command"),
    [
        (report(1200), f"ckptctl verify {ROOT}/step_1200 --level structure"),
        (report(1200, level=Level.STRUCTURE), f"ckptctl verify {ROOT}/step_1200 --level content"),
        (report(1200, level=Level.CONTENT), None),
        (report(1200, exit_code=23), f"ckptctl show {ROOT}/step_1200"),
        (report(1200, Finding("step.changed", "", "x")), "ckptctl explain step.changed"),
        (report(1200, Finding("step.unknown", "", "x")), f"ckptctl doctor storage {ROOT}"),
        (report(1200, Finding("step.in-progress", "", "x")), f"ckptctl pick {ROOT} --before 1200"),
        (report(1200, short(1), number=None), "ckptctl explain shard.truncated"),
        (report(1200, Finding("path.escape", "", "x")), "ckptctl explain path.escape"),
        (
            report(1200, Finding("part.missing", "pp1", "x", next_command="ckptctl show x")),
            "ckptctl show x",
        ),
        (
            report(
                1200,
                Finding("part.missing", "pp1", "x", next_command="ckptctl show x"),
                n_tensors=0,
            ),
            f"ckptctl pick {ROOT} --before 1200",
        ),
        (
            report(1200, short(1), url="/my runs/a/step_1200"),
            "ckptctl pick '/my runs/a' --before 1200",
        ),
    ],
)
def test_every_verdict_has_a_command_that_comes_next(made, command):
    assert next_command(made) == command


def test_pick_says_why_newer_steps_were_refused():
    refused = (report(1400, short(3)), "incomplete: too short")
    found = pick(report(1200), refused, required=("model", "optimizer"), absent=("rng",))
    lines = text(pick_lines(found))
    assert lines == [
        "resume from step 1200",
        "  not step 1400: incomplete: too short",
        "  checked: listing; the bytes themselves were not read",
        f"  train state: {found.about_state}",
    ]


def test_pick_says_what_is_suspicious_about_the_step_that_it_takes():
    renamed = Finding("metadata.foreign", ".metadata", "it was written for step 500")
    lines = text(pick_lines(pick(report(1200, renamed))))
    assert lines[-1] == "  warning  metadata.foreign  .metadata: it was written for step 500"
    assert lines[0] == "resume from step 1200, 1 warning"


def test_verify_names_a_warning_first_and_its_own_command_last():
    command = f"ckptctl diff {ROOT}/step_1000 {ROOT}/step_1200"
    same = Finding("shard.stale", "__1_0.distcp", "unchanged", next_command=command)
    made = report(1200, same, level=Level.CONTENT)
    lines = text(report_lines(made, NOW_S, unicode=True))
    assert lines[0].startswith("✓ complete, every byte verified, 1 warning: ")
    assert lines[-1] == f"next: {command}"


def test_pick_says_what_another_world_size_costs_and_no_other_note():
    lost = Finding("state.lost", "rng", "rng exists once per rank")
    lines = text(pick_lines(pick(report(1200, lost, Finding("seal.missing", "", "no seal")))))
    assert lines[-1] == "  note     state.lost  rng exists once per rank"


def test_pick_that_takes_nothing_is_an_error_with_a_command():
    lines = text(pick_lines(pick(None, (report(1400, short(3)), "incomplete: too short"))))
    assert lines[0] == "error: none is usable"
    assert lines[-1] == f"next: ckptctl scan {ROOT}"


def tensor(fqn, n=4, kind="model"):
    return TensorRow(fqn, "float32", (n,), 1, 4 * n, kind)


def test_the_layers_of_a_model_share_a_row():
    layers = [tensor(f"model.layers.{i}.weight") for i in range(32)]
    lines = text(contents_lines(contents(*layers), every_tensor=False, width=None))
    (row,) = [each for each in lines if "layers" in each]
    assert row.split() == [
        *("model.layers.{0..31}.weight", "float32", "4", "(32", "of", "them)", "32", "512", "B")
    ]


def test_tensors_of_another_shape_have_a_row_of_their_own():
    layers = [tensor("model.layers.0.weight"), tensor("model.layers.1.weight", n=8)]
    lines = text(contents_lines(contents(*layers), every_tensor=False, width=None))
    assert sum("model.layers." in each for each in lines) == 2


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([(0,), (3,)], ["{0,3}.0"]),
        ([(0,), (1,)], ["{0..1}.0"]),
        ([(0,), (1,), (2,), (3,)], ["{0..3}.0"]),
        ([(0,), (1,), (2,), (8,), (9,), (10,)], ["{0..2,8..10}.0"]),
        ([(n,) for n in range(0, 40, 2)], ["{0,2,4,6,8,10,12,14,...}.0"]),
        ([(0, 0), (0, 3), (3, 0), (3, 3)], ["{0,3}.{0,3}"]),
        # Not every combination: no row says so.
        ([(0, 0), (3, 3)], ["0.0", "3.3"]),
        ([(0, 0), (0, 1), (0, 2), (3, 3)], ["0.{0..2}", "3.3"]),
    ],
)
def test_a_row_of_several_tensors_names_those_that_are_there_and_no_other(numbers, shown):
    tensors = [tensor(f"model.layers.{'.'.join(map(str, (*n, 0)[:2]))}.w") for n in numbers]
    lines = text(contents_lines(contents(*tensors), every_tensor=False, width=None))
    names = [each.split()[0] for each in lines if "model.layers" in each]
    assert names == [f"model.layers.{each}.w" for each in shown]


def test_names_of_thousands_of_numbers_end_in_a_row_each():
    names = [".".join(["1"] * at + ["2"] * (2000 - at)) for at in range(0, 2000, 100)]
    lines = text(contents_lines(contents(*map(tensor, names)), every_tensor=False, width=None))
    assert sum(name in "\n".join(lines) for name in names) == len(names)


def test_every_tensor_is_listed_where_that_is_asked_for():
    layers = [tensor(f"model.layers.{i}.weight") for i in range(3)]
    moments = [tensor(f"optimizer.state.{i}", kind="optimizer") for i in range(2)]
    few = text(contents_lines(contents(*layers, *moments), every_tensor=False, width=None))
    every = text(contents_lines(contents(*layers, *moments), every_tensor=True, width=None))
    assert "  and 2 tensors more (--tensors)" in few
    assert sum("weight" in each or "optimizer.state" in each for each in every) == 5
    assert not any("--tensors" in each for each in every)


def test_a_number_of_thousands_of_digits_in_a_name_is_no_number():
    hostile = tensor(f"model.{'9' * 5000}.weight")
    lines = text(contents_lines(contents(hostile), every_tensor=False, width=None))
    assert any("9" * 5000 in each for each in lines)


def test_on_a_narrow_terminal_names_stand_above_their_facts():
    rows_of = [tensor("model." + "very_long_name." * 8 + "weight")]
    lines = text(contents_lines(contents(*rows_of), every_tensor=True, width=80))
    at = next(i for i, each in enumerate(lines) if each.endswith("weight"))
    assert lines[at + 1].split()[0] == "float32"


def test_a_scalar_has_no_shape():
    scalar = TensorRow("model.scale", "float32", (), 1, 4, "model")
    lines = text(contents_lines(contents(scalar), every_tensor=False, width=None))
    assert any("scalar" in each for each in lines)


def test_a_world_size_is_a_lower_bound_where_it_is_one():
    made = report(1, world_size=WorldSize(3, "shard-files", at_least=True))
    assert "at least 3 ranks" in "\n".join(text(report_lines(made, NOW_S, unicode=True)))
    assert "3+" in rows(None, made)[1].split()
