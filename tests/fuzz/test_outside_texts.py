"""Mutated logs, dumps and own files are read or refused; `make fuzz` mutates for longer."""

from __future__ import annotations

import math

import pytest
from outside_texts import READERS, SAMPLES, failures

N_SEEDS = 12


@pytest.mark.parametrize("name", READERS)
def test_a_mutated_input_is_read_or_refused(name, tmp_path):
    assert [*failures(name, iter(range(N_SEEDS)), tmp_path, math.inf)] == []


@pytest.mark.parametrize("name", [name for name in READERS if name != "record"])
def test_a_sound_input_is_read(name, tmp_path):
    for sample in SAMPLES[name]:
        READERS[name](tmp_path, sample)
