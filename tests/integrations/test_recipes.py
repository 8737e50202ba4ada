"""The script on the page of each framework runs on two ranks, and again from where it ended."""

from __future__ import annotations

import re
import subprocess

import pytest
from command_line import REPOSITORY
from live_frameworks import interpreter, job_environment, torchrun, version_of

import ckptctl

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PAGES = REPOSITORY / "docs" / "frameworks"
IN_CI = ("transformers", "accelerate", "lightning")
SEALS = (*IN_CI, "trl")
NOT_IN_CI = ("deepspeed", "composer", "trl")
"""Their installation takes longer than all others; `make frameworks` has them."""


@pytest.mark.parametrize(
    "framework", [*IN_CI, *(pytest.param(each, marks=pytest.mark.long) for each in NOT_IN_CI)]
)
def test_the_script_of_a_page_saves_and_resumes(framework, tmp_path):
    assert version_of(framework) in (PAGES / "README.md").read_text()
    text = (PAGES / f"{framework}.md").read_text()
    (code,) = re.findall(r"^```python [^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    script = tmp_path / "train_it.py"
    for max_step in (8, 12):
        script.write_text(
            code.replace("max_steps=12", f"max_steps={max_step}")
            .replace("13)", f"{max_step + 1})")
            .replace("12ba", f"{max_step}ba")
        )
        done = subprocess.run(
            [interpreter(), *torchrun(), str(script)],
            cwd=tmp_path,
            env=job_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    assert done.stdout.count("ckptctl: resuming from") == 1
    steps = [report.number for report in ckptctl.scan(str(tmp_path / "run-7")).reports]
    assert steps == [12, 8, 4]
    newest = ckptctl.verify(
        f"{tmp_path}/run-7@12", level="content", require_seal=framework in SEALS
    )
    assert newest.exit_code == 0
