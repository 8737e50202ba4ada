"""The data classes of the package behave as those of the standard library."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil

import pytest

import ckptctl
from ckptctl.data_classes import dataclass, field, fields, replace
from ckptctl.findings import Finding, Severity
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements, StorageOptions


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    seen: list[int] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Named(Point):
    name: str = "a"


@dataclass(slots=True)
class Counter:
    step: int
    total: int = field(init=False)

    def __post_init__(self):
        self.total = self.step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    first: int = 1
    second: int


@dataclass(frozen=True, slots=True)
class Empty:
    pass


def test_values_are_given_by_position_by_name_and_by_default():
    assert (Point(1).x, Point(1).y, Point(1).seen) == (1, 2, [])
    assert Point(1, y=3) == Point(x=1, y=3) != Point(1)
    assert Named(1, 2, [], "b").name == "b"
    assert Counter(4).total == 5
    assert Options(second=2) == Options(first=1, second=2)
    assert Empty() == Empty()
    assert Point(1) != Named(1)


def test_each_object_has_its_own_default_of_a_factory():
    a, b = Point(1), Point(1)
    a.seen.append(1)
    assert b.seen == []


@pytest.mark.parametrize("wrong", [(), (1, 2, [], 4)])
def test_a_wrong_number_of_values_is_an_error(wrong):
    with pytest.raises(TypeError, match="__init__"):
        Point(*wrong)


def test_keywords_only_are_not_taken_by_position():
    with pytest.raises(TypeError):
        Options(1, 2)


def test_a_frozen_object_cannot_be_changed():
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    with pytest.raises(AttributeError):
        Counter(1).other = 1


def test_frozen_objects_are_hashed_by_value_and_others_are_not_hashed():
    assert {Point(1): "a"}[Point(1)] == "a"
    assert hash(Empty()) == hash(Empty())
    with pytest.raises(TypeError):
        hash(Counter(1))


def test_the_representation_names_class_and_fields():
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert repr(Empty()) == "Empty()"


@pytest.mark.parametrize("made", [Point(1, 2, [3]), Named(1), Counter(3), Options(second=1)])
def test_objects_are_pickled_and_copied(made):
    for same in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert same == made
        assert same is not made


def test_fields_are_replaced():
    assert replace(Named(1, name="b"), x=5) == Named(5, name="b")
    assert dataclasses.replace(Point(1), y=7) == Point(1, 7)
    assert replace(Counter(1), step=7).total == 8
    with pytest.raises(TypeError):
        replace(Point(1), z=1)


def test_the_standard_library_takes_them_for_its_own():
    assert dataclasses.is_dataclass(Point)
    assert dataclasses.is_dataclass(Named(1))
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 2, "seen": []}
    assert [each.name for each in dataclasses.fields(Named)] == ["x", "y", "seen", "name"]
    assert [each.name for each in fields(Named)] == ["x", "y", "seen", "name"]
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_public_results_and_options_keep_what_their_users_rely_on():
    finding = Finding("shard.missing", Severity.FAULT, "__0_0.distcp", "is missing")
    assert pickle.loads(pickle.dumps(finding)) == finding
    assert dataclasses.replace(finding, where="b").where == "b"
    assert dataclasses.asdict(PickPolicy(level=Level.LISTING))["level"] is Level.LISTING
    assert "secret" not in repr(StorageOptions(storage_options={"secret": "x"}))
    assert "k3y" not in repr(Requirements(key=b"k3y" * 9))


def _classes():
    for module in pkgutil.walk_packages(ckptctl.__path__, "ckptctl."):
        if module.name == "ckptctl.__main__" or ".integrations." in module.name:
            continue
        for each in vars(importlib.import_module(module.name)).values():
            ours = isinstance(each, type) and each.__module__ == module.name
            if ours and "_compared" in vars(each):
                yield each


def test_every_class_has_the_signature_that_the_standard_library_would_give_it():
    pytest.importorskip("torch")
    n_classes = 0
    for kind in _classes():
        n_classes += 1
        twin = dataclasses.make_dataclass(
            kind.__name__,
            [
                (
                    each.name,
                    "int",
                    dataclasses.field(
                        default=each.default,
                        default_factory=each.default_factory,
                        init=each.init,
                        kw_only=each.kw_only,
                    ),
                )
                for each in dataclasses.fields(kind)
            ],
        )
        names = [(p.name, p.kind) for p in inspect.signature(kind).parameters.values()]
        assert names == [(p.name, p.kind) for p in inspect.signature(twin).parameters.values()]
        assert kind.__match_args__ == twin.__match_args__
    assert n_classes > 200
