"""The data ledger of a step: which samples the run had trained when it was saved.

The digest of samples does not depend on their order: it is the sum, modulo 2^128, of the XXH3-128
hash of each id. Digests of ranks, of steps and of attempts add up, so a digest needs no ids from
other ranks, and that of an epoch equals that of its data set only if each sample was trained once.

The ledger is the file `.ckptctl/data.json` in a step: totals of each epoch since the ledger began,
and rows for the steps since the save before.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import index
from typing import Annotated, NamedTuple, TypedDict

from msgspec import Meta
from xxhash import xxh3_128_intdigest

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import as_stored, read_back
from ckptctl.model import Count, Positive, Sha256

DATA_FILE = f"{OWN_FOLDER}/data.json"
SCHEMA = "ckptctl.data-ledger/1"
MAX_DATA_BYTES = 256 << 20
"""Of the ledger of a step; without kept ids it has some 90 bytes for a row."""
MOST_ROWS = 4_096
"""Rows of one step: more are joined in pairs, and cover more steps each."""
MOST_EPOCHS = 65_536
MODULUS = 1 << 128

SampleId = int | str
_StoredId = Annotated[int, Meta(ge=-(2**63))] | str
Sum = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

_AT_ONCE = 1_024


class RowFields(TypedDict):
    """The samples of one epoch that some steps in a row trained, over all ranks."""

    first: Positive
    """The first of the steps."""
    last: Positive
    """The last of them."""
    epoch: Count
    """The epoch of the samples."""
    count: Count
    """How many samples, each as often as it was trained."""
    sum: Sum
    """The sum of the hashes of their ids, in hexadecimal."""


class SpanFields(TypedDict):
    """Positions in the order of an epoch that were trained in a row."""

    start: Count
    """The first position, from 0 on."""
    count: Count
    """How many positions."""
    after: Count
    """They were trained after this step."""


class EpochFields(TypedDict):
    """All samples of one epoch since the ledger began, over all ranks and attempts."""

    epoch: Count
    """Its number, as the loader or the script counts."""
    count: Count
    """How many samples, each as often as it was trained."""
    sum: Sum
    """The sum of the hashes of their ids, in hexadecimal."""
    is_whole: bool
    """Each sample of the data set was trained once, besides those in `ids`."""
    ids: list[_StoredId] | None
    """The ids, each as often as it was trained; null where they are not kept."""
    spans: list[SpanFields] | None
    """The samples as positions in the order of a `GlobalLoader`; null for other data."""


class OrderFields(TypedDict):
    """The order of a `GlobalLoader`."""

    seed: Annotated[int, Meta(ge=-(2**63))]
    """The seed of the order."""
    shuffle: bool
    """Each epoch has another order; otherwise samples come by their index."""


class ExpectedFields(TypedDict):
    """What each epoch has to contain."""

    count: Count
    """Samples of the data set."""
    sum: Sum | None
    """The sum of the hashes of their ids; null where these are the indices from 0 on."""
    order: OrderFields | None
    """Their order, where it is that of a `GlobalLoader` from the beginning of the run."""


class UnrecordedFields(TypedDict):
    """Steps for which a rank recorded no samples."""

    count: Positive
    """How many steps."""
    first: Positive
    """The first of them."""
    last: Positive
    """The last of them."""


class DataFields(TypedDict):
    """The data ledger of a step."""

    metadata: Sha256
    """The SHA-256 of the metadata of the save that it belongs to."""
    step: Positive
    """The step."""
    since: Count
    """The ledger contains the steps after this one; 0 if it began with the run."""
    after: Count
    """The save before, on this branch: the rows are those of the steps after it."""
    expected: ExpectedFields | None
    """What each epoch has to contain; null where that is not known."""
    unrecorded: UnrecordedFields | None
    """Steps since the ledger began that recorded nothing; null without any."""
    epochs: list[EpochFields]
    """The totals of each epoch since the ledger began, the first epoch first."""
    rows: list[RowFields]
    """What the steps since the save before trained, by epoch."""


class LedgerRow(NamedTuple):
    """The samples of one epoch that the steps from `first` to `last` trained."""

    first: int
    last: int
    epoch: int
    n_samples: int
    """How many samples, each as often as it was trained."""
    total: int
    """The sum of the hashes of their ids."""
    ids: tuple[SampleId, ...] | None = None

    def fields(self) -> RowFields:
        """The form in a ledger."""
        return {
            "first": self.first,
            "last": self.last,
            "epoch": self.epoch,
            "count": self.n_samples,
            "sum": as_hex(self.total),
        }

    @classmethod
    def of(cls, fields: RowFields) -> "LedgerRow":
        """The row in a ledger."""
        return cls(
            fields["first"],
            fields["last"],
            fields["epoch"],
            fields["count"],
            int(fields["sum"], 16),
        )


def as_hex(total: int) -> str:
    """A sum of hashes as it is stored."""
    return f"{total % MODULUS:032x}"


def keys_of(ids: Sequence[SampleId]) -> Iterable[bytes]:
    """What is hashed of each id: an integer as 8 bytes, little-endian; text as UTF-8."""
    with suppress(struct.error):
        if len(ids) <= _AT_ONCE:
            return _packed(ids)
        parts = (ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE))
        return list(chain.from_iterable(map(_packed, parts)))
    with suppress(TypeError, UnicodeEncodeError):
        return list(map(str.encode, ids))  # type: ignore[arg-type]
    return map(_key_of, ids)


def _packed(numbers: Sequence[SampleId]) -> Sequence[bytes]:
    return struct.unpack("8s" * len(numbers), struct.pack(f"<{len(numbers)}q", *numbers))


def _key_of(sample: object) -> bytes:
    if isinstance(sample, str):
        return sample.encode("utf-8", "surrogatepass")
    with suppress(TypeError, OverflowError):
        return index(sample).to_bytes(8, "little", signed=True)  # type: ignore[arg-type]
    raise UsageError(
        f"the id of a sample is {str(sample)[:80]!r}, a {type(sample).__name__}; expected an "
        "integer of 64 bits, or text"
    )


def sum_of(ids: Sequence[SampleId]) -> int:
    """The digest of samples: the sum of the hashes of their ids, modulo 2^128."""
    return sum(map(xxh3_128_intdigest, keys_of(ids))) % MODULUS


def sum_of_indices(n_samples: int) -> int:
    """The digest of the ids from 0 to `n_samples`. Cost: a quarter of a second for a million."""
    total = 0
    for start in range(0, n_samples, _AT_ONCE):
        total += sum_of(range(start, min(start + _AT_ONCE, n_samples)))
    return total % MODULUS


def joined_rows(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """The rows of a step, at most `MOST_ROWS`: more are joined in pairs of one epoch.

    An epoch has at least one row, so more epochs than that between two saves keep theirs.
    """
    joined = list(rows)
    while len(joined) > MOST_ROWS:
        n_before, is_pair = len(joined), True
        pairs: list[LedgerRow] = []
        for row in joined:
            if is_pair or pairs[-1].epoch != row.epoch:
                pairs.append(row)
                is_pair = False
                continue
            first = pairs.pop()
            total = (first.total + row.total) % MODULUS
            pairs.append(
                LedgerRow(first.first, row.last, row.epoch, first.n_samples + row.n_samples, total)
            )
            is_pair = True
        joined = pairs
        if len(joined) == n_before:
            break
    return joined


def data_bytes(fields: DataFields) -> bytes:
    """The ledger as it is stored."""
    return as_stored(SCHEMA, fields)


def parse_data(data: bytes) -> DataFields:
    """The ledger in the bytes of its file. Raises `OwnFileUnreadable`."""
    most = 8 * MOST_EPOCHS + MOST_ROWS + 16
    return read_back(data, SCHEMA, DataFields, max_objects=most)
