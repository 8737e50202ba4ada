"""Dumps of torch's flight recorder, from gloo jobs of four ranks."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from command_line import clean_environment, torch_server, validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.errors import BinaryData, PathNotFound
from ckptctl.failures.rank_dumps import Dump, NotADump, Stall, compare_dumps, may_be_dump, read_dump

JOB = Path(__file__).parents[1] / "jobs" / "flight_recorder_job.py"
CASES = ("absent", "shape", "operation", "grid")
WATCHDOG = (
    "[rank{0}]:[E1120 03:22:44.120331234 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=3311, OpType=ALLREDUCE)\n"
)


@pytest.fixture(scope="session")
def recorded(once) -> Path:
    """A folder for each case, with a pickle and a JSON dump of each rank."""
    pytest.importorskip("torch")

    def record(folder: Path) -> None:
        variables = {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
        environment = clean_environment(PYTHONPATH=str(JOB.parent), **variables)
        words = ["-m", JOB.stem, str(folder), "4", *CASES]
        done = torch_server().run(words, env=environment)
        assert done.returncode == 0, done.stderr

    return once("flight-recorder", record)


def compared(folder: Path, pattern: str = "nccl_trace_rank_*") -> Stall:
    return compare_dumps([read_dump(str(f), f.read_bytes()) for f in folder.glob(pattern)])


@pytest.mark.parametrize("pattern", ["nccl_trace_rank_*", "trace_*.json"])
def test_the_rank_that_never_joined_is_named_with_the_collective_and_its_line(recorded, pattern):
    stall = compared(recorded / "absent", pattern)
    assert (stall.never_joined, stall.behind, stall.without_dump) == ((2,), (), ())
    (stalled,) = stall.collectives
    assert (stalled.operation, stalled.sequence) == ("all_reduce", 4)
    assert (stalled.joined, stalled.missing) == ((0, 1, 3), (2,))
    if pattern.startswith("nccl"):
        assert stalled.frame is not None
        assert "flight_recorder_job.py" in stalled.frame


def test_the_analyser_of_torch_finds_the_same_rank_missing(recorded, tmp_path):
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    # The dumps of gloo list no members, and the analyser reads groups of NCCL only.
    members = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    for rank in range(4):
        document = pickle.loads((recorded / "absent" / f"nccl_trace_rank_{rank}").read_bytes())
        document["pg_config"] = members
        for entry in document["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(document, 2))
    module = "torch.distributed.flight_recorder.fr_trace"
    program = f"from {module} import main; main()"
    words = ["-c", program, str(tmp_path), "-p", "trace_"]
    report = torch_server().run(words, env=clean_environment())
    assert report.returncode == 0, report.stderr
    assert re.findall(r"missing ranks: (.*)", report.stdout + report.stderr) == ["{2}"]
    assert compared(tmp_path, "trace_*").never_joined == (2,)


def test_a_rank_that_passes_another_shape_is_named(recorded):
    stall = compared(recorded / "shape")
    assert (stall.differing, stall.ranks) == ((2,), ())


def test_a_rank_that_calls_another_operation_is_named(recorded):
    assert compared(recorded / "operation").differing == (2,)


def test_of_ranks_that_wait_for_each_other_only_the_last_of_the_chain_is_named(recorded):
    # Gloo records no point-to-point operation, so one is added in NCCL's form.
    dumps = []
    for rank in range(4):
        document = pickle.loads((recorded / "absent" / f"nccl_trace_rank_{rank}").read_bytes())
        if rank == 0:
            waits = {"profiling_name": "nccl:recv 0<-2", "is_p2p": True, "retired": False}
            document["entries"][-1] |= {**waits, "p2p_seq_id": 1}
        dumps.append(read_dump(f"trace_{rank}", pickle.dumps(document, 2)))
    assert compare_dumps(dumps).collectives[0].missing == (0, 2)
    assert compare_dumps(dumps).never_joined == (2,)


def nccl_dump(rank: int, *entries: dict[str, object]) -> Dump:
    """A dump in NCCL's form, of a group of three ranks."""
    members = {"0": {"name": "0", "desc": "pipe", "ranks": "[0, 1, 2]"}}
    document = {"version": "2.9", "pg_config": members, "entries": [*entries]}
    return read_dump(f"trace_{rank}", pickle.dumps(document, 2))


