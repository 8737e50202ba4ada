"""A `Checkpointer` that requires seals compares the bytes before it loads a step."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from damage import flip  # noqa: E402
from one_process import Job, run  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import NothingToResume, UsageError  # noqa: E402

pytestmark = pytest.mark.torch

KEY = b"a key of thirty-two bytes or so."
SEALED = {"require_seal": True, "key": KEY}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 3, 6 and 9, sealed with the key as they were saved."""
    root = tmp_path_factory.mktemp("sealed") / "run"
    run(root, 9, **SEALED)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def resumed(root: Path, resume_from: object = "auto", **options: object) -> int:
    job = Job(root, **{**SEALED, **options})
    try:
        return job.resume(resume_from).step
    finally:
        job.die()


@pytest.mark.parametrize("resume_from", ["auto", 9])
def test_a_sound_sealed_step_is_resumed_from(root, resume_from):
    assert resumed(root, resume_from) == 9


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_changed_byte_leads_to_the_step_before(root, name):
    flip(root / "step_9" / name)
    assert resumed(root) == 6


def test_an_unsealed_step_is_passed_over_without_counting_as_one_that_failed(root):
    (root / "step_9" / ".ckptctl" / "seal.json").unlink()
    assert resumed(root, max_fallback=0) == 6


@pytest.mark.parametrize("level", ["listing", "structure"])
def test_a_level_that_compares_no_bytes_is_refused(root, level):
    with pytest.raises(NothingToResume):
        resumed(root, level=level)


def test_a_job_signs_its_saves_and_takes_only_those_that_its_signer_made(tmp_path):
    key = tmp_path / "signer"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]
    subprocess.run(make, check=True)
    signer = {
        "signing_key": key.read_bytes(),
        "require_signature": [Path(f"{key}.pub").read_bytes()],
    }
    root = tmp_path / "run"
    run(root, 9, **signer)
    signed = {"require_seal": False, "key": None, **signer}
    assert resumed(root, **signed) == 9
    ckptctl.seal(f"{root}@9", replace=True)  # by somebody without the private key
    assert resumed(root, **signed) == 6


@pytest.mark.parametrize("given", ["no signing_key", "a signing_key of another signer"])
def test_a_job_whose_own_steps_would_not_have_the_required_signature_does_not_start(
    tmp_path, given
):
    """Else each restart would go back to the last step that somebody signed."""
    for name in ("signer", "another"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name]
        subprocess.run(make, check=True)
    signing_key, another = ((tmp_path / name).read_bytes() for name in ("signer", "another"))
    signed = {"require_signature": [(tmp_path / "signer.pub").read_bytes()]}
    root = tmp_path / "run"
    run(root, 3, signing_key=signing_key, **signed)
    own = another if given.startswith("a ") else None
    with pytest.raises(UsageError, match=f"require_signature with {given}") as refused:
        Job(root, signing_key=own, **signed).resume()
    assert "seal=False" in str(refused.value)
    for allowed in ({"seal": False}, {"signing_key": signing_key}):
        job = Job(root, **signed, **allowed)
        assert job.resume().step == 3
        job.die()
    replay = Job(root, **signed)
    assert replay.ckpt.resume(replay=1, resume_from=3).step == 3
    replay.die()
