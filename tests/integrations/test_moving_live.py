"""The scripts of `examples/move` make the steps that the framework would make."""

from __future__ import annotations

import os
import subprocess
import sysconfig

import pytest

torch = pytest.importorskip("torch")

from command_line import REPOSITORY  # noqa: E402
from live_frameworks import interpreter, job_environment, torchrun, version_of  # noqa: E402

from ckptctl.errors import UsageError  # noqa: E402
from ckptctl.train import Checkpointer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("framework", ["torchtitan", "Lightning", "accelerate", "transformers"])
def test_the_script_compares_the_steps_after_a_move(framework, tmp_path):
    version_of(framework.lower())
    script = REPOSITORY / "examples" / "move" / f"{framework.lower()}_run.py"
    done = subprocess.run(
        [interpreter(), *torchrun(), script],
        cwd=tmp_path,
        env=job_environment(PATH=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "ckptctl: resumed from step 4" in done.stdout
    if framework == "accelerate":
        checkpointer = Checkpointer(str(tmp_path / "run-a"), model=torch.nn.Linear(2, 2))
        with pytest.raises(
            UsageError, match=r"optimizer\.bin \(optimizer\).* in a new root"
        ) as refused:
            checkpointer.resume()
        assert refused.value.next_command.startswith("ckptctl convert ")
