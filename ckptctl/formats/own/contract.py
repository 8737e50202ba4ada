"""The contract of a resume: what a job states of itself, kept in each step that it saves.

Configuration, tokenizer, global batch, seed, revision of the code: a job that resumes with others
loads every tensor and trains another run. Terms have names, nested ones with dots. They are the
file `.ckptctl/contract.json` in a step, bound to its metadata. Nothing is guessed: what is not
stated is not compared.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import as_stored, read_back
from ckptctl.model import Sha256

CONTRACT_FILE = f"{OWN_FOLDER}/contract.json"
SCHEMA = "ckptctl.contract/1"
MAX_CONTRACT_BYTES = 1 << 20

Term = str | int | float | bool | None
Terms = Mapping[str, Term]


class ContractFields(TypedDict):
    """The contract in a step."""

    terms: dict[str, Term]
    """What the job stated, by name."""
    metadata: Sha256
    """The digest of the metadata of the step."""


def contract_bytes(terms: Terms, metadata: str) -> bytes:
    """The contract as it is stored. `metadata` is the digest of that of the step."""
    return as_stored(SCHEMA, ContractFields(terms={**terms}, metadata=metadata))


def parse_contract(data: bytes) -> ContractFields:
    """The contract in the bytes of its file. Raises `OwnFileUnreadable`."""
    return read_back(data, SCHEMA, ContractFields, max_objects=2 + data.count(b'":'))


def terms_of(stated: Mapping[str, object]) -> dict[str, Term]:
    """The terms in what a script or a file states: tables as `a.b`, lists as their JSON.

    Raises `UsageError` for a value that is no text, number, truth value, list or table, and where
    all together take more than 1 MiB.
    """
    terms = dict(_flat("", stated))
    if len(json.dumps(terms)) > MAX_CONTRACT_BYTES // 2:
        raise UsageError("the contract has more than 512 KiB; state digests of what is large")
    return terms


def _flat(prefix: str, stated: Mapping[str, object]) -> Iterator[tuple[str, Term]]:
    for key, value in stated.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(f"{name}.", value)
        elif isinstance(value, list | tuple):
            yield name, _as_json(name, value)
        elif value is None or isinstance(value, str | int):
            yield name, value
        elif not isinstance(value, float) or not math.isfinite(value):
            raise _unfit(name, value)
        else:
            yield name, value


def _as_json(name: str, value: list[object] | tuple[object, ...]) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise _unfit(name, value) from None


def _unfit(name: str, value: object) -> UsageError:
    return UsageError(
        f"the term {name} of the contract is {value!r:.40}: state texts, finite numbers, true or "
        "false, and lists and tables of them"
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """A term in which a job differs from the step that it resumes from."""

    term: str
    """Its name."""
    saved: str
    """The value in the step, as JSON; `not stated` without one."""
    now: str
    """The value of the job."""

    def __str__(self) -> str:
        return f"{self.term}: {self.saved} in the step, {self.now} now"


def drift(saved: Terms, now: Terms) -> tuple[Drift, ...]:
    """The terms in which the two differ, by name. `1` and `1.0` are equal, `1` and `true` not."""
    return tuple(
        Drift(name, _shown(saved, name), _shown(now, name))
        for name in sorted({*saved, *now})
        if not _agree(saved, now, name)
    )


def _agree(saved: Terms, now: Terms, name: str) -> bool:
    if name not in saved or name not in now:
        return False
    one, other = saved[name], now[name]
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def _shown(terms: Terms, name: str) -> str:
    text = json.dumps(terms[name], ensure_ascii=False) if name in terms else "not stated"
    return text if len(text) <= 80 else f"{text[:77]}…"
