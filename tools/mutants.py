"""Change one thing at a time in the modules that decide, and see whether a test fails.

    python tools/mutants.py [--seed N] [--each N] [--write] [MODULE...]

A mutant is one clause that is dropped, one comparison that is turned, one extreme that is the
other, one filter that is gone. It is killed by a test that fails; one that survives shows a
decision that no test needs. First the tests of a module run once, and each line is noted with the
tests that reach it in this process; a mutant runs those, and where they pass, all tests of the
module. Everything runs in a copy of the tree. `tests/equivalent_mutants.txt` holds those that
change nothing that can be seen, with the reason. With --write the scores go to
docs/reliability.md. Ends with 1 where a module has less than 90 %. Takes some minutes a module.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENT = REPOSITORY / "docs" / "reliability.md"
EQUIVALENT = REPOSITORY / "tests" / "equivalent_mutants.txt"
_TABLE = re.compile(r"(?<=<!-- mutants -->\n).*?(?=<!-- end -->)", re.DOTALL)
GOAL = 0.9
MOST_TESTS = 150
"""So many of the tests that reach a line are run first."""
TIMEOUT_S = 600
FAST = "not slow and not long and not server"
DECIDING = {
    "selection/candidates.py": ["selection"],
    "selection/choosing.py": ["selection"],
    "selection/picking.py": ["selection"],
    "selection/pruning.py": ["selection"],
    "selection/branches.py": ["selection"],
    "inspection/file_kinds.py": ["inspection", "selection"],
    "inspection/whole.py": ["inspection", "selection"],
    "inspection/one_save.py": ["inspection", "selection"],
    "inspection/content.py": ["inspection", "selection"],
    "inspection/coverage.py": ["inspection"],
    "loss/replay.py": ["loss"],
    "loss/level.py": ["loss"],
    "loss/verdict.py": ["loss"],
    "loss/following.py": ["loss"],
    "failures/classifying.py": ["failures"],
    "failures/matching.py": ["failures"],
    "supervisor/policy.py": ["supervisor/test_policy.py"],
    "supervisor/hangs.py": ["supervisor/test_naming.py", "supervisor/test_hangs.py"],
    "resharding/planning.py": ["resharding"],
    "train/resuming.py": ["train"],
}
"""The modules that decide, and where their tests are."""


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a module."""

    line: int
    start: int
    end: int
    """The bytes of the module that are replaced."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{_on_one_line(self.before)} -> {_on_one_line(self.after)}"


@dataclass
class Score:
    """What became of the mutants of one module."""

    module: str
    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The part that was killed, without those that change nothing."""
        n = self.killed + len(self.survivors)
        return self.killed / n if n else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", choices=[[], *DECIDING])
    parser.add_argument("--seed", type=int, default=0, help="of the places that are drawn")
    parser.add_argument("--each", type=int, default=20, help="mutants of a module")
    parser.add_argument("--write", action="store_true", help="renew docs/reliability.md")
    options = parser.parse_args()
    scores = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = _copy(Path(folder))
        for module in options.modules or DECIDING:
            draw = random.Random(f"{options.seed} {module}")  # which mutants are tried
            scores.append(_tried(tree, module, options.each, draw))
    table = _table(scores)
    print(table, end="")
    if options.write:
        DOCUMENT.write_text(_TABLE.sub(lambda _: table, DOCUMENT.read_text()))
    return int(any(score.rate < GOAL for score in scores))


