"""`dcp.load` with the Reader returns what was saved, from everything that torch writes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    # What torch says of complex32.
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

    dcp.load(state, storage_reader=reader, **options)


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
    from oldest_torch import IS_OLDEST

    from ckptctl.train import Reader

    if name == "rank_local_2" and IS_OLDEST:
        pytest.skip("torch 2.4 reads no metadata of each rank")
    document = json.loads((checkpoints / name / "expected.json").read_text())
    for step, expected in document["steps"].items():
        try:
            state = empty_state(expected)
        except AttributeError as error:
            pytest.skip(str(error))
        load(state, Reader(checkpoints / name / step))
        assert {fqn: described(value) for fqn, value in state.items()} == expected


@pytest.mark.parametrize("version", ["2.2.2", "2.4.1", "2.6.0", "2.9.1"])
def test_every_entry_is_what_an_older_torch_saved(version: str, dcp_versions: Path):
    import numpy

    from ckptctl.train import Reader

    documents = sorted((dcp_versions / f"torch-{version}").glob("*/step_*.expected.json"))
    assert documents
    for document in documents:
        expected = json.loads(document.read_text())["keys"]
        tensors = {
            fqn: {**e, "dtype": e["dtype"].removeprefix("torch.")}
            for fqn, e in expected.items()
            if e["kind"] == "tensor"
        }
        state: dict[str, Any] = empty_state(tensors) | dict.fromkeys(expected.keys() - tensors)
        load(state, Reader(document.with_name(document.name.removesuffix(".expected.json"))))
        for fqn, value in state.items():
            said = [described(value)]
            with numpy.printoptions(legacy="1.25"):  # whose `repr` older documents have
                said.append(described(value))
            wanted = tensors.get(fqn, expected[fqn])
            assert {key: wanted[key] for key in said[0]} in said, (document, fqn)


def test_every_entry_that_a_framework_saved_is_what_torch_reads(framework_roots: Path):
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    read_by_both = 0
    for folder in sorted({path.resolve().parent for path in framework_roots.rglob(".metadata")}):
        entries = Reader(folder).read_metadata().state_dict_metadata
        own, torchs = (
            {
                fqn: torch.zeros(entry.size, dtype=entry.properties.dtype)
                if hasattr(entry, "size")
                else None
                for fqn, entry in entries.items()
            }
            for _ in range(2)
        )
        load(own, Reader(folder))
        if "olmo-core" in folder.parts:  # torch cannot without olmo-core itself
            continue
        load(torchs, dcp.FileSystemReader(folder))
        assert list(map(described, own.values())) == list(map(described, torchs.values()))
        read_by_both += 1
    assert read_by_both > 12


# One reader and its planners


def test_a_reader_serves_one_load_after_the_other_and_goes_where_it_is_sent(checkpoints: Path):
    from ckptctl.train import Reader

    run = checkpoints / "run_fsdp4"
    steps = json.loads((run / "expected.json").read_text())["steps"]
    reader = Reader(run / "step_100")
    for name, given in (("step_100", None), ("step_100", None), ("step_300", run / "step_300")):
        state = empty_state(steps[name])
        load(state, reader, checkpoint_id=given)
        assert {fqn: described(value) for fqn, value in state.items()} == steps[name]
        assert reader.loaded.n_records > 100
        assert reader.checkpoint_id == str(run / name)
    reader.close()


def test_an_address_that_no_storage_has_is_not_a_checkpoint_id():
    from ckptctl.train import Reader

    assert Reader.validate_checkpoint_id("/some/where")
    assert not Reader.validate_checkpoint_id("")


def test_the_metadata_is_torchs_own(checkpoints: Path):
    """Whoever looks into it finds the same as with torch's reader."""
    from oldest_torch import IS_OLDEST
    from torch.distributed.checkpoint import FileSystemReader

    from ckptctl.train import Reader

    of_its_dtypes = () if IS_OLDEST else ("dtypes_1",)
    for name in ("run_fsdp4", "tp_fsdp_2x2", "shapes_2", "zstd_2", *of_its_dtypes):
        step = next((checkpoints / name).glob("step_*"))
        own, torchs = Reader(step).read_metadata(), FileSystemReader(step).read_metadata()
        assert own.state_dict_metadata == torchs.state_dict_metadata
        assert own.planner_data == torchs.planner_data
        if not IS_OLDEST:  # its metadata have no version
            assert own.version == torchs.version
        assert own.storage_meta.save_id == torchs.storage_meta.save_id


def test_a_state_that_asks_for_an_entry_too_many_is_torchs_own_error(checkpoints: Path):
    from torch.distributed.checkpoint.api import CheckpointException

    from ckptctl.train import Reader

    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: gone"):
        load({"gone": None}, Reader(checkpoints / "no_dist_1" / "step_100"))


def test_a_planner_that_makes_tensors_gets_them_back_before_it_makes_many_more(tmp_path: Path):
    """As one does that loads into another form of the model, tensor by tensor."""
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    n = 5 << 20  # 20 MiB each
    saved = {f"layer.{i}": torch.full((n,), float(i)) for i in range(5)}
    dcp.save(saved, checkpoint_id=tmp_path / "step_1")

    class Halving(dcp.DefaultLoadPlanner):
        made = most = 0

        def resolve_tensor(self, read_item: Any) -> Any:
            self.made += 1
            self.most = max(self.most, self.made)
            return torch.empty(read_item.lengths)

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            self.made -= 1
            super().resolve_tensor(read_item).copy_(tensor / 2)

    planner = Halving()
    state = {name: torch.zeros(n) for name in saved}
    load(state, Reader(tmp_path / "step_1"), planner=planner)
    assert all(torch.equal(state[name], saved[name] / 2) for name in saved)
    assert planner.made == 0
    assert planner.most <= 4


def test_tensors_that_are_not_plain_are_loaded_too(tmp_path: Path):
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    values = torch.arange(200_000, dtype=torch.float32).to(torch.complex64) * (1 + 2j)
    dcp.save({"whole": values, "few": values[:10].clone()}, checkpoint_id=tmp_path)
    state = {"whole": torch.zeros(200_000, dtype=torch.complex64).conj()}
    state["few"] = torch.zeros(10, dtype=torch.complex64).conj()
    load(state, Reader(tmp_path))
    assert torch.equal(state["whole"], values)
    assert torch.equal(state["few"], values[:10])
    assert state["whole"].is_conj()


def test_a_view_that_was_saved_conjugated_or_negated_has_the_values_that_it_had(tmp_path: Path):
    import torch
    import torch.distributed.checkpoint as dcp

    from ckptctl.train import Reader

    values = torch.arange(200_000, dtype=torch.float32).to(torch.complex64) * (1 + 2j)
    saved = {"whole": values.conj(), "few": values[:10].conj(), "negated": values[:10].conj().imag}
    dcp.save(saved, checkpoint_id=tmp_path)
    state = {name: torch.zeros(like.shape, dtype=like.dtype) for name, like in saved.items()}
    load(state, Reader(tmp_path))
    assert all(torch.equal(state[name], like) for name, like in saved.items())


def test_without_torch_the_reader_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckptctl.errors import MissingExtra\n"
        "import ckptctl.train\n"
        "try: ckptctl.train.Reader\n"
        "except MissingExtra as error: print(error.next_command)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "pip install 'ckptctl[torch]'\n", done.stderr
