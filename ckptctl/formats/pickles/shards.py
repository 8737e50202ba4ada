"""Decode a state that a rank saved with its parts of tensors: the DTensors of torch.

As `decode_state`, but a DTensor becomes a `ShardStub`, and a tensor with attributes of its
own, as DeepSpeed gives its partitions, a `TensorStub` without them.

Source: torch 2.13 `torch/_tensor.py` (`_rebuild_from_type_v2`), `torch/_utils.py`
(`_rebuild_wrapper_subclass`), `torch/distributed/tensor/_dtensor_spec.py`,
`placement_types.py`, `torch/distributed/device_mesh.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.stubs import Callee, Dtype, Function, Malformed, checked_dims
from ckptctl.formats.pickles.values import FAITHFUL, ShardStub, TensorStub, decode

SUBCLASS = "a tensor of a class that is not read"


class _Wrapper(NamedTuple):
    shape: tuple[int, ...]


def decode_shards(data: bytes) -> object:
    """The state that a pickle holds; raises as `decode_state`."""
    return decode(data, _SHARDS).value


def _wrapper(args: tuple[object, ...]) -> object:
    match args:
        case (Opaque(), Dtype(), shape, *_):
            return _Wrapper(checked_dims(shape, "the shape of a tensor"))
    raise Malformed("a tensor subclass is not rebuilt from a class, a dtype and a shape")


def _from_type(args: tuple[object, ...]) -> object:
    match args:
        case (Callee() as rebuild, _, tuple(made), state):
            value = rebuild.call(made)
            return _shard(value, state) if isinstance(value, _Wrapper) else value
    raise Malformed("a tensor is not rebuilt by a function of a tuple")


def _shard(whole: _Wrapper, state: object) -> object:
    # A DTensor has slots, whose values are the second part of its state.
    match state[-1] if isinstance(state, tuple) and state else state:
        case {"_local_tensor": TensorStub() as local, "_spec": Opaque(state=dict(spec))}:
            pass
        case _:
            return Opaque(SUBCLASS)
    match spec:
        case {"mesh": Opaque(state={"_coordinate_on_dim": place}), "placements": tuple(held)}:
            coordinate = checked_dims(tuple(place or ()), "a place in the mesh")
        case _:
            return Opaque(SUBCLASS)
    names = [one.name.rpartition(".")[2] if isinstance(one, Opaque) else "" for one in held]
    dims = tuple(_dim(one, name) for one, name in zip(held, names, strict=True))
    is_plain = {*names} <= {"Shard", "Replicate"} and len(coordinate) == len(dims)
    is_plain = is_plain and all(dim is None or dim < len(whole.shape) for dim in dims)
    return ShardStub(local, whole.shape, dims, coordinate, is_plain)


def _dim(placement: object, name: str) -> int | None:
    match placement:
        case Opaque(state={"dim": int(dim)}) if name == "Shard" and dim >= 0:
            return dim
    return None


_SHARDS = replace(
    FAITHFUL,
    names={
        **FAITHFUL.names,
        ("torch._tensor", "_rebuild_from_type_v2"): Function("_rebuild_from_type_v2", _from_type),
        ("torch._utils", "_rebuild_wrapper_subclass"): Function(
            "_rebuild_wrapper_subclass", _wrapper
        ),
    },
)
