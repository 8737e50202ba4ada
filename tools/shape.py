"""Measure the shape of the tree: size, layers, parameters, words, hops.

    python tools/shape.py            # print the figures
    python tools/shape.py --names    # and what each figure counts, name by name

The static figures are read from the sources. The dynamic ones trace real calls: `pick`
on a step, `Checkpointer.save` and `Checkpointer.resume` of a small model. They describe
how easy the tree is to follow; they are no aim in themselves.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "ckptctl"
MANY_PARAMETERS = 7
STEP = 7_340_033
"""A step number that is no other number of the trace."""
SHARED_BY_INTENT = frozenset({"CkptctlCallback"})
"""Class names of several modules: a script that moves from one framework to another keeps the
name of the callback, and changes the module that it imports it from."""


def retired_words(where: str) -> frozenset[str]:
    """The words that are retired in modules, names, codes or prose."""
    table = (REPOSITORY / "tests" / "guards" / "retired_words.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return frozenset(
        word
        for words, _, kinds in rows[1:]
        if where in kinds.split(", ")
        for word in words.split(", ")
    )


def sources() -> dict[str, str]:
    """The source of each module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


def imports(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """The modules of the package that `tree` imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in whole if name in names)
            if node.module in names and any(name not in names for name in whole):
                yield node.module


def imports_at_start(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """The same without functions and what only type checkers read."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            yield from imports(node, names)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def long_signatures(trees: dict[str, ast.Module]) -> list[str]:
    """Functions outside the public surface with more parameters than a reader can hold."""
    sys.path.insert(0, str(REPOSITORY))
    import ckptctl
    import ckptctl.train

    public = {getattr(ckptctl, name) for name in ckptctl.__all__}
    public |= {getattr(ckptctl.train, name) for name in ckptctl.train.__all__}
    surface = {
        (one.__module__, one.__qualname__)
        for one in public
        if hasattr(one, "__qualname__") and hasattr(one, "__module__")
    }
    found = []
    for module, tree in trees.items():
        if module.startswith("ckptctl.cli."):
            continue  # a command's parameters are its options
        for qualname, node in functions(tree):
            owner = qualname.removesuffix(".__init__")
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            n = len([one for one in arguments if one.arg not in ("self", "cls")])
            if n > MANY_PARAMETERS and (module, owner) not in surface:
                found.append(f"{module}.{qualname}: {n}")
    return found


def functions(
    tree: ast.AST, above: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{above}{node.name}", node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from functions(node, f"{above}{node.name}.")


def retired(trees: dict[str, ast.Module]) -> list[str]:
    """Modules, classes, functions, variables and finding codes with a retired word."""
    in_modules, in_names, in_codes = map(retired_words, ("modules", "names", "codes"))
    found = []
    for module, tree in trees.items():
        found += [module] if in_modules & set(module.split(".")) else []
        names = {name.rpartition(".")[2] for name, _ in functions(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
        found += [f"{module}.{name}" for name in names if in_names & words_in(name)]
    from ckptctl.findings import CODES

    for code in CODES:
        _, _, name = code.partition(".")
        found += [code] if in_codes & {name, *name.split("-")} else []
    return sorted(set(found))


def shared_class_names(files: dict[str, str]) -> list[str]:
    """Class names, without leading underscores, of more than one class, and their modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, source in files.items():
        for name in re.findall(r"^ *class _*(\w+)[(\[:]", source, re.MULTILINE):
            modules[name].append(module)
    return [
        f"{name}: {', '.join(found)}"
        for name, found in sorted(modules.items())
        if len(found) > 1 and name not in SHARED_BY_INTENT
    ]


def words_in(name: str) -> set[str]:
    """The words of a name in snake case, kebab case or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@contextmanager
def traced(on: Any) -> Iterator[None]:
    """Call `on(frame, event, argument)` for each call, of C functions too."""
    sys.setprofile(on)
    try:
        yield
    finally:
        sys.setprofile(None)


def stack_of(frame: FrameType | None) -> list[tuple[str, str]]:
    """Module and function of each frame of the package, outermost first."""
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname
        if module.startswith("ckptctl") and not name.startswith("<"):
            found.append((module, name))
        frame = frame.f_back
    return found[::-1]


def hops(root: str) -> list[tuple[str, str]]:
    """The calls between `pick` and the opening of the first `.metadata`."""
    import ckptctl

    found: list[list[tuple[str, str]]] = []
    waiting = False

    def on(event: str, arguments: tuple[Any, ...]) -> None:
        if waiting and not found and event == "open" and str(arguments[0]).endswith(".metadata"):
            found.append(stack_of(sys._getframe(1)))

    sys.addaudithook(on)
    ckptctl.pick(root)  # imports are no hops
    waiting = True
    ckptctl.pick(root)
    waiting = False
    return found[0] if found else []


class Way:
    """Where a step number goes: each call that is handed the number, or the name made of it.

    Calls that a package of `OPAQUE` makes itself are not counted: what it does with the name
    is the same for every caller, and who follows the number need not open it.
    """

    def __init__(self) -> None:
        self.stops: list[tuple[str, str]] = []
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Note a call that bears the number, itself or in a field of an argument."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("ckptctl"):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        borne = set()
        for name in names:
            value = frame.f_locals.get(name)
            if (type(value) is int and value == STEP) or value == f"step_{STEP}":
                borne.add(name)
        if borne and code.co_filename != "<string>" and not self._is_inside(frame):
            stop = (module, code.co_name)
            if not self.stops or self.stops[-1] != stop:
                self.stops.append(stop)
            self.names |= borne

    @staticmethod
    def _is_inside(frame: FrameType) -> bool:
        """Whether a package of `OPAQUE` makes the call."""
        caller = ""
        while not caller.startswith("ckptctl") and frame.f_back:  # past contextlib and the like
            frame = frame.f_back
            caller = frame.f_globals.get("__name__", "")
        return caller.startswith(OPAQUE)

    def figures(self, layers: dict[str, int]) -> dict[str, int]:
        """How long the way is, and how often it turns back."""
        path = [module for module, _ in self.stops]
        layer = [layers.get(module.split(".")[1] if "." in module else "", 0) for module in path]
        left: set[str] = set()
        returns = 0
        for before, after in pairwise(path):
            if before != after:
                left.add(before)
                returns += after in left
        return {
            "stops": len(self.stops),
            "modules": len(set(path)),
            "climbs to a higher layer": sum(b > a for a, b in pairwise(layer)),
            "returns to a module": returns,
            "names of the number": len(self.names),
        }


def layers() -> dict[str, int]:
    """The layer of each package, from the guard that keeps them."""
    import runpy

    guard = runpy.run_path(str(REPOSITORY / "tests" / "guards" / "test_layers.py"))
    return dict(guard["LAYERS"])


def dynamic(show: bool) -> dict[str, object]:
    """What is traced: it needs torch."""
    import warnings

    import torch

    from ckptctl.train import Checkpointer

    warnings.simplefilter("ignore")
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as root:

        def checkpointer(level: str | None = None) -> Checkpointer:
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters())
            return Checkpointer(root, model=model, optimizer=optimizer, level=level)

        ours = checkpointer()
        ours.resume("auto")
        ours.save(1, tokens=1)
        way = Way()
        with traced(way):
            ours.save(STEP, tokens=2)
        counted: dict[str, Counter[object]] = {name: Counter() for name in COUNTED}

        def on(frame: FrameType, event: str, _argument: Any) -> None:
            name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
            if event == "call" and name in COUNTED:
                counted[name][frame.f_locals[COUNTED[name][0]]] += 1

        with traced(on):
            checkpointer(level="content").resume("auto")
        path = hops(root)
        found["calls from pick to the first .metadata"] = len(path)
        found["modules on that way"] = len({module for module, _ in path})
        for name, n in way.figures(layers()).items():
            found[f"step number through save: {name}"] = n
        for name, (_, what) in COUNTED.items():
            found[what] = max(counted[name].values(), default=0)
        if show:
            print("\n".join(f"  hop {module}.{name}" for module, name in path))
            print("\n".join(f"  stop {module}.{name}" for module, name in way.stops))
    return found


OPAQUE = tuple(f"ckptctl.{name}" for name in ("storage", "formats", "inspection"))
COUNTED = {
    "ckptctl.formats.dcp.metadata.decode_metadata": (
        "data",
        "decodes of one .metadata in a resume at level content",
    ),
    "ckptctl.storage.opening._opened": ("url", "stores opened for one root in a resume"),
}
"""Functions whose calls are counted, by the value of one parameter."""


def main() -> int:
    """Print the figures."""
    show = "--names" in sys.argv[1:]
    files = sources()
    trees = {name: ast.parse(source) for name, source in files.items()}
    names = set(trees)
    importers: dict[str, set[str]] = defaultdict(set)
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        graph[module] = set(imports_at_start(tree, names)) - {module}
        for other in set(imports(tree, names)) - {module}:
            importers[other].add(module)
    real = [name for name, tree in trees.items() if len(tree.body) > 1]
    once = [name for name in real if len(importers[name]) == 1]
    lists = {
        "modules imported from one place": once,
        f"functions with more than {MANY_PARAMETERS} parameters": long_signatures(trees),
        "circular imports": [" ".join(group) for group in cycles(graph)],
        "retired words": retired(trees),
        "class names of more than one class": shared_class_names(files),
    }
    n_lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    figures: dict[str, object] = {"lines": n_lines, "modules": len(trees)}
    for what, found in lists.items():
        figures[what] = len(found)
        if show:
            print("\n".join(f"  {what}: {one}" for one in found))
    figures |= dynamic(show)
    for what, figure in figures.items():
        print(f"{figure:>8,}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
