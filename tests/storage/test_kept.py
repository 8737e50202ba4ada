"""The checksums that an answer of S3 holds, and which bytes each covers."""

from __future__ import annotations

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from ckptctl.model import Checksum, Kept
from ckptctl.storage.opening import open_store
from ckptctl.storage.s3 import checksums_in

CRC = "sfxLvA=="
WHOLE = Checksum("crc32", "b1fc4bbc", whole=True)
OF_PARTS = Checksum("crc32", "b1fc4bbc", whole=False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"ETag": '"7a08"'}, ()),
        ({"ETag": '"7a08"', "ChecksumCRC32": CRC}, (WHOLE,)),
        ({"ETag": '"7a08-2"', "ChecksumCRC32": CRC}, (OF_PARTS,)),
        ({"ETag": '"7a08-2"', "ChecksumCRC32": CRC, "ChecksumType": "FULL_OBJECT"}, (WHOLE,)),
        ({"ETag": '"7a08"', "ChecksumCRC32": CRC, "ChecksumType": "COMPOSITE"}, (OF_PARTS,)),
        ({"ETag": '"7a08"', "ChecksumCRC32": f"{CRC}-2"}, (OF_PARTS,)),
        ({"ETag": '"7a08-2"', "ChecksumCRC32": f"{CRC}-2", "ChecksumType": "COMPOSITE"},
         (OF_PARTS,)),
        ({"ChecksumCRC32": "no base64", "ChecksumSHA1": "", "ChecksumType": "FULL_OBJECT"}, ()),
        (
            {"ChecksumCRC64NVME": "rosUhgoPmTo=", "ChecksumType": "FULL_OBJECT"},
            (Checksum("crc64nvme", "ae8b14860a0f993a", whole=True),),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_only_what_is_said_of_the_whole_object_counts_as_such(answer, expected):
    assert checksums_in(answer) == expected


class LikeGoogle(MemoryFileSystem):
    """Says of every object what gcsfs says of one, as far as it matters here."""

    def info(self, path, **kwargs):
        of_google = {"crc32c": "9D9VDg==", "etag": "pGU8bw9/4ZtBEDTV", "generation": "1795252675"}
        return {**super().info(path, **kwargs), **of_google}


def test_google_s_checksum_is_the_crc_32c_of_the_whole(monkeypatch):
    monkeypatch.setitem(_registry, "gs", LikeGoogle)
    with open_store("gs://bucket/run") as store:
        store.put("step_5/a", b"x")
        (kept,) = store.kept(["step_5/a"])
    checksum = Checksum("crc32c", "f43f550e", whole=True)
    assert kept == Kept("step_5/a", (checksum,), "pGU8bw9/4ZtBEDTV", "1795252675")
