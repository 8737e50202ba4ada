"""Which checksums does an answer of S3 hold, and of what?"""

from __future__ import annotations

import pytest

from ckptctl.storage.contract import Checksum
from ckptctl.storage.s3_answers import checksums_in

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
