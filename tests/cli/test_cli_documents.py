"""The documents of --json, against the schemas that `explain` prints."""

import math
from collections.abc import Iterator
from enum import Enum

import pytest
from command_line import schema, validated
from jsonschema import Draft202012Validator
from made_results import VERDICTS, contents, pick, report, scan, short

from ckptctl.cli import documents, explain
from ckptctl.cli.explain import all_pages, page
from ckptctl.cli.pick import pick_document
from ckptctl.cli.verify import verify_document
from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.findings import ByStore, Report
from ckptctl.selection.verifying import TensorRow


def check(document) -> dict:
    """Write the document out, read it back, and hold it against its schema."""
    text = documents.as_text(document)
    assert text.isascii()
    return validated(text)


EVERY = [
    documents.document("scan", scan(report(200, short(1)), report(100), chosen=100)),
    documents.document("scan", scan(pick=pick(None, exit_code=10))),
    *(
        verify_document(report(1200, finding), "ckptctl explain x")()
        for finding in VERDICTS.values()
    ),
    verify_document(report(1200, by_store=ByStore(4, 3, 1 << 30, 1)), None)(),
    verify_document(report(1, number=None, world_size=None, written_s=None), None)(),
    pick_document(pick(report(100), (report(200, short(1)), "too short")), 3)(),
    pick_document(pick(None), 11)(),
    documents.document("show", contents(TensorRow("w", "float32", (2, 3), 1, 24, "model"))),
    documents.document("explain", explained=(page("shard.truncated"),)),
    documents.error_document(StorageUnavailable("no answer"), "scan"),
    documents.error_document(UsageError("no such command", next_command="ckptctl --help"), None),
]


@pytest.mark.parametrize("document", EVERY, ids=lambda d: f"{d['schema']}-{d['exit_code']}")
def test_every_document_is_as_its_schema_says(document):
    read = check(document)
    assert list(read)[:5] == ["schema", "tool", "generated_at", "ok", "exit_code"]
    assert read["ok"] is (read["exit_code"] in (0, 3))
    assert "next_command" in read or read["schema"] == "ckptctl.explain/1"


def test_the_document_that_explains_everything_is_as_its_schema_says():
    read = check(documents.document("explain", explained=tuple(all_pages())))
    assert {each["kind"] for each in read["explained"]} == {
        "finding",
        "verdict",
        "exit-code",
        "cause",
        "check",
    }


@pytest.mark.parametrize("name", documents.DOCUMENTS)
def test_every_schema_is_a_schema_and_describes_all_it_names(name):
    Draft202012Validator.check_schema(schema(name))
    undescribed = [
        field for field, said in fields(schema(name)) if not {"description", "const"} & set(said)
    ]
    assert undescribed == []


def test_the_schemas_state_which_lists_of_words_do_not_grow():
    def enumerations(base: type) -> Iterator[type]:
        for each in base.__subclasses__():
            yield each
            yield from enumerations(each)

    for name in documents.DOCUMENTS:
        explain.schema(name)
    assert {each.__name__ for each in enumerations(Enum)} >= explain.CLOSED
    origin = explain.schema("loss")["$defs"]["Replay"]["properties"]["origin"]
    assert origin["enum"] == ["retrained", "assumed", "unknown", "copied"]


def fields(node):
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        for value in node.values():
            yield from fields(value)
    if isinstance(node, list):
        for value in node:
            yield from fields(value)


@pytest.mark.parametrize("document", EVERY, ids=lambda d: f"{d['schema']}-{d['exit_code']}")
def test_no_document_has_a_field_that_its_schema_does_not_describe(document):
    name = document["schema"].removeprefix("ckptctl.").removesuffix("/1")
    described = {field for field, _ in fields(schema(name))}
    assert set(keys(documents.plain(document))) <= described


def keys(value):
    """Names of fields, at any depth; not the keys of what maps files or kinds to something."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in ("digests", "bytes_by_kind"):
                yield from keys(item)
    if isinstance(value, list):
        for item in value:
            yield from keys(item)


def test_a_document_has_the_fields_of_the_library_under_their_own_names():
    read = check(verify_document(report(1200, short(3)), None)())
    assert set(Report.__dataclass_fields__) <= set(read["report"])
    assert read["report"]["findings"][0]["severity"] == "fault"
    assert read["report"]["digests"] == {".metadata": "ab" * 32}
    assert read["report"]["damaged"] is True


def test_a_number_that_json_has_not_becomes_null():
    assert documents.plain((math.nan, math.inf, 1.5)) == [None, None, 1.5]


def test_names_that_no_encoding_carries_are_written_all_the_same():
    read = check(verify_document(report(1, url="/ckpt/\udcff\x1b[31m/step_1"), None)())
    assert read["report"]["url"] == "/ckpt/\udcff\x1b[31m/step_1"
