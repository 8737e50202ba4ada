"""The values beside the metadata: plain ones come back, all others keep their name only."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict

import pytest
from made_pickles import called, dict_of, list_of, named, number, pickled, text, tuple_of

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import TensorStub, decode_tensor_pickle, decode_value
from ckptctl.model import DTYPE_SIZES

HOOKS = called(named("collections", "OrderedDict"))


def storage(name: str = "FloatStorage", size: bytes = b"K\x0c", module: str = "torch") -> bytes:
    """The persistent id of a storage named 0."""
    key = tuple_of(text("storage"), named(module, name), text("0"), text("cpu"), size)
    return key + b"Q"


def rebuilt(
    *more: bytes,
    version: int = 2,
    stored: bytes = storage(),
    offset: bytes = b"K\x00",
    shape: bytes = tuple_of(number(3), number(4)),
    strides: bytes = tuple_of(number(4), number(1)),
) -> bytes:
    function = named("torch._utils", f"_rebuild_tensor_v{version}")
    return called(function, stored, offset, shape, strides, b"\x89", HOOKS, *more)


STUB = TensorStub("float32", (3, 4), (4, 1), 0, "0", 12)


def test_plain_values_come_back():
    value = {"step": 10, "lr": 1e-4, "names": ["a", ("b", None)], 3: {True: b"raw"}, 0.5: []}
    for protocol in range(3, 6):
        assert decode_value(pickle.dumps(value, protocol)) == value


def test_bytes_of_protocol_2_come_back():
    for value in (b"", b"\x00\x80\xff", [b"a", b"b"]):
        assert decode_value(pickle.dumps(value, 2)) == value


def test_sets_come_back_from_the_protocols_that_have_them():
    assert decode_value(pickle.dumps({1, (2, "a")}, 4)) == {1, (2, "a")}
    unknown = decode_value(pickle.dumps({1, 2}, 2))
    assert isinstance(unknown, Opaque)
    assert unknown.name == "__builtin__.set"


def test_a_generator_s_state_of_128_bits_comes_back():
    state = {"state": {"state": 2**127 + 5, "inc": 2**128 - 1}}
    assert decode_value(pickle.dumps(state)) == state


def test_an_ordered_dict_comes_back_as_a_dict():
    assert decode_value(pickle.dumps(OrderedDict(a=[1]))) == {"a": [1]}


def test_what_is_unknown_keeps_its_name_and_the_state_it_was_given():
    value = decode_value(pickle.dumps({"args": argparse.Namespace(lr=0.1, steps=30)}))
    assert isinstance(value, dict)
    args = value["args"]
    assert isinstance(args, Opaque)
    assert args.name == "argparse.Namespace"
    assert args.state == {"lr": 0.1, "steps": 30}
    assert repr(args) == "Opaque('argparse.Namespace')"


def test_what_is_unknown_is_equal_to_nothing_else():
    thing = called(named("shop", "Thing"))
    first, second = decode_value(pickled(list_of(thing, thing)))
    assert first != second
    assert len(decode_value(pickled(dict_of(thing, b"N", thing, b"N")))) == 2


def test_a_class_that_is_named_and_not_called_is_opaque_too():
    value = decode_value(pickle.dumps([argparse.Namespace, OSError]))
    assert repr(value) == "[Opaque('argparse.Namespace'), Opaque('builtins.OSError')]"


def test_an_unknown_persistent_id_is_opaque():
    value = decode_value(pickled(text("s3://bucket/key") + b"Q"))
    assert isinstance(value, Opaque)
    assert value.name == "persistent id"


def test_a_tensor_among_values_is_a_stub():
    assert decode_value(pickled(dict_of(text("w"), rebuilt()))) == {"w": STUB}


def test_the_sidecars_of_frameworks_are_read(framework_roots):
    n_files = 0
    for path in sorted((*framework_roots.rglob("*.pt"), *framework_roots.rglob("*.pth"))):
        with zipfile.ZipFile(path) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            assert isinstance(decode_value(archive.read(member)), dict), path
        n_files += 1
    assert n_files >= 20


def test_the_step_of_kempnerforge_is_in_its_train_state(framework_roots):
    (path,) = (framework_roots / "kempnerforge").rglob("step_20/train_state.pt")
    with zipfile.ZipFile(path) as archive:
        value = decode_value(archive.read("train_state/data.pkl"))
    assert isinstance(value, dict)
    assert (value["step"], value["tokens_seen"]) == (20, 5_120)


@pytest.mark.parametrize(
    ("data", "stub"),
    [
        (rebuilt(), STUB),
        (rebuilt(b"}"), STUB),
        (
            rebuilt(strides=tuple_of(number(1), number(3)), offset=b"K\x02"),
            TensorStub("float32", (3, 4), (1, 3), 2, "0", 12),
        ),
        (
            rebuilt(stored=storage("BFloat16Storage"), shape=b")", strides=b")"),
            TensorStub("bfloat16", (), (), 0, "0", 12),
        ),
        (
            rebuilt(
                named("torch", "float8_e4m3fn"),
                version=3,
                stored=storage("UntypedStorage", module="torch.storage"),
            ),
            TensorStub("float8_e4m3fn", (3, 4), (4, 1), 0, "0", 12),
        ),
        (
            rebuilt(
                named("torch", "uint16"),
                version=3,
                stored=storage("UntypedStorage", b"K\x18", module="torch.storage"),
            ),
            TensorStub("uint16", (3, 4), (4, 1), 0, "0", 12),
        ),
        (called(named("torch._utils", "_rebuild_parameter"), rebuilt(), b"\x88", HOOKS), STUB),
    ],
)
def test_a_tensor_s_pickle_gives_a_stub(data, stub):
    assert decode_tensor_pickle(pickled(data)) == stub


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (rebuilt(stored=b"N"), "not rebuilt from a storage"),
        (rebuilt(shape=tuple_of(number(12))), "a tensor of 1 dimensions has 2 strides"),
        (
            rebuilt(strides=tuple_of(number(-4), number(1))),
            "the strides of a tensor has a dimension",
        ),
        (rebuilt(offset=number(-1)), "the offset of a tensor has a dimension"),
        (rebuilt(stored=storage(size=number(-1))), "a persistent id that names no storage"),
        (rebuilt(stored=storage(size=text("12"))), "a persistent id that names no storage"),
        (
            rebuilt(
                named("torch", "float32"),
                version=3,
                stored=storage("UntypedStorage", b"K\x0d", module="torch.storage"),
            ),
            "13 bytes are no whole number of float32 elements",
        ),
        (rebuilt(version=3), "not rebuilt from a storage, a shape, strides and a dtype"),
        (
            called(named("torch._utils", "_rebuild_parameter"), number(3)),
            "not rebuilt from a tensor",
        ),
        (number(10), "the pickle holds a int, not a tensor"),
    ],
)
def test_a_tensor_that_cannot_be_is_unreadable(data, why):
    with pytest.raises(MetadataUnreadable) as refused:
        decode_tensor_pickle(pickled(data))
    assert why in refused.value.message


def test_a_tensor_s_pickle_may_ask_for_nothing_else():
    with pytest.raises(MetadataUnsafe, match=r"asks for 'argparse\.Namespace' at byte \d+"):
        decode_tensor_pickle(pickle.dumps(argparse.Namespace(a=1)))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_that_torch_saves_is_told_with_its_storage():
    import torch

    n_dtypes = 0
    for name in DTYPE_SIZES:
        dtype = getattr(torch, name)
        try:
            value = torch.zeros(3, 2, dtype=dtype).t()
        except (RuntimeError, NotImplementedError):
            continue  # quantized dtypes have no zeros
        for saved in (value, torch.nn.Parameter(value, requires_grad=False)):
            stub = decode_tensor_pickle(saved_pickle(saved))
            assert stub == TensorStub(name, (2, 3), (1, 2), 0, "0", 6)
        n_dtypes += 1
    assert n_dtypes >= 20


def saved_pickle(value: object) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def test_a_value_deeper_than_a_hundred_levels_is_not_walked():
    def nested(n_levels: int) -> bytes:
        return pickled(b"]" * n_levels + b"a" * (n_levels - 1))

    assert decode_value(nested(100))
    assert repr(decode_value(nested(101))) == "Opaque('a value nested deeper than 100 levels')"


def test_an_object_may_hold_itself():
    body = called(named("shop", "Thing")) + b"\x94}" + text("self") + b"h\x00sb"
    value = decode_value(pickled(body))
    assert isinstance(value, Opaque)
    assert value.state == {"self": value}


def test_a_list_that_holds_itself_is_not_walked():
    held: list[object] = []
    held.append(held)
    assert repr(decode_value(pickle.dumps(held))) == "Opaque('a container that holds itself')"


def test_what_is_shared_a_million_times_is_not_walked():
    thousand = list_of(*[b"N"] * 1_000)
    assert len(decode_value(pickled(thousand[:-1] + b"e" + b"\x94" + b"0" + shared(500)))) == 500
    value = decode_value(pickled(thousand + b"\x940" + shared(1_000)))
    assert "1,000,000 parts" in repr(value)


def shared(n_times: int) -> bytes:
    """A list of the first value in the memo."""
    return b"](" + b"h\x00" * n_times + b"e"


def test_a_large_value_may_have_as_many_parts_as_its_pickle_has_bytes():
    assert len(decode_value(pickle.dumps(list(range(1_200_000))))) == 1_200_000
