"""Every reader of JSON from outside is bounded: all use one function, and each is fed hostile data.

A module that parses JSON by itself fails the first test; one that starts to use
`bounded_json` fails the second until it has a probe here.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from every_case import all_cases

from ckptctl.cli.app import run
from ckptctl.errors import CkptctlError, OwnFileUnreadable, RecordUnreadable
from ckptctl.formats.bounded_json import MAX_DEPTH, NotJson, decode_first_json, decode_json
from ckptctl.formats.own.heartbeats import read_heartbeat
from ckptctl.storage.opening import open_store

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckptctl"

OWN_DATA = {
    "cli/commands.py": "a file of the package",
    "cli/config.py": "TOML of a trusted user, or one that is named; at most 1 MiB, bounded depth",
    "cli/output.py": "the document that this process has just made",
    "diagnostics/advice.py": "a file of the package",
    "failures/results.py": "a file of the package",
    "failures/rules.py": "a file of the package",
    "formats/frameworks/layout_tables.py": "a file of the package",
    "logs/formats.py": "a file of the package",
    "storage/s3.py": "a file of the package",
    "supervisor/agents.py": "what the agents of one run exchange, as one typed struct",
}
"""Modules that parse what does not come from others, and what it is."""

DECODERS = ("load", "loads", "JSONDecoder", "raw_decode", "literal_eval", "eval", "safe_load")
MODULES = ("json", "yaml", "tomllib", "configparser", "marshal", "xml", "plistlib", "ast")

MAY_DECODE = re.compile(
    rf"\b(?:{'|'.join(MODULES)})\s*\.\s*(?:{'|'.join(DECODERS)})\b"
    r"|\b(?:eval|literal_eval|JSONDecoder)\b|\bmsgspec\.(?:json|toml|yaml)\.decode\b"
)


def decoder_calls(path: Path) -> Iterator[str]:
    """Calls in a module that decode a format which may nest, by the name they are called by."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if MAY_DECODE.search(source) else ():
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if re.fullmatch(r"msgspec\.(?:json|toml|yaml)\.decode", ast.unparse(called)):
            yield ast.unparse(called)
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            if called.value.id in MODULES and called.attr in DECODERS:
                yield f"{called.value.id}.{called.attr}"
        elif isinstance(called, ast.Name) and called.id in ("eval", "literal_eval", "JSONDecoder"):
            yield called.id


def test_json_from_outside_is_parsed_in_one_module():
    found = {
        name: sorted(set(calls))
        for path in PACKAGE.rglob("*.py")
        if (name := path.relative_to(PACKAGE).as_posix()) != "formats/bounded_json.py"
        and (calls := list(decoder_calls(path)))
    }
    assert found.keys() == OWN_DATA.keys(), found


# Hostile documents: each is larger, deeper or stranger than anything that a framework writes.

HOSTILE = {
    "open lists": b"[" * 200_000,
    "open objects": b'{"a":' * 200_000,
    "closed lists": b"[" * 900 + b"]" * 900,
    "closed objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "deep field": b'{"step": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "many digits": b'{"step": ' + b"9" * 100_000 + b"}",
    "not UTF-8": b'{"step": "\xff\xfe"}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "large": b'{"step": "' + b"x" * (17 << 20) + b'"}',
    "no object": b"null",
    "empty": b"",
}


def sound_root(checkpoints: Path, folder: Path) -> Path:
    """A root with sound steps 10 and 20."""
    return Path(shutil.copytree(checkpoints / "run_bare4", folder / "run"))


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


Probe = Callable[[Path, bytes], None]
"""Put hostile data where one reader finds it, and assert what it answers."""


def answers(*words: object, codes: tuple[int, ...]) -> None:
    """Run a command; its exit code is a documented one, and one that is expected here."""
    assert run([str(word) for word in words]) in codes, words


def seals(root: Path, data: bytes) -> None:
    put(root / "step_20" / ".ckptctl" / "seal.json", data)
    answers("verify", root / "step_20", codes=(0,))
    answers("verify", root / "step_20", "--require-seal", codes=(22,))


