"""One policy for the globals of every pickle of a step: harmless, able to act, or not known.

`torch.load` and `pickle.load` import what a pickle names and call what it says, with the rights
of the job. The tables of `known_globals.txt` hold what frameworks write and what can act:

- A global that can act (call, import, open, evaluate, read attributes) is unsafe wherever it is
  named, called or not: what is passed to an unknown class may be called there.
- Every other global of the standard library that the tables lack is unsafe once it is called.
  The library is finite and all its harmless classes are listed.
- So is a function of a large package that is known to have functions which act (`JUDGED`).
- A class or a function of any other package is unknown: a finding names it.

Nothing here imports or calls anything of a pickle.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path

from ckptctl.formats.pickles.stubs import Acts, Callee, Malformed, Stub, shown


class Opaque(Stub, Callee):
    """Something that is no plain value: its `name`, and what the pickle put into it.

    `args` are those of the call that made it, `state` is what it was given last, `items` are
    the values that were appended or set afterwards, a pair for each key. Two of one name are not
    equal: what they were is not known.
    """

    __slots__ = ("args", "items")

    owns_state = False

    def __init__(self, kind: str, args: tuple[object, ...] = ()) -> None:
        super().__init__(kind)
        self.args = args
        self.items: list[object] = []

    @property
    def name(self) -> str:
        """What the pickle calls it: `argparse.Namespace`, `numpy.dtype`, `persistent id`."""
        return self.kind

    def call(self, args: tuple[object, ...]) -> object:  # noqa: ARG002
        """Refuse: what a call returned is not called again by what classes write."""
        raise Acts(f"calls an object of {shown(self.name)}")

    def build(self, state: object) -> None:
        """Keep the state that was given last."""
        self.state = state

    def fill(self, values: Iterable[object]) -> None:
        """Keep the values: those of a deque, or pairs of a dictionary."""
        self.items.extend(values)

    def __repr__(self) -> str:
        return f"Opaque({shown(self.name)})"


class Standing(Enum):
    """What is known of a global."""

    HARMLESS = "harmless"
    ACTS = "acts"
    ACTS_IF_CALLED = "acts if called"
    UNKNOWN = "unknown"


class NamedGlobal(Opaque):
    """A global that stands in no grammar: a class or a function, and what is known of it."""

    __slots__ = ("standing",)

    def __init__(self, name: str, standing: Standing) -> None:
        super().__init__(name)
        self.standing = standing

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def call(self, args: tuple[object, ...]) -> object:
        """An object of this name; refused for what acts once it is called."""
        if self.standing is Standing.ACTS_IF_CALLED:
            raise Acts(f"calls {shown(self.name)}")
        # It may call what it gets; `partial` is read by itself.
        for argument in args:
            for function in _functions_in(argument):
                # What is listed of the standard library calls nothing that it gets; other listed
                # classes get types.
                may_hold = _root(self.name) in _LIBRARY or _is_class(function.last)
                if self.standing is Standing.HARMLESS and may_hold:
                    continue
                raise Acts(f"passes {shown(function.name)} to {shown(self.name)}")
            if self.name not in _ITERATING or type(argument) is not Opaque:
                continue
            if "." in argument.name and _root(argument.name) not in _LIBRARY:
                raise Acts(f"has {shown(self.name)} iterate over an object of another class")
        return Opaque(self.kind, args)

    def build(self, state: object) -> None:  # noqa: ARG002
        """Refuse: attributes of a class or a module are those of the process that loads."""
        raise Acts(f"sets attributes on {shown(self.name)}")

    def fill(self, values: Iterable[object]) -> None:  # noqa: ARG002
        """Refuse: what a module holds is changed for the process that loads."""
        raise Acts(f"changes what {shown(self.name)} holds")

    def make(self, args: tuple[object, ...]) -> object:
        """As `call`, by a class's own `__new__`: what it makes is known to be an object."""
        if self.standing is Standing.ACTS_IF_CALLED and _root(self.name) not in _LIBRARY:
            return Opaque(self.kind, args)
        return self.call(args)


_ITERATING = frozenset(
    {
        *(f"builtins.{name}" for name in ("list", "tuple", "set", "frozenset", "dict")),
        *("collections.deque", "collections.Counter"),
    }
)
"""They call methods of what they are made of. Writers make them of lists and dictionaries."""


