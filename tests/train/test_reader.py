"""Does `dcp.load` with the Reader give what was saved, from everything that torch writes?"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    # What torch says of itself: of a load in one process, and of complex32.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

# Everything that `fixtures/make.py` writes with a `.metadata` of records.
VARIANTS = (
    *("fsdp_1", "fsdp_2", "run_fsdp4", "run_bare4", "fsdp_8", "ddp_2", "hsdp_2x2"),
    *("tp_fsdp_2x2", "pipeline_2", "dtypes_1", "shapes_2", "uneven_4", "uneven_8"),
    *("threads_2", "files_2", "zstd_2", "fsspec_2", "async_2", "no_crc_2", "rank_local_2"),
    *("lowest_rank_2", "no_dist_1", "subgroup_4", "resaved_4"),
)


def empty_state(expected: dict[str, Any]) -> dict[str, Any]:
    """A state with a tensor of zeros for each tensor that was saved, None for the rest."""
    import torch

    return {
        fqn: torch.zeros(e["shape"], dtype=getattr(torch, e["dtype"])) if "shape" in e else None
        for fqn, e in expected.items()
    }


def load(state: dict[str, Any], reader: Any, **options: Any) -> None:
    """`dcp.load` in this process alone."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, storage_reader=reader, no_dist=True, **options)


def described(value: Any) -> dict[str, Any]:
    """A value as `expected.json` describes it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return {"kind": "bytes", "repr": repr(value)}
    return {
        "kind": "tensor",
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(elements(value)).hexdigest(),
    }


def elements(tensor: Any) -> bytes:
    """The elements of a tensor in row-major order."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_entry_is_what_was_saved(name: str, checkpoints: Path):
    from ckptctl.train import Reader

    document = json.loads((checkpoints / name / "expected.json").read_text())
    for step, expected in document["steps"].items():
        state = empty_state(expected)
        load(state, Reader(checkpoints / name / step))
        assert {fqn: described(value) for fqn, value in state.items()} == expected