def marks(root: Path, data: bytes) -> None:
    put(root / "step_20" / ".ckptctl" / "marks" / "0-pinned-0.json", data)
    answers("verify", root / "step_20", codes=(0,))
    put(root / "step_20" / ".ckptctl" / "marks" / "0-rejected-0.json", data)
    answers("verify", root / "step_20", codes=(27,))


def marks_in_a_file(root: Path, data: bytes) -> None:
    file = put(root.parent / "marks.jsonl", data.replace(b"\n", b" ") + b"\n")
    answers("pick", root, "--marks", file, codes=(2,) if data.strip() else (0,))


def fence(root: Path, data: bytes) -> None:
    from ckptctl.selection.history import holder

    put(root / ".ckptctl" / "fence" / "0000000007.json", data)
    with open_store(str(root)) as store:
        token = holder(store)
    assert token is not None
    assert token.number == 7


def safetensors_header(root: Path, data: bytes) -> None:
    step = root.parent / "model_step" / "step_5"
    put(step / "model.safetensors", struct.pack("<Q", len(data)) + data)
    answers("verify", step, codes=(20, 21, 22))


def safetensors_index(root: Path, data: bytes) -> None:
    from ckptctl.formats.archive.safetensors import parse_index

    with pytest.raises(RecordUnreadable):
        parse_index(data)


def snapshot_of_ray(_root: Path, data: bytes) -> None:
    from ckptctl.formats.frameworks.ray_train import reported_steps

    result = b'{"checkpoint_results": [{"checkpoint_dir_name": "a", "metrics": {"step": '
    assert reported_steps(data) == reported_steps(result + data + b"}}]}") == ()


def sidecar(root: Path, data: bytes) -> None:
    put(root / "step_20" / "trainer_state.json", data)
    answers("verify", root / "step_20", "--level", "structure", codes=(0, 20, 21))


def storage_option(root: Path, data: bytes) -> None:
    from ckptctl.cli.options import parse_storage_options

    text = data.decode("utf-8", "replace")
    assert list(parse_storage_options([f"key={text}"]) or {}) == ["key"]


def resume_report(root: Path, data: bytes) -> None:
    put(root / ".ckptctl" / "attempts" / "20260101T000000.000000Z-00000000.resume.json", data)


def prune_reads_a_resume_report(root: Path, data: bytes) -> None:
    resume_report(root, data)
    answers("prune", root, "--keep", "1", codes=(0,))


def preflight_reads_a_resume_report(root: Path, data: bytes) -> None:
    resume_report(root, data)
    for step in ("step_10", "step_20"):
        (root / step / "__0_0.distcp").write_bytes(b"")
    answers("preflight", root, "--room-for", "0", codes=(11,))


