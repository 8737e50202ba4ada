"""The contract of a resume: what a job states of itself, kept in each step that it saves.

Configuration, tokenizer, global batch, seed, revision of the code: a job that resumes with others
loads every tensor and trains another run. Terms have names, nested ones with dots, and their values
are JSON. They are the file `.ckptctl/contract.json` in a step, bound to its metadata. Nothing is
guessed: what the step or the job does not state is not compared.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypedDict

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.files import as_stored, read_back
from ckptctl.model import Sha256
from ckptctl.redaction import clean_addresses

CONTRACT_FILE = f"{OWN_FOLDER}/contract.json"
SCHEMA = "ckptctl.contract/1"
MAX_CONTRACT_BYTES = 1 << 20
_DEEPEST = 32
_SHOWN = 80


class Terms(dict[str, str]):
    """The value of each term as JSON, by the name of the term."""


class ContractFields(TypedDict):
    """The contract in a step."""

    terms: dict[str, str]
    """What the job stated, as JSON, by name."""
    metadata: Sha256
    """The digest of the metadata of the step."""


def contract_bytes(terms: Terms, metadata: str) -> bytes:
    """The contract as it is stored. `metadata` is the digest of that of the step."""
    return as_stored(SCHEMA, ContractFields(terms={**terms}, metadata=metadata))


def parse_contract(data: bytes) -> ContractFields:
    """The contract in the bytes of its file. Raises `OwnFileUnreadable`."""
    # Values are texts, in which brackets are usual: the size alone is bounded.
    return read_back(data, SCHEMA, ContractFields, max_objects=len(data))


def terms_of(stated: Mapping[str, object]) -> Terms:
    """The terms in what a script or a file states: those in tables as `a.b`.

    What is secret in an address is left out; `Terms` stay as they are. Raises `UsageError` for
    what is no JSON, is more than 32 tables deep, or takes more than 512 KiB.
    """
    if isinstance(stated, Terms):
        return stated
    if not isinstance(stated, Mapping):
        raise UsageError(f"the contract is a {type(stated).__name__}; state names with values")
    terms = Terms(_flat("", stated, 1))
    if sum(len(json.dumps(name) + json.dumps(text)) for name, text in terms.items()) > (
        MAX_CONTRACT_BYTES // 2
    ):
        raise UsageError("the contract has more than 512 KiB; state digests of what is large")
    return terms


def _flat(above: str, stated: Mapping[str, object], depth: int) -> Iterator[tuple[str, str]]:
    for key, value in stated.items():
        name = f"{above}{key}"
        if not isinstance(value, Mapping):
            yield name, _as_json(name, value)
        elif depth == _DEEPEST:
            raise UsageError(f"the contract is more than {_DEEPEST} tables deep at {name[:_SHOWN]}")
        else:
            yield from _flat(f"{name}.", value, depth + 1)


def _as_json(name: str, value: object) -> str:
    """The value as JSON; a number that is whole is written as a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, str):
        value = clean_addresses(value)
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"the term {name[:_SHOWN]} of the contract is a {type(value).__name__} that JSON does "
            "not have: state texts, finite numbers, true or false, lists and tables of them"
        ) from None


@dataclass(frozen=True, slots=True)
class Drift:
    """A term in which a job differs from the step that it resumes from."""

    term: str
    """Its name."""
    saved: str
    """The value in the step, as JSON."""
    now: str
    """The value of the job."""

    def __str__(self) -> str:
        return f"{self.term}: {self.saved} in the step, {self.now} now"


def drift(saved: Terms, now: Terms) -> tuple[Drift, ...]:
    """The terms that both state, with other values, by name. `1` and `1.0` are equal."""
    return tuple(
        Drift(name, _short(saved[name]), _short(now[name]))
        for name in sorted({*saved} & {*now})
        if saved[name] != now[name]
    )


def stated_by_one(saved: Terms, now: Terms) -> str:
    """The terms that the step or the job alone states, as a message; empty without any."""
    alone = {"the step": sorted({*saved} - {*now}), "the job": sorted({*now} - {*saved})}
    return "; ".join(f"{who} alone states {_names(names)}" for who, names in alone.items() if names)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(_short, names[:8])) + more


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}…"
