"""Text from outside becomes a number in one module, `outside_numbers`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckptctl"

READERS = ("failures", "loss", "logs", "diagnostics",
           "supervisor/evidence.py", "supervisor/restarting.py", "storage/logs.py")  # fmt: skip
"""What reads logs, scripts, dumps and stacks that anybody may have written."""

CONVERTERS = ("int", "float", "complex", "Decimal", "Fraction")
CLOCKS = ("datetime", "fromtimestamp", "utcfromtimestamp", "strptime", "fromisoformat", "mktime")

OTHER = {
    ("logs/binary_logs.py", "int(crc)"): "an integer of four bytes",
    ("logs/binary_logs.py", "float(number)"): "a float that `struct` has unpacked",
    ("loss/plots.py", "int(step)"): "a number of our own axis",
    ("loss/plots.py", "float(_LEFT + 8)"): "a size of our own picture",
    ("loss/plots.py", "int(width / _TEXT_CELL)"): "a size of our own picture",
    ("loss/segments.py", "int(median(gaps))"): "a gap between steps that are within bounds",
    ("logs/console.py", "float(f'0.{fraction[0]}')"): "digits that a pattern bounds",
    ("logs/fields.py", "float(f'1e{min(power, sys.float_info.max_10_exp)}')"): "bounded",
}
"""Conversions of what is no text from outside, each with what it is."""


def conversions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        is_literal = isinstance(node.args[0], ast.Constant)
        if name in (*CONVERTERS, *CLOCKS) and not is_literal:
            yield ast.unparse(node)


def modules() -> Iterator[Path]:
    for name in READERS:
        place = PACKAGE / name
        yield from place.rglob("*.py") if place.is_dir() else (place,)


def test_readers_convert_text_only_by_outside_numbers():
    found = {
        (path.relative_to(PACKAGE).as_posix(), call)
        for path in modules()
        for call in conversions(path)
    }
    assert found == {*OTHER}


def test_a_conversion_would_be_found(tmp_path):
    (tmp_path / "a.py").write_text("int(match['n'])\nint('1')\ndatetime.fromtimestamp(x)\n")
    assert [*conversions(tmp_path / "a.py")] == ["int(match['n'])", "datetime.fromtimestamp(x)"]
