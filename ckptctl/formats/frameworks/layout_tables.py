"""The names of steps, files, pointers, parts and markers, and the words of key paths, as tables.

They are data: `tables/*.toml` are edited by hand and say what each table is for,
`tools/framework_tables.py` writes `tables.json` from them, and a test compares the two. Patterns
are text, matched against a whole name by `full_match`, which compiles those that are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from ckptctl.model import PartFormat

_Names = tuple[tuple[str, str], ...]
_Files = Mapping[str, tuple[str, ...]]


class FileName(msgspec.Struct, frozen=True):
    """A name of files, below the step, and what it states; see `tables/files.toml`."""

    name: str
    holds: str = ""
    layout: str = ""
    grid: str = ""
    what: str = ""


_Set = frozenset[str]


class Words(msgspec.Struct, frozen=True):
    """The words of key paths; see `tables/words.toml`."""

    wrappers: _Set
    optimizer_head: str
    moments: _Set
    squares: _Set
    other_shapes: _Set
    slots_of_classes: tuple[_Set, ...]
    pairs: tuple[tuple[str, str], ...]
    settings_that_keep_state: _Set
    of_a_group: _Set
    rng_head: str
    generators: _Set
    of_bit_generators: _Set
    scheduler_head: str
    scheduler_marks: _Set
    scheduler_leaves: _Set
    dataloader_head: str
    dataloader_marks: _Set
    positions: _Set
    beside_positions: _Set
    scaler_marks: _Set
    scaler_head: str
    step_leaves: _Set
    token_leaves: _Set
    model_head: str
    of_adapter: _Set
    no_state_head: str
    output_leaf: str
    output_file: str
    settings_file: str
    rank: str
    rng_of_rank: str


class Tables(msgspec.Struct, frozen=True):
    """All tables. Those of names are pairs of a layout and a pattern."""

    files: tuple[FileName, ...]
    weights: str
    adapter: str
    logs_and_source: str
    text: str
    step_names: _Names
    flat_number: str
    lone_names: _Names
    counted_name: str
    labelled: str
    same_run: str
    epoch_before: str
    kind_beside: str
    name_beside: str
    scattered: _Names
    holds_scattered: str
    bare_number: str
    lightning: tuple[str, ...]
    with_versions: tuple[str, ...]
    lightning_version: str
    unfinished: str
    of_attempt: str
    unfinished_markers: str
    unfinished_beside: str
    tracker: str
    rank_pointer: str
    shard: str
    hugging_face_shard: str
    rank_local: str
    model_folders: tuple[str, ...]
    tag: str
    torch_index: str
    torch_shard: str
    left_by_tools: str
    other_formats: tuple[tuple[PartFormat, str], ...]
    archive: str
    perhaps_archive: str
    of_one_step: str
    signatures: tuple[tuple[str, str, str], ...]
    needs_signature: frozenset[str]
    needs_shards: frozenset[str]
    signs_beside_shards: frozenset[str]
    of_one_file: Mapping[str, str]
    states_ranks: str
    stage: str
    counts_of_other_things: Mapping[str, str]
    pointers: Mapping[str, str]
    written_last: _Files
    parsed: _Files
    needed_beside: Mapping[str, tuple[str, str]]
    conversions: Mapping[str, str]
    stated_inside: Mapping[str, str]
    words: Words


TABLES = msgspec.json.decode(Path(__file__).with_name("tables.json").read_bytes(), type=Tables)


def full_match(pattern: str, name: str) -> re.Match[str] | None:
    """`re.fullmatch`; a pattern is compiled when it is first used, which takes 0.1 ms."""
    return _compiled(pattern).fullmatch(name)


_compiled = cache(re.compile)