def nccl_entry(operation: str, collective: int, p2p: int, state: str) -> dict[str, object]:
    return {
        "process_group": ("0", "pipe"),
        "profiling_name": f"nccl:{operation}",
        "collective_seq_id": collective,
        "p2p_seq_id": p2p,
        "is_p2p": " " in operation or (operation == "coalesced" and p2p > 0),
        "state": state,
        "retired": False,
    }


def recorded_by(version: str, calls: list[dict[str, object]]) -> dict[str, object]:
    """A document with what each version of the recorder writes beside the calls."""
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}
    last = max((int(str(call["collective_seq_id"])) for call in calls), default=3)
    status = {"last_enqueued_collective": last, "last_started_collective": -1}
    minor = int(version.partition(".")[2])
    return {
        "version": version,
        "pg_config": {"0": group},
        **({"pg_status": {"0": status}} if minor >= 3 else {}),
        **({"nccl_version": "2.27.3"} if 5 <= minor <= 9 else {}),
        **({"comm_lib_version": "2.28.9"} if minor >= 10 else {}),
        **({"nccl_comm_state": {"0xa": {"rank": "0"}}} if minor in (0, 4) else {}),
        **({"entries": calls} if calls or minor < 5 else {}),
    }


def called(sequence: int, state: str, version: str, **other: object) -> dict[str, object]:
    minor = int(version.partition(".")[2])
    kind = "float" if minor < 3 else "Float"
    return {
        **nccl_entry("all_reduce", sequence, 0, state),
        "process_group": ("0", "default_pg"),
        "input_sizes": [[4, 2]],
        "input_dtypes": [kind],
        "output_sizes": [[4, 2]],
        "output_dtypes": [kind],
        **({"timeout_ms": 600_000} if minor >= 2 else {}),
        **({"thread_id": "139", "thread_name": "pt_nccl"} if minor >= 9 else {}),
        **other,
    }


VERSIONS = ("2.0", "2.2", "2.3", "2.4", "2.5", "2.9", "2.10")


def written(version: str, form: str, rank: int, calls: list[dict[str, object]]) -> Dump:
    document = recorded_by(version, calls)
    if form == "json":
        data = json.dumps(document, sort_keys=True).encode()
        assert may_be_dump(f"trace_{rank}.json", data[:700])
        return read_dump(f"trace_{rank}.json", data)
    return read_dump(f"nccl_trace_rank_{rank}", pickle.dumps(document, 2))


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_rank_is_named_in_the_dumps_of_each_version(version, form):
    done = [called(n, "completed", version, retired=True) for n in (1, 2, 3)]
    waiting = called(4, "scheduled", version)
    frame = {"name": "step", "filename": "/app/train.py", "line": 7}
    for pending in (waiting, {**waiting, "frames": [frame]}, {**waiting, "state": "started"}):
        calls = ([*done, pending], done, [*done, pending])
        stall = compare_dumps([written(version, form, r, each) for r, each in enumerate(calls)])
        assert (stall.never_joined, stall.behind, stall.differing) == ((1,), (), ())
        (stalled,) = stall.collectives
        assert (stalled.operation, stalled.sequence, stalled.shape) == (
            "all_reduce",
            4,
            "4x2 -> 4x2",
        )
        assert stalled.frame == ("/app/train.py:7 in step" if "frames" in pending else None)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_call_that_nccl_retired_without_completing_it_has_timed_out(version):
    done = [called(n, "completed", version, retired=True) for n in (1, 2, 3)]
    timed_out = called(4, "started", version, retired=True)
    calls = ([*done, timed_out], done, [*done, timed_out])
    dumps = [written(version, "pickle", rank, each) for rank, each in enumerate(calls)]
    assert compare_dumps(dumps).never_joined == (1,)