def loss_reads_a_resume_report(root: Path, data: bytes) -> None:
    resume_report(root, data)
    log = put(root.parent / "log.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.9}\n')
    answers("loss", log, "--resume-report", root, codes=(2,))


def loss_reads_a_log(root: Path, data: bytes) -> None:
    answers("loss", put(root.parent / "log.jsonl", data + b"\n"), codes=(2, 31))


def loss_reads_a_trainer_state(root: Path, data: bytes) -> None:
    history = b'{"log_history": [{"loss": 1.0, "step": 1}, ' + data + b"]}"
    answers("loss", put(root.parent / "trainer_state.json", history), codes=(2, 31))


def classify_reads_a_log(root: Path, data: bytes) -> None:
    answers("classify", put(root.parent / "job.log", data + b"\n"), codes=(0,))


def classify_reads_a_dump(root: Path, data: bytes) -> None:
    put(root.parent / "dumps" / "trace_0.json", data)
    answers("classify", "--flight-recorder", root.parent / "dumps", codes=(0, 2))


def branch(root: Path, data: bytes) -> None:
    name = "20260101T000000.000000Z-00000000.from-10.json"
    put(root / ".ckptctl" / "branches" / name, data)
    (root.parent / "other").mkdir()
    answers("pick", root, root.parent / "other", codes=(0,))


def ledger(root: Path, data: bytes) -> None:
    from ckptctl.selection.history import read_attempts

    attempt = "20260101T000000.000000Z-00000000"
    good = json.dumps({"at": "2026", "event": "saved", "attempt": attempt}).encode()
    put(root / ".ckptctl" / "attempts" / f"{attempt}.jsonl", data + b"\n" + good + b"\n")
    with open_store(str(root)) as store:
        ((_, events),) = read_attempts(store)
    too_large = len(data) > 16 << 20  # then the whole file is left out
    assert [event.event for event in events] == ([] if too_large else ["saved"])


def history(root: Path, data: bytes) -> None:
    from ckptctl.selection.history import put_sentinel, read_history

    (root.parent / "new").mkdir(exist_ok=True)
    with open_store(str(root.parent / "new")) as store:
        put_sentinel(store)
        put(root.parent / "new/.ckptctl/attempts/20260101T000000.000000Z-00000000.jsonl", data)
        found = read_history(store)
    # A ledger that is damaged proves nothing; one line of JSON that names no step is none.
    assert found.held is None
    assert found.doubt is not None


def journal(root: Path, data: bytes) -> None:
    from ckptctl.resharding.executing import Journal
    from ckptctl.resharding.planning import TargetFile

    file = TargetFile("__0_0.distcp", 0, n_bytes=8)
    with open_store(str(root)) as store:
        entries = Journal(store, "id", "step_30")
        put(root / entries.path_of(file.path), data)
        assert entries.runs(file) is None


def node_report(root: Path, data: bytes) -> None:
    from ckptctl.errors import StorageUnavailable
    from ckptctl.preflight_checks.nodes import SCHEMA, _reports_in

    line = f'{{"schema": "{SCHEMA}", "roots": {data.decode("utf-8", "replace")}}}'
    with pytest.raises(StorageUnavailable) as raised:
        list(_reports_in(line, 1))
    assert raised.value.exit_code == 75


def runbook_record(root: Path, data: bytes) -> None:
    from ckptctl.runbook.record import newest

    put(root / ".ckptctl" / "runbooks" / "rb-7" / "20260101T000000Z-000000" / "000001.json", data)
    with open_store(str(root)) as store, pytest.raises(CkptctlError) as raised:
        newest(store, "rb-7")
    assert raised.value.exit_code == 21


def runbook_report(root: Path, data: bytes) -> None:
    from ckptctl.runbook.executing import _document
    from ckptctl.storage.shared_places import open_folder

    put(root.parent / "report.json", data)
    with open_folder(str(root.parent)) as folder:
        assert _document(folder, "report.json") in (None, {"step": "\ufffd\ufffd"})


def heartbeat(_root: Path, data: bytes) -> None:
    with pytest.raises(OwnFileUnreadable):
        read_heartbeat(data, "key")


def records_of_a_collector(root: Path, data: bytes) -> None:
    record = b'{"insertId": "1", "textPayload": "step 1 loss 2.5", "resource": '
    lines = (record + b"{}}", data.replace(b"\n", b" "), record + data + b"}")
    log = put(root.parent / "collector.log", b"\n".join(lines))
    answers("loss", log, codes=(31,))
    answers("classify", log, codes=(0,))
    answers("loss", put(root.parent / "collector.json", b"[" + record + data), codes=(31,))


READERS: dict[str, tuple[Probe, ...]] = {
    "cli/options.py": (storage_option,),
    "logs/log_lines.py": (classify_reads_a_log,),
    "failures/rank_dumps.py": (classify_reads_a_dump,),
    "logs/collectors.py": (records_of_a_collector,),
    "formats/own/files.py": (
        seals,
        marks,
        marks_in_a_file,
        fence,
        branch,
        heartbeat,
        runbook_record,
        history,
        ledger,
        preflight_reads_a_resume_report,
        prune_reads_a_resume_report,
        loss_reads_a_resume_report,
    ),
    "formats/archive/safetensors.py": (safetensors_header, safetensors_index),
    "preflight_checks/nodes.py": (node_report,),
    "formats/frameworks/ray_train.py": (snapshot_of_ray,),
    "inspection/sidecars.py": (sidecar,),
    "logs/records.py": (loss_reads_a_log, loss_reads_a_trainer_state),
    "resharding/executing.py": (journal,),
    "runbook/executing.py": (runbook_report,),
}
"""The modules that read JSON from outside, each with what proves that it is bounded."""


def test_every_module_that_reads_json_from_outside_has_a_probe():
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "ckptctl.formats.bounded_json" in path.read_text()
    }
    assert users == READERS.keys()


