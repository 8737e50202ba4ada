"""What in an environment breaks checkpointing."""

from __future__ import annotations

import re

import pytest
from command_line import REPOSITORY, validated
from next_commands import run_and_follow as run_ckptctl

from ckptctl.diagnostics.diagnosing import check_environment

KNOWN = frozenset({"CKPTCTL_JSON"})


def names(**environment: str) -> set[str]:
    advice, _ = check_environment(environment, KNOWN)
    return {each.name for each in advice if each.name.startswith("variable")}


def test_a_good_environment_has_no_fault():
    ran = run_ckptctl("doctor", "env", "--json")
    document = validated(ran.stdout)
    assert ran.returncode == 0
    assert {"python", "torch", "fsspec"} <= set(document["facts"])


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "variable.harmful"),
        ({"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, "variable.harmful"),
        ({"PYTHONOPTIMIZE": "1"}, "variable.harmful"),
        ({"RANK": "3"}, "variable.half"),
        ({"TMPDIR": "/no/such/folder"}, "variable.tmpdir"),
        ({"CKPTCTL_JSONN": "1"}, "variable.unknown"),
        ({"SLURM_JOB_ID": "1"}, "variable.buffered"),
    ],
)
def test_one_variable_is_found(environment, name):
    assert names(**environment) == {name}


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"RANK": "3", "WORLD_SIZE": "4"},
        {"CKPTCTL_JSON": "1"},
        {"SLURM_JOB_ID": "1", "PYTHONUNBUFFERED": "1"},
    ],
)
def test_a_variable_that_harms_nothing_is_not_named(environment):
    assert names(**environment) == set()


def test_the_variables_that_a_job_gets_from_run_are_known():
    page = (
        (REPOSITORY / "docs" / "run.md").read_text().partition("The environment of the command")[2]
    )
    names = {*re.findall(r"`(CKPTCTL_\w+)`", page.partition("\n## ")[0]), "CKPTCTL_EXCLUDED_NODES"}
    assert len(names) > 4
    ran = run_ckptctl("doctor", "env", env=dict.fromkeys(names, "1"))
    assert ran.returncode == 0, ran.stdout


def test_a_misspelt_variable_is_a_fault_and_no_usage_error():
    ran = run_ckptctl("doctor", "env", env={"CKPTCTL_MAX_FALBACK": "1"})
    assert ran.returncode == 29
    assert "CKPTCTL_MAX_FALBACK" in ran.stdout
