"""Digests of tensors differ where one bit does, and are equal for equal values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ckptctl.train import held_once  # noqa: E402
from ckptctl.train.held_once import device_digest, exact_digest, quick_digests  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int64,
]  # fmt: skip
DIGESTS = {
    "quick": lambda tensor: quick_digests([tensor])[0],
    "device": lambda tensor: device_digest(tensor).item(),
    "exact": exact_digest,
}


@pytest.fixture(params=DIGESTS)
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Each kind of digest, of several pieces also where a tensor is small."""
    monkeypatch.setattr(held_once, "_PIECE_BYTES", 8)
    monkeypatch.setattr(held_once, "_PIECE_ELEMENTS", 4)
    return DIGESTS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_and_each_place_counts(dtype: torch.dtype, digest):
    n_bytes = 10 * dtype.itemsize
    places = {0, n_bytes // 3, n_bytes // 2, n_bytes - 1}
    seen = {digest(torch.zeros(n_bytes, dtype=torch.uint8).view(dtype))}
    for at in places:
        bits = torch.zeros(n_bytes, dtype=torch.uint8)
        bits[at] ^= 1
        seen.add(digest(bits.view(dtype)))
    assert len(seen) == 1 + len(places)


def test_nan_is_equal_to_itself_and_zeros_of_either_sign_differ(digest):
    nan = torch.tensor([float("nan"), 1.0])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor([0.0, 1.0])) != digest(torch.tensor([-0.0, 1.0]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_tensors_of_one_element_or_none_have_a_digest(shape: tuple[int, ...], digest):
    assert digest(torch.ones(shape)) == digest(torch.ones(shape))


def test_the_exact_digest_does_not_depend_on_the_order_in_memory():
    rows = torch.arange(24.0).view(2, 3, 4)
    views = [
        rows,
        rows.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        rows.repeat(1, 1, 2)[..., :4],
    ]
    assert len({exact_digest(view) for view in views}) == 1
    signs = torch.ones(3, dtype=torch.complex64).mul(1 + 2j)
    assert exact_digest(signs.conj()) == exact_digest(signs.conj().resolve_conj())


def test_one_memory_in_two_orders_is_not_one_value():
    square = torch.arange(4.0).view(2, 2)
    assert quick_digests([square]) != quick_digests([square.t()])


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_the_scale_of_a_quantized_tensor_counts():
    ones = torch.ones(3)
    first, second = (
        torch.quantize_per_tensor(scale * ones, scale, 0, torch.qint8) for scale in (1, 2)
    )
    assert quick_digests([first, first.clone()])[0] == quick_digests([first])[0]
    assert quick_digests([first]) != quick_digests([second])
    assert exact_digest(first) != exact_digest(second)
