"""`ckptctl cost` in a terminal, in a pipe, and as a document."""

from __future__ import annotations

import math

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

from ckptctl.goodput.estimating import effective_share

KNOWN = ("--interval", "1h", "--save-time", "60", "--mtbf", "11124", "--load", "5m")


def test_the_table_names_each_number_and_ends_without_a_next_command_when_all_is_known():
    done = run_ckptctl("cost", *KNOWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a failure costs 35 min on average, 7.77 times a day; ")
    assert "  at the best             87.6 %  with Daly's interval\n" in done.stdout
    assert "next:" not in done.stdout


@pytest.mark.parametrize(
    ("mtbf", "word"),
    [("1h", "above-mtbf"), ("2h", "longer-than-best"), ("60d", "short-enough"), (None, "unknown")],
)
def test_the_cadence_is_a_word_to_branch_on(mtbf, word):
    known = ["--interval", "1h", "--save-time", "60"]
    done = run_ckptctl("cost", *known, *(["--mtbf", mtbf] if mtbf else []), "--print-cadence")
    assert (done.stdout, done.returncode) == (f"{word}\n", 0)
    assert "a failure costs" in done.stderr


def test_the_document_holds_to_its_schema_also_where_little_is_known():
    document = validated(run_ckptctl("cost", *KNOWN, "--json").stdout)
    assert round(document["daly_s"], 1) == 1115.7
    assert document["best_share"] > document["share"]
    document = validated(run_ckptctl("cost", "--interval", "1h", "--json").stdout)
    assert (document["per_failure_s"], document["daly_s"]) == (1800, None)
    assert document["next_command"] == "ckptctl cost --interval 3600 --mtbf TIME"


def test_quiet_prints_the_best_interval_alone():
    assert run_ckptctl("cost", *KNOWN, "-q").stdout == "1116\n"
    assert run_ckptctl("cost", "--interval", "1h", "-q").stdout == ""


def test_a_time_that_is_none_is_an_error_with_the_option_that_it_was_given_to():
    done = run_ckptctl("cost", "--interval", "soon")
    assert done.returncode == 2
    assert "--interval is a time like 90, 120s, 5m or 1.5h, not 'soon'" in done.stderr


def test_a_root_that_is_not_there_is_not_a_run_without_saves(tmp_path):
    done = run_ckptctl("cost", tmp_path / "no" / "such" / "root")
    assert done.returncode == 75


def test_a_number_beyond_all_clusters_is_refused():
    done = run_ckptctl("cost", "--interval", "1h", "--save-time", "60", "--mtbf", "9" * 400)
    assert done.returncode == 2, done.stderr


def test_the_share_of_an_interval_as_short_as_any_is_a_share():
    assert effective_share(1e-300, 1e-300, 1e300, 0.0) == 0.5
    assert effective_share(1e-300, 0.0, 1e300, 1e300) == pytest.approx(math.exp(-1))
