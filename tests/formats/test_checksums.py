"""The checksums of object stores come to their published check values, in any pieces."""

from __future__ import annotations

import hashlib

import pytest

from ckptctl.formats.digests import checksumming

# Of the nine digits. Source: the catalogue of parametrised CRC algorithms, `check`.
CHECKS = {"crc32": "cbf43926", "crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}


@pytest.mark.parametrize("algorithm", [*CHECKS, "sha1", "sha256"])
@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_a_checksum_is_the_same_in_any_pieces(algorithm, cut):
    if algorithm in ("crc32c", "crc64nvme"):
        pytest.importorskip("awscrt")
    data = memoryview(b"123456789")
    computing = checksumming(algorithm)
    assert computing is not None
    computing.update(data[:cut])
    computing.update(data[cut:])
    expected = CHECKS.get(algorithm) or hashlib.new(algorithm, data).hexdigest()
    assert computing.hexdigest() == expected


def test_what_cannot_be_computed_is_left_to_the_store():
    assert checksumming("xxhash128") is None