def _functions_in(value: object) -> Iterator[NamedGlobal]:
    """What acts once it is called: an argument, or one of several in a short container."""
    if isinstance(value, NamedGlobal):
        if value.standing is Standing.ACTS_IF_CALLED:
            yield value
    elif isinstance(value, (dict, list, tuple)) and len(value) <= _MAX_ARGUMENTS:
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, NamedGlobal) and item.standing is Standing.ACTS_IF_CALLED:
                yield item


_MAX_ARGUMENTS = 64
"""Keywords of a call, or a list of functions; to look through more would cost time."""


class Partial(Opaque):
    """A `functools.partial`: calling it calls the function that it was made of."""

    __slots__ = ()

    def call(self, args: tuple[object, ...]) -> object:
        """Call each function that it may hold: a state replaces the first one."""
        state = self.state[:1] if isinstance(self.state, tuple) else ()
        result: object = None
        for function in (*self.args[:1], *state):
            if not isinstance(function, Callee):
                raise Acts("calls what is no function")
            result = function.call((*self.args[1:], *args))
        return result


class _New(Callee):
    """The `__new__` of a class: calling it with the class makes an object."""

    __slots__ = ("_cls",)

    def __init__(self, cls: NamedGlobal) -> None:
        self._cls = cls

    def call(self, args: tuple[object, ...]) -> object:
        """An object of the class."""
        return self._cls.make(args[1:])


def partial(args: tuple[object, ...]) -> object:
    """What stands for `functools.partial(function, ...)`."""
    match args:
        case (NamedGlobal(standing=Standing.ACTS_IF_CALLED) as function, *_):
            if _root(function.name) in _LIBRARY:
                raise Acts(f"binds {shown(function.name)}")
    return Partial("functools.partial", args)


def reference(module: str, name: str) -> NamedGlobal:
    """What stands for a global; raises `Acts` for one that can act."""
    full = f"{module}.{name}"
    if len(full) > MAX_NAME:
        raise Acts(f"asks for {shown(full)}")
    found = standing(module, name)
    if found is Standing.ACTS:
        raise Acts(f"asks for {shown(full)}")
    return NamedGlobal(full, found)


def instance(args: tuple[object, ...]) -> object:
    """What stands for `copyreg.__newobj__(cls, ...)`, as protocols 0 and 1 make objects."""
    if not args or not isinstance(args[0], Callee):
        raise Acts("makes an object of what is no class")
    return args[0].make(args[1:])


def instance_with_keywords(args: tuple[object, ...]) -> object:
    """What stands for `copyreg.__newobj_ex__(cls, args, keywords)`."""
    match args:
        case (cls, tuple(values), keywords):
            return instance((cls, *values, keywords))
    raise Malformed("an object is not made of a class, a tuple and keywords")


def attribute(args: tuple[object, ...]) -> object:
    """What stands for `getattr(cls, name)`: a member of an enumeration in Python 3.11 and before.

    Of a class alone, and what comes of it can neither be called nor read further.
    """
    match args:
        case (NamedGlobal() as cls, str(name)) if not name.startswith("_"):
            is_foreign = _is_class(cls.last) and _root(cls.name) not in _LIBRARY
            if is_foreign or cls.name.endswith(".SafeUUID"):
                return Opaque(f"{cls.name}.{name}")
        case (NamedGlobal() as cls, "__new__"):  # protocols 2 and 3 call it with keywords
            return _New(cls)
        case (NamedGlobal(name="zoneinfo.ZoneInfo"), "_unpickle"):
            return NamedGlobal("zoneinfo.ZoneInfo", Standing.HARMLESS)
    raise Acts("reads an attribute with builtins.getattr")


def item(args: tuple[object, ...]) -> object:
    """What stands for `operator.getitem(typing.List, int)`, which is how types are pickled."""
    if args and isinstance(args[0], NamedGlobal) and args[0].name.startswith("typing."):
        return Opaque(args[0].name, args)
    raise Acts("calls operator.getitem")


def union_of_types(args: tuple[object, ...]) -> object:
    """What stands for `functools.reduce(operator.or_, types)`: `int | str`, pickled."""
    first = args[0] if args else None
    if isinstance(first, NamedGlobal) and first.name in ("operator.or_", "_operator.or_"):
        return Opaque("types.UnionType", args)
    raise Acts("calls functools.reduce")