def _copy(folder: Path) -> Path:
    """The tree as it is, without what git ignores."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY
    )
    for name in filter(None, listed.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def _tried(tree: Path, module: str, n: int, draw: random.Random) -> Score:
    path = tree / "ckptctl" / module
    source = path.read_bytes()
    mutants = [*mutants_of(source.decode())]
    chosen = sorted(draw.sample(mutants, min(n, len(mutants))), key=lambda each: each.start)
    reached = _tests_by_line(tree, module)
    equivalent = {line.partition("  # ")[0] for line in EQUIVALENT.read_text().splitlines()}
    score = Score(module)
    try:
        for mutant in chosen:
            if f"{module}: {mutant}" in equivalent:
                score.equivalent += 1
                continue
            changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
            path.write_bytes(changed)
            if _fails(tree, reached.get(mutant.line, ())[:MOST_TESTS]) or _fails(
                tree, _paths(module), "-n", "auto"
            ):
                score.killed += 1
            else:
                score.survivors.append(mutant)
                print(f"ckptctl/{module}:{mutant.line}: survived: {mutant}", flush=True)
    finally:
        path.write_bytes(source)
    print(f"{module}: {score.rate:.0%} of {score.killed + len(score.survivors)}", flush=True)
    return score


# Mutants


def mutants_of(text: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its tree."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _deciding(ast.parse(text)):
        for place, changed in _changes(node):
            yield Mutant(
                line=place.lineno,
                start=starts[place.lineno - 1] + place.col_offset,
                end=starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0),
                before=ast.get_source_segment(text, place) or "",
                after=changed,
            )


def _deciding(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The places in functions, without annotations, defaults and the words of messages."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stack += [(child, True) for child in reversed(node.body)]
            continue
        if isinstance(node, ast.AnnAssign):
            stack += [(node.value, inside)] if node.value is not None else []
            continue
        if inside and isinstance(node, (ast.expr, ast.stmt)):
            yield node
        stack += [(child, inside) for child in reversed([*ast.iter_child_nodes(node)])]


_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}


Change = tuple[ast.expr | ast.stmt, str]


def _changes(node: ast.expr | ast.stmt) -> Iterator[Change]:
    """The places in a node that may be changed, and what may stand there."""
    match node:
        case ast.BoolOp(op=op, values=values):
            for at in range(len(values)):
                rest = values[:at] + values[at + 1 :]
                yield node, _written(rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            yield node, _written(ast.Compare(left, [_TURNED[type(op)]()], comparators))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, _written(operand)
        case ast.Call(func=ast.Name(id=name) as function) if name in _OTHER_CALL:
            yield function, _OTHER_CALL[name]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if isinstance(test, (ast.Name, ast.Attribute, ast.Call)):
                yield test, f"(not {ast.unparse(test)})"
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for condition in (each for part in node.generators for each in part.ifs):
                yield condition, "True"
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield node, "return None"


def _written(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


# Tests

_RECORDER = """
import json, os, sys, threading

PATH, OUT = os.environ["MUTANTS_PATH"], os.environ["MUTANTS_OUT"]
lines, test = {}, ""


def lines_of(frame, event, arg):
    if event == "line":
        lines.setdefault(frame.f_lineno, {})[test] = None
    return lines_of


def calls(frame, event, arg):
    if frame.f_code.co_filename != PATH:
        return None
    lines.setdefault(frame.f_lineno, {})[test] = None
    return lines_of


def pytest_runtest_protocol(item, nextitem):
    global test
    test = item.nodeid
    sys.settrace(calls)
    threading.settrace(calls)


def pytest_sessionfinish(session):
    sys.settrace(None)
    with open(OUT, "w") as out:
        json.dump({line: [*tests] for line, tests in lines.items()}, out)
"""


def _tests_by_line(tree: Path, module: str) -> dict[int, list[str]]:
    """The tests that reach each line of a module in the process that runs them."""
    plugin, out = tree / "mutants_recorder.py", tree / "lines.json"
    plugin.write_text(_RECORDER)
    environment = {
        "MUTANTS_PATH": str(tree / "ckptctl" / module),
        "MUTANTS_OUT": str(out),
    }
    done = _pytest(tree, _paths(module), "-p", "mutants_recorder", environment=environment)
    if done.returncode:
        raise SystemExit(f"the tests of {module} fail without a change:\n{done.stdout[-4000:]}")
    return {int(line): tests for line, tests in json.loads(out.read_text()).items()}


def _paths(module: str) -> list[str]:
    return [f"tests/{name}" for name in DECIDING[module]]


def _fails(tree: Path, tests: Sequence[str], *words: str) -> bool:
    """Whether a test fails, or ends at all."""
    if not tests:
        return False
    try:
        return _pytest(tree, tests, "-x", *words).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def _pytest(
    tree: Path, tests: Sequence[str], *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            FAST,
            *words,
            *tests,
        ],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            # A mutant of the same size within a second would be taken for the module before it.
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


# The table


def _table(scores: Sequence[Score]) -> str:
    rows = [
        f"| `{each.module}` | {each.killed + len(each.survivors)} | {each.rate:.0%} |"
        for each in scores
    ]
    n = sum(each.killed + len(each.survivors) for each in scores)
    killed = sum(each.killed for each in scores)
    total = f"| all | {n} | {killed / max(n, 1):.0%} |"
    return "\n".join(["| module | mutants | killed |", "|---|---|---|", *rows, total]) + "\n"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    raise SystemExit(main())
