"""Interpret a pickle without executing anything in it.

One interpreter of pickle's opcodes, protocols 2 to 5. A global stands for what
a `Grammar` says it stands for; a pickle that asks for any other is refused
with that name. Nothing is imported, nothing of the pickle is called, and what
comes out is plain values and inert objects.

Lengths, memo slots, nesting and the number of containers are checked before
anything is allocated, so time and memory grow with the size of the pickle and
with nothing that it says about itself.

What the objects mean is not known here: `metadata` and `values` say that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ckptctl.formats.pickle_machine import Machine, Shapes
from ckptctl.formats.pickle_opcodes import OPCODES
from ckptctl.formats.pickle_stubs import Grammar


def read_pickle(data: bytes, grammar: Grammar, shapes: Shapes | None = None) -> object:
    """The one object that the pickle `data` builds under `grammar`.

    `shapes` makes it faster and never different, except that lists and dicts then
    hold a `Run` in place of the objects that were taken in one go.

    Raises `MetadataUnsafe` for a name, a call or an opcode that the grammar does
    not have, `MetadataUnreadable` for anything that is not a whole, well-formed
    pickle. Both name the offset in bytes. Time and memory are linear in the size: a
    `MemoryError` says nothing against the pickle, and passes through.
    """
    with collector_paused():
        try:
            return _machine(data, grammar, shapes).run()
        except RecursionError:
            # Runs that refer to runs, thousands deep: only a forger writes that.
            return _machine(data, grammar, None).run()


def _machine(data: bytes, grammar: Grammar, shapes: Shapes | None) -> Machine:
    machine = Machine(data, grammar, OPCODES)
    if shapes is not None:
        machine.shapes = shapes(machine)
    return machine


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic collector, which takes three quarters of the time of a large pickle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
