"""NaN and infinity are counted as torch counts them, in whatever pieces the bytes come."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.model import DTYPE_SIZES
from ckptctl.records.not_finite import FORMS, MAX_COUNTED, FiniteScan, Values, joined

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DTYPES = sorted(FORMS)
SIGNED = {
    dtype: replace(form, signs=True) if dtype != "float8_e8m0fnu" else form
    for dtype, form in FORMS.items()
}
"""The forms with which values below zero are counted too; the last one has no sign."""


def torch_counts(dtype: str, data: bytes) -> Values:
    """What torch says of these bytes as a tensor; a complex number is two values."""
    tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor.to(torch.float64)
    n_nan, n_infinite = int(wide.isnan().sum()), int(wide.isinf().sum())
    n_negative = int((wide < 0).sum())
    # All bits zero are the least power of two where there is no zero.
    is_zero = not any(data) if dtype == "float8_e8m0fnu" else bool((wide == 0).all())
    return Values(wide.numel(), n_nan, n_infinite, n_negative=n_negative, is_zero=is_zero)


def scanned(dtype: str, data: bytes, cuts: list[int], parts: list[int]) -> Values:
    """Counted in parts, and each part in pieces, cut wherever it is said."""
    edges = sorted({0, len(data), *(cut % len(data) for cut in parts)})
    scans = []
    for start, end in itertools.pairwise(edges):
        scan = FiniteScan(SIGNED[dtype], start)
        inner = sorted({start, end, *(c % len(data) for c in cuts if start < c % len(data) < end)})
        for a, b in itertools.pairwise(inner):
            scan.take(memoryview(data)[a:b])
        scans.append(scan)
    return joined(SIGNED[dtype], scans)


places = st.lists(st.integers(0, 1 << 20), max_size=6)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), n=st.integers(1, 300), cuts=places, parts=places)
def test_counts_are_those_of_torch_wherever_the_bytes_are_cut(dtype, seed, n, cuts, parts):
    chance = random.Random(seed)
    size = DTYPE_SIZES[dtype]
    negative_zeros = (bytes(size - 1) + b"\x80") * n
    kinds = [chance.randbytes(n * size), bytes(n * size), negative_zeros]
    data = bytearray(chance.choice(kinds))
    # Random bits are seldom a NaN of a long form: some are put in.
    form = FORMS[dtype]
    for _ in range(chance.randrange(6)):
        at = form.size * chance.randrange(len(data) // form.size)
        value = form.exponent | chance.choice([0, 1, form.mantissa]) or form.high[0]
        data[at : at + form.size] = value.to_bytes(form.size, "little")
    assert scanned(dtype, bytes(data), cuts, parts) == torch_counts(dtype, bytes(data))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if DTYPE_SIZES[d] <= 2])
def test_every_value_of_a_short_form_is_told_as_torch_tells_it(dtype):
    size = DTYPE_SIZES[dtype]
    for value in range(1 << 8 * size):
        data = value.to_bytes(size, "little")
        scan = FiniteScan(SIGNED[dtype])
        scan.take(data)
        if value % 97 == 0 or size == 1 or not scan.values.finite:
            assert scan.values == torch_counts(dtype, data), hex(value)


def test_what_has_neither_nan_nor_infinity_is_not_looked_at():
    assert {d for d in DTYPE_SIZES if d.startswith(("float", "bfloat", "complex"))} - set(
        FORMS
    ) == {"float4_e2m1fn_x2"}


def test_after_ten_thousand_it_is_enough_and_the_count_says_so():
    scan = FiniteScan(FORMS["float32"])
    scan.take(b"\0\0\xc0\x7f" * (MAX_COUNTED + 5))
    assert scan.values == Values(MAX_COUNTED + 5, MAX_COUNTED, 0, more=True, is_zero=False)
