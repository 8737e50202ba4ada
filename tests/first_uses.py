"""Import to do what ckptctl does at the first use of a pattern or class, before forking processes.

A tenth of the processor time of a forked command would go into that.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping

from ckptctl import data_classes
from ckptctl.formats.frameworks import layout_tables, state_keys
from ckptctl.formats.frameworks.file_names import FILES, text_in


def _texts(value: object) -> Iterator[str]:
    """All texts in a table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts((*value, *value.values()))
    elif isinstance(value, tuple | frozenset):
        for each in value:
            yield from _texts(each)


_TABLES = [each for name, each in vars(layout_tables).items() if not name.startswith("__")]
for _pattern in {*_texts((*_TABLES, state_keys._RANK)), *(row.name for row in FILES)}:
    text_in(_pattern)
    re.compile(_pattern)
state_keys.kind_of_entry(("an entry",))
for _each in gc.get_objects():
    if isinstance(_each, data_classes._OnFirstUse) and _each.name == "__init__":
        getattr(_each.cls, _each.name)