def type_of(args: tuple[object, ...]) -> object:
    """What stands for `type(None)`; with three arguments it would make a class."""
    if len(args) == 1:
        return Opaque("type", args)
    raise Acts("makes a class with builtins.type")


def iterator(args: tuple[object, ...]) -> object:
    """What stands for `iter(values)`; with two arguments it would call the first one."""
    if len(args) == 1:
        return Opaque("iterator", args)
    raise Acts("makes an iterator that calls a function")


MAX_NAME = 500


@lru_cache(maxsize=4096)
def standing(module: str, name: str) -> Standing:
    """What is known of a global, by the names that Python 3 or 2 has for it."""
    # Protocols 0 to 2 write the names of Python 2.
    names = _compat_pickle.NAME_MAPPING.get((module, name))
    module, name = names or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    if _is_listed(module, name):
        return Standing.HARMLESS
    root, parts = _root(module), name.split(".")
    if _can_act(module, name, parts):
        return Standing.ACTS
    if root in _LIBRARY:
        if root == "builtins" and name in _EXCEPTIONS:
            return Standing.HARMLESS
        return Standing.ACTS_IF_CALLED
    if root in _JUDGED and not _is_class(parts[-1]):
        return Standing.ACTS_IF_CALLED
    return Standing.UNKNOWN


def names_in_all_pythons(module: str, name: str) -> tuple[tuple[str, str], ...]:
    """A global by its names in Python 3 and 2."""
    before = _compat_pickle.REVERSE_NAME_MAPPING.get((module, name))
    before = before or (_compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module), name)
    return tuple(dict.fromkeys(((module, name), before)))


def _is_listed(module: str, name: str) -> bool:
    if name in _LISTED.get(module, ()):
        return True
    if "." in name and not all(_is_class(part) for part in name.split(".")):
        return False
    last = name.rpartition(".")[2]
    if _is_class(last) and "*" in _LISTED.get(module, ()) and not _acts_by_name(module, name):
        return not _is_in(module, _ACTING_MODULES)
    above = module
    while above:
        names = _LISTED.get(f"{above}.**", ())
        if last in names or ("*" in names and _is_class(last)):
            return not (_is_in(module, _ACTING_MODULES) or _acts_by_name(module, name))
        above = above.rpartition(".")[0]
    return False


def _can_act(module: str, name: str, parts: Collection[str]) -> bool:
    if _is_in(module, _ACTING_MODULES) or _acts_by_name(module, name):
        return True
    # A module that imports one of these has it under its own name, too: `some.module.os`.
    if any(part in _ACTING_ANYWHERE for part in parts):
        return True
    return any(part.startswith("__") and part.endswith("__") for part in parts)


def _acts_by_name(module: str, name: str) -> bool:
    return name.partition(".")[0] in _ACTING_BY_MODULE.get(module, ())


def is_below(module: str, package: str) -> bool:
    """Whether a module is a package or lies in it."""
    return module == package or module.startswith(f"{package}.")


def _is_in(module: str, packages: Collection[str]) -> bool:
    while module:
        if module in packages:
            return True
        module = module.rpartition(".")[0]
    return False


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _root(module: str) -> str:
    return module.partition(".")[0]


def _tables(text: str) -> Mapping[str, list[str]]:
    """The lines of each table, by its name."""
    tables: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            lines = tables.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return tables


def _by_module(lines: Iterable[str]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        module, _, names = line.partition(":")
        found.setdefault(module, set()).update(names.split())
    return {module: frozenset(names) for module, names in found.items()}


def _words(lines: Iterable[str]) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


_TABLES = _tables(Path(__file__).with_name("known_globals.txt").read_text("utf-8"))
_LISTED = _by_module(_TABLES["standard-library"]) | _by_module(_TABLES["frameworks"])
_ACTING_MODULES = _words(_TABLES["acting"])
_ACTING_BY_MODULE = _by_module(_TABLES["acting-names"])
_ACTING_ANYWHERE = _words(_TABLES["acting-anywhere"])
_JUDGED = _words(_TABLES["judged"])
_LIBRARY = frozenset(sys.stdlib_module_names) | _words(_TABLES["other-pythons"])
_EXCEPTIONS = frozenset(
    name
    for name in dir(builtins)
    if name.endswith(("Error", "Exception", "Warning", "Exit", "Iteration", "Interrupt", "Group"))
)
