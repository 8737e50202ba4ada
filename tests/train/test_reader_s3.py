"""A step in a bucket loads like one on a disk, with few requests."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from services.counting_proxy import CountingProxy
from services.plugin import S3Server

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from ckptctl.errors import StepDamaged  # noqa: E402
from ckptctl.train import Reader  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.server,
]

N_LARGE = 3 << 20
"""Elements of a record that takes several requests: 12 MiB."""


def state() -> dict[str, Any]:
    small = {f"layer.{i}": torch.full((3000,), float(i)) for i in range(50)}
    return {"large": torch.arange(N_LARGE, dtype=torch.float32), **small, "step": 7}


@pytest.fixture
def uploaded(s3_moto: S3Server, tmp_path: Path) -> str:
    step = tmp_path / "step_100"
    dcp.save(state(), checkpoint_id=step, no_dist=True)
    prefix = f"{uuid.uuid4().hex}/step_100"
    for file in step.iterdir():
        s3_moto.client.put_object(
            Bucket=s3_moto.bucket, Key=f"{prefix}/{file.name}", Body=file.read_bytes()
        )
    return f"s3://{s3_moto.bucket}/{prefix}"


def test_a_step_in_a_bucket_is_loaded_and_proven_with_few_requests(
    s3_moto: S3Server, uploaded: str, counting_proxy: Callable[[str], CountingProxy]
):
    proxy = counting_proxy(s3_moto.endpoint)
    reader = Reader(uploaded, storage_options={**s3_moto.options, "endpoint_url": proxy.url})
    wanted = {name: torch.zeros_like(value) for name, value in state().items() if name != "step"}
    wanted["step"] = 0
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    for name, value in state().items():
        same = torch.equal(wanted[name], value) if name != "step" else wanted[name] == value
        assert same, name
    assert reader.loaded.n_proven == reader.loaded.n_needed == 4 * (N_LARGE + 50 * 3000)
    # The metadata; the short records and the frame of the long one; the long one in pieces.
    assert proxy.counts == {"GET": proxy.counts["GET"]}
    assert proxy.counts["GET"] <= 1 + 2 + 4


def test_a_shard_that_is_not_in_the_bucket_is_damage(s3_moto: S3Server, uploaded: str):
    bucket, key = uploaded.removeprefix("s3://").split("/", 1)
    s3_moto.client.delete_object(Bucket=bucket, Key=f"{key}/__0_0.distcp")
    reader = Reader(uploaded, storage_options=s3_moto.options)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"layer.1": torch.zeros(3000)}, storage_reader=reader, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, StepDamaged)
    assert (error.code, error.exit_code) == ("shard.missing", 20)
