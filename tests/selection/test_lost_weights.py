"""A step whose log ends with NaN is refused if its weights hold NaN, and only then."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
from command_line import run_ckptctl, validated

import ckptctl
from ckptctl import Severity, Verdict
from ckptctl.storage.opening import open_store

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.torch
NAN = float("nan")


@pytest.fixture
def root(rank_files: Path, tmp_path: Path) -> Path:
    """What a Trainer saved at the steps 4 and 6, with a row of its log for each step."""
    return Path(shutil.copytree(rank_files / "transformers", tmp_path / "run"))


def logged(step: Path, **values: object) -> None:
    """Change what the Trainer logged last."""
    path = step / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"][-1] |= values
    path.write_text(json.dumps(state, indent=2))


def spoil(step: Path, value: float = NAN) -> None:
    """Set one value in the first row of each weight."""
    path = str(step / "model.safetensors")
    tensors = safetensors.load_file(path)
    for tensor in tensors.values():
        tensor.view(-1)[0] = value
    safetensors.save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    "values",
    [
        {"loss": NAN},
        {"grad_norm": NAN},
        {"loss": "nan"},
        {"loss": 0.0},
        {"grad_norm": float("inf")},
    ],
    ids=["loss", "grad-norm", "word", "filtered", "infinite"],
)
def test_weights_with_nan_behind_a_log_that_ends_with_it_are_passed_over(root, values):
    step = root / "checkpoint-6"
    logged(step, **values)
    spoil(step)
    report = ckptctl.verify(str(step))
    (finding,) = report.with_severity(Severity.FAULT)
    assert (finding.code, finding.where) == ("state.not-finite", "model.safetensors")
    assert (report.verdict, report.exit_code) == (Verdict.REJECTED, 27)
    chosen = ckptctl.pick(str(root))
    assert chosen.step == 4
    assert "hold NaN" in chosen.passed_over[0].reason
    assert run_ckptctl("verify", step).stdout.rstrip().endswith(f"next: ckptctl pick {root}")


def test_a_log_that_ends_with_nan_over_sound_weights_is_no_finding(root):
    logged(root / "checkpoint-6", loss=NAN, grad_norm=NAN)
    assert ckptctl.verify(str(root / "checkpoint-6")).exit_code == 0
    spoil(root / "checkpoint-6", float("-inf"))
    assert ckptctl.pick(str(root)).step == 6


def test_nan_in_weights_alone_is_searched_only_on_request(root):
    spoil(root / "checkpoint-6")
    assert ckptctl.pick(str(root)).step == 6


def test_an_acceptance_takes_the_step_as_it_is(root):
    step = root / "checkpoint-6"
    logged(step, loss=NAN)
    spoil(step)
    done = run_ckptctl("accept", step, "--reason", "that tensor is not used", "--json")
    assert validated(done.stdout)["path"] is not None
    assert ckptctl.pick(str(root)).step == 6


@pytest.mark.server
def test_an_acceptance_in_an_object_store_takes_the_step_as_it_is(root, s3):
    url, how = f"s3://{s3.bucket}/{uuid.uuid4().hex}", {"storage_options": s3.options}
    logged(root / "checkpoint-6", loss=NAN)
    spoil(root / "checkpoint-6")
    with open_store(url, **how) as store:
        for path in root.glob("checkpoint-*/*"):
            store.put(str(path.relative_to(root)), path.read_bytes())
    assert ckptctl.pick(url, level="structure", **how).step == 4
    assert ckptctl.mark(f"{url}@6", "accepted", reason="not used", **how).path is not None
    assert ckptctl.pick(url, level="structure", **how).step == 6