@pytest.mark.parametrize("version", VERSIONS[2:])
def test_of_pending_calls_only_the_stated_number_excludes_a_rank_that_is_further(version):
    waiting = [called(4, "scheduled", version)]
    dumps = [written(version, "pickle", rank, waiting) for rank in (0, 2)]
    assert compare_dumps([*dumps, written(version, "pickle", 1, [])]).never_joined == (1,)
    document = recorded_by(version, [])
    document["pg_status"] = {"0": {"last_enqueued_collective": 5}}
    further = read_dump("nccl_trace_rank_1", pickle.dumps(document, 2))
    assert compare_dumps([*dumps, further]).ranks == ()
    assert len(compare_dumps([*dumps, further]).collectives) == 1


PIPE = (("send 0->1",), ("recv 1<-0", "send 1->2"), ("recv 2<-1",))


def test_parts_of_completed_batches_are_not_pending_however_many_a_rank_still_records():
    # The parts of a batch remain scheduled, and the buffer of the middle rank holds fewer steps.
    dumps = []
    for rank, n_steps in enumerate((5, 2, 5)):
        steps = range(6 - n_steps, 6)
        batches = [
            nccl_entry(part, 0, step, "completed" if part == "coalesced" else "scheduled")
            for step in steps
            for part in (*PIPE[rank], "coalesced")
        ]
        waits = [] if rank == 2 else [nccl_entry("all_reduce", 1, 5, "scheduled")]
        dumps.append(nccl_dump(rank, *batches, *waits))
    stall = compare_dumps(dumps)
    assert (stall.never_joined, stall.behind, stall.in_cycle) == ((2,), (), ())


def test_a_batch_that_did_not_complete_waits_for_the_rank_without_one():
    parts = (*PIPE[1], "coalesced")
    waiting = nccl_dump(1, *(nccl_entry(part, 0, 1, "scheduled") for part in parts))
    sent = nccl_dump(0, *(nccl_entry(part, 0, 1, "scheduled") for part in (*PIPE[0], "coalesced")))
    assert compare_dumps([sent, waiting, nccl_dump(2)]).never_joined == (2,)


def test_numbers_that_batches_took_from_collectives_name_no_rank():
    # Before torch 2.6, a batch takes the next number: the middle rank sends in one of its own.
    dumps = []
    for rank, batches in enumerate(((PIPE[0],), (PIPE[1][:1], PIPE[1][1:]), (PIPE[2],))):
        entries = [
            nccl_entry(part, number, 0, "completed" if part == "coalesced" else "scheduled")
            for number, batch in enumerate(batches * 3, 1)
            for part in (*batch, "coalesced")
        ]
        number = 3 * len(batches) + 1
        dumps.append(nccl_dump(rank, *entries, nccl_entry("all_reduce", number, 0, "scheduled")))
    assert compare_dumps(dumps).ranks == ()


def test_of_crossing_groups_only_the_rank_that_stopped_is_named(recorded):
    stall = compared(recorded / "grid")
    assert (stall.never_joined, stall.behind, stall.differing, stall.in_cycle) == ((3,), (), (), ())


def test_a_rank_without_a_dump_is_possibly_at_fault_and_not_named(recorded, tmp_path):
    for rank in (0, 1, 3):
        shutil.copy(recorded / "absent" / f"nccl_trace_rank_{rank}", tmp_path)
    stall = compared(tmp_path)
    assert (stall.ranks, stall.without_dump) == ((), (2,))
    answer = ckptctl.classify(flight_recorder=str(tmp_path))
    assert answer.suspects == ()
    assert "possibly also ranks without a dump" in answer.message


def test_a_rank_where_a_collective_is_pending_that_its_peers_completed_is_behind(recorded):
    dumps = [read_dump(str(f), f.read_bytes()) for f in recorded.glob("absent/nccl_trace_rank_*")]
    changed = []
    for dump in sorted(dumps, key=lambda each: each.rank):
        document = pickle.loads(Path(dump.file).read_bytes())
        for entry in document["entries"]:
            if entry["collective_seq_id"] == 2 and dump.rank == 1:
                entry["retired"] = False
        changed.append(read_dump(dump.file, pickle.dumps(document, 2)))
    assert compare_dumps(changed).behind == (1,)


def test_without_a_fault_nothing_is_reported(recorded):
    dump = read_dump("trace_0", (recorded / "absent" / "nccl_trace_rank_2").read_bytes())
    assert compare_dumps([dump]) == Stall((), (), (), (), (), ())
    assert compare_dumps([]) == Stall((), (), (), (), (), ())


