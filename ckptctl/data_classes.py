"""Define data classes that take little time to define.

`dataclasses` compiles up to eight functions for a class when the class is defined, and imports
`inspect`; `ckptctl pick` defines ninety classes when it starts. Here a class gets its slots
when it is defined and its `__init__` when that is first used; the other methods are shared.

For type checkers, `dataclasses.fields`, `asdict`, `replace` and pickle these are data classes.
They always have slots and no order, and no `InitVar` or `ClassVar`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

__all__ = ["dataclass", "field", "fields", "finish", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, fields, replace

    def finish() -> None:
        """Compile what was not used yet of every class."""
else:
    _NONE_GIVEN = object()
    _UNFINISHED = []

    def finish():
        """Compile what was not used yet of every class: before a process forbids `exec`."""
        while _UNFINISHED:
            made = _UNFINISHED.pop()
            made.__init__, made.__dataclass_fields__  # noqa: B018 - the first use

    def dataclass(*, slots, frozen=False, kw_only=False):
        """`dataclasses.dataclass`."""
        if not slots:
            raise TypeError("a data class of ckptctl has slots")
        return lambda cls: _with_slots(cls, frozen=frozen, kw_only=kw_only)

    class field:  # noqa: N801 - it stands for the function
        """`dataclasses.field`."""

        __slots__ = ("about", "annotation", "kw_only", "name")

        def __init__(self, **about):
            self.about = about

        def has(self, what):
            """Whether the field takes part in `init`, `repr` or `compare`."""
            return self.about.get(what, True)

    def fields(of, /):
        """`dataclasses.fields`; only the names are to be used."""
        return tuple(of._fields.values())

    def replace(made, /, **changes):
        """`dataclasses.replace`."""
        for name, each in made._fields.items():
            if name not in changes and each.has("init"):
                changes[name] = getattr(made, name)
        return made.__class__(**changes)

    def _with_slots(cls, *, frozen, kw_only):
        """The class again with slots, as they cannot be added to a class."""
        namespace = {
            name: value
            for name, value in vars(cls).items()
            if name not in ("__dict__", "__weakref__")
        }
        inherited, own = {}, {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(vars(base).get("_fields", {}))
        for name, annotation in cls.__annotations__.items():
            given = namespace.pop(name, _NONE_GIVEN)
            if not isinstance(given, field):
                given = field() if given is _NONE_GIVEN else field(default=given)
            given.name, given.annotation, given.kw_only = name, annotation, kw_only
            own[name] = given
        fields = {**inherited, **own}
        compared = [name for name, each in fields.items() if each.has("compare")]
        if namespace.get("__hash__") is None:
            namespace["__hash__"] = _hash if frozen else None
        if frozen:
            namespace.update(_OF_FROZEN)
        made = type(cls)(
            cls.__name__,
            cls.__bases__,
            {
                "__repr__": _repr,
                "__eq__": _eq,
                **namespace,
                "__slots__": tuple(name for name in own if name not in inherited),
                "__match_args__": tuple(
                    name for name, each in fields.items() if each.has("init") and not each.kw_only
                ),
                "_fields": fields,
                "_compared": attrgetter(*compared) if compared else type,
                "__init__": _OnFirstUse(_init),
                "__dataclass_fields__": _OnFirstUse(_standard_fields),
                "__qualname__": cls.__qualname__,
            },
        )
        _UNFINISHED.append(made)
        return made

    class _OnFirstUse:
        """An attribute of a class that is made when it is first used."""

        def __init__(self, make):
            self.make = make

        def __set_name__(self, cls, name):
            self.cls, self.name = cls, name

        def __get__(self, made, owner=None):
            value = self.make(self.cls)
            setattr(self.cls, self.name, value)
            return getattr(owner if made is None else made, self.name)

    def _init(cls):
        """The `__init__` of a class."""
        known, positional, keyword, body = {"_none_given": _NONE_GIVEN}, [], [], []
        frozen = cls.__setattr__ is _refuse_to_set
        for name, each in cls._fields.items():
            parameter = value = name
            if "default" in each.about:
                known[f"_default_{name}"] = each.about["default"]
                parameter = f"{name}=_default_{name}"
            elif "default_factory" in each.about:
                known[f"_new_{name}"] = each.about["default_factory"]
                parameter = f"{name}=_none_given"
                value = f"_new_{name}() if {name} is _none_given else {name}"
            if each.has("init"):
                (keyword if each.kw_only else positional).append(parameter)
            elif parameter == name:
                continue  # `__post_init__` sets it
            known[f"_set_{name}"] = getattr(cls, name).__set__
            body.append(f"_set_{name}(self, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        parameters = ", ".join(["self", *positional, *(["*"] if keyword else []), *keyword])
        source = "\n ".join([f"def __init__({parameters}):", *body, "return None"])
        exec(source, known)  # noqa: S102 - of names that are in our own source
        known["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
        return known["__init__"]

    def _standard_fields(cls):
        """The fields as `dataclasses` describes them."""
        import dataclasses

        standard = dataclasses.make_dataclass(
            cls.__name__,
            [
                (name, each.annotation, dataclasses.field(**each.about, kw_only=each.kw_only))
                for name, each in cls._fields.items()
            ],
        )
        return standard.__dataclass_fields__

    def _repr(self):
        shown = (name for name, each in self._fields.items() if each.has("repr"))
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{self.__class__.__qualname__}({values})"

    def _eq(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._compared(self) == self._compared(other)

    def _hash(self):
        return hash(self._compared(self))

    def _refuse_to_set(self, name, value):  # noqa: ARG001
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self, name):  # noqa: ARG001
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _state(self):
        return [getattr(self, name) for name in self._fields]

    def _set_state(self, state):
        for name, value in zip(self._fields, state, strict=True):
            object.__setattr__(self, name, value)

    _OF_FROZEN = {
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
        "__getstate__": _state,
        "__setstate__": _set_state,
    }