@pytest.mark.parametrize(
    "probe", [probe for probes in READERS.values() for probe in probes], ids=lambda p: p.__name__
)
def test_a_reader_answers_hostile_json_as_documented(probe, checkpoints, tmp_path, capsys):
    with all_cases() as case:
        for name, data in HOSTILE.items():
            with case(name):
                probe(sound_root(checkpoints, tmp_path / name), data)
                shown = capsys.readouterr()
                assert "bug in ckptctl" not in shown.err
                assert "Traceback" not in shown.err


@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt", "latest-rank0"])
@pytest.mark.parametrize(
    "content",
    ["tmp-" * 1024, "x" + "-tmp" * 1023, "1.attempt-1" + ".attempt-1" * 400, "step=" * 800],
)
def test_a_pointer_may_hold_anything(checkpoints, tmp_path, name, content, capsys):
    root = sound_root(checkpoints, tmp_path)
    put(root / name, content.encode()[:4096])
    answers("pick", root, codes=(0,))
    answers("scan", root, codes=(0,))
    assert capsys.readouterr().out.startswith(f"{root}/step_20\n")


# The one function.


def test_nesting_is_allowed_up_to_the_bound_and_no_further():
    fits = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert decode_json(fits, max_bytes=1000) is not None
    for text in (f"[{fits}]", '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)):
        with pytest.raises(NotJson, match=f"more than {MAX_DEPTH} deep"):
            decode_json(text, max_bytes=1000)


def test_brackets_in_texts_and_many_small_lists_are_not_depth():
    value = {"text": "[" * 1000, "lists": [[1, 2]] * 1000}
    assert decode_json(json.dumps(value), max_bytes=1 << 20) == value


def test_a_document_above_its_size_is_refused_before_it_is_parsed():
    with pytest.raises(NotJson, match="1,001 bytes long, and at most 1,000"):
        decode_json(b"1" * 1001, max_bytes=1000)


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("1.5", {"numbers": "text"}, "1.5"),
        ("[1, NaN]", {"numbers": "text"}, ["1", "NaN"]),
        ("[1.5]", {"numbers": "finite"}, [1.5]),
        ("[1]", {"numbers": "integers"}, [1]),
        (' {"a": 1} \n', {"unique_keys": True}, {"a": 1}),
    ],
)
def test_numbers_are_read_as_the_caller_says(text, options, value):
    assert decode_json(text, max_bytes=100, **options) == value


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("[1.5]", {"numbers": "integers"}, "1.5"),
        ("[NaN]", {"numbers": "finite"}, "NaN"),
        ("[Infinity]", {"numbers": "integers"}, "Infinity"),
        ('{"a": 1, "a": 2}', {"unique_keys": True}, "twice"),
        ("1 2", {}, "more text follows"),
    ],
)
def test_what_the_caller_does_not_allow_is_refused(text, options, said):
    with pytest.raises(NotJson, match=said):
        decode_json(text, max_bytes=100, **options)


@pytest.mark.parametrize(("text", "cut_short"), [('{"a": [1, 2', True), ('{"a" 1}', False)])
def test_a_document_that_ends_early_is_told_from_one_that_is_damaged(text, cut_short):
    with pytest.raises(NotJson) as raised:
        decode_json(text, max_bytes=100)
    assert raised.value.malformed
    assert raised.value.cut_short is cut_short


def test_the_first_document_of_a_text_is_read_to_its_end():
    assert decode_first_json('{"a": 1}, {"a": 2}', numbers="text") == ({"a": "1"}, 8)
    with pytest.raises(NotJson, match="deep"):
        decode_first_json("[" * 70 + "]" * 70 + " rest")


def test_an_own_file_is_refused_for_its_depth():
    from ckptctl.formats.own.marks import parse_mark

    with pytest.raises(OwnFileUnreadable):
        parse_mark(b"[" * 64 + b"]" * 64)