def test_the_command_names_the_ranks_and_its_document_is_as_the_schema_says(recorded):
    ran = run_ckptctl("classify", "--flight-recorder", recorded / "absent", "--json")
    document = validated(ran.stdout)
    assert (document["failure"], document["confidence"]) == ("hang", "medium")
    suspect = {"node": None, "devices": [], "ranks": [2], "confidence": "medium"}
    assert document["suspects"] == [suspect]
    assert document["collectives"][0]["missing"] == [2]
    ran = run_ckptctl("classify", "--flight-recorder", recorded / "absent")
    assert "rank 2 never joined" in ran.stdout
    assert "all_reduce #4" in ran.stdout


def test_dumps_beside_the_logs_are_read_and_explain_the_watchdogs(recorded, tmp_path):
    for dump in (recorded / "absent").glob("nccl_trace_rank_*"):
        shutil.copy(dump, tmp_path)
    (tmp_path / "job.log").write_text(WATCHDOG.format(0) + WATCHDOG.format(3))
    for given in (tmp_path, tmp_path / "job.log"):
        answer = ckptctl.classify(str(given))
        assert (answer.failure, answer.n_dumps, answer.n_lines) == ("hang", 4, 2)
        assert [each.ranks for each in answer.suspects] == [(2,)]


def test_dumps_that_the_variable_names_are_read(recorded, tmp_path, monkeypatch):
    (tmp_path / "job.log").write_text(WATCHDOG.format(0))
    for dump in (recorded / "absent").iterdir():
        os.utime(dump)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(recorded / "absent" / "nccl_trace_rank_"))
    assert ckptctl.classify(str(tmp_path / "job.log")).n_dumps == 4


def test_a_watchdog_alone_names_no_rank(tmp_path):
    (tmp_path / "job.log").write_text(WATCHDOG.format(0))
    answer = ckptctl.classify(str(tmp_path / "job.log"))
    assert (answer.failure, answer.rank, answer.suspects) == ("hang", None, ())


def test_a_pickle_that_calls_something_is_no_dump(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch /tmp/owned",)

    data = pickle.dumps({"pg_config": {}, "entries": [Evil()], "version": "2.9"}, 2)
    with pytest.raises(NotADump, match="system"):
        read_dump("trace_0", data)
    (tmp_path / "trace_0").write_bytes(data)
    with pytest.raises(PathNotFound, match="no readable dump"):
        ckptctl.classify(flight_recorder=str(tmp_path))


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 400, -1])
def test_a_dump_that_is_cut_short_is_no_dump(recorded, cut):
    data = (recorded / "absent" / "nccl_trace_rank_0").read_bytes()
    with pytest.raises(NotADump):
        read_dump("trace_0", data[:cut])


def test_binary_files_and_folders_of_checkpoints_are_refused(tmp_path, recorded):
    pickled = tmp_path / "step_5" / "__0_0.distcp"
    pickled.parent.mkdir()
    pickled.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 64)
    (tmp_path / "step_5" / "config.json").write_text('{"note": "Input/output error"}\n')
    for given in (pickled, tmp_path / "step_5", tmp_path):
        with pytest.raises(BinaryData, match="binary"):
            ckptctl.classify(str(given))
    assert run_ckptctl("classify", pickled).returncode == 2
    (tmp_path / "slurm-1.out").write_text(WATCHDOG.format(0))
    assert ckptctl.classify(str(tmp_path)).n_files == 1


def test_a_dump_of_an_earlier_attempt_is_set_aside(recorded, tmp_path):
    for rank in (0, 1, 3):
        shutil.copy(recorded / "absent" / f"nccl_trace_rank_{rank}", tmp_path)
    document = pickle.loads((recorded / "absent" / "nccl_trace_rank_2").read_bytes())
    for entry in document["entries"]:
        entry["time_created_ns"] -= 7200 * 10**9
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps(document, 2))
    answer = ckptctl.classify(flight_recorder=str(tmp_path))
    assert 2 not in [rank for each in answer.suspects for rank in each.ranks]
    assert answer.ranks_without_dump == (2,)
    (reason,) = answer.set_aside
    assert "nccl_trace_rank_2: the dump of rank 2 ends 2 h before" in reason
