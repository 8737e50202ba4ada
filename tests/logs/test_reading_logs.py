"""Logs come from files, folders, pipes and objects, packed or not, in the order of time."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptctl.errors import LogUnreadable, LogWithoutLoss, PathNotFound, UsageError
from ckptctl.logs.reading import DamageLog, LogFormat, LogReader, read_logs
from ckptctl.logs.rows import Marker, Number, Row
from ckptctl.options import StorageOptions

MEGATRON = (
    " [2025-05-09 {clock}] iteration {step:8}/     100 | consumed samples: {samples:12} |"
    " elapsed time per iteration (ms): 328.6 | learning rate: 6.666667E-05 |"
    " lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 6.350 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def megatron(steps: range, minute: int = 0) -> str:
    return "".join(
        MEGATRON.format(
            clock=f"06:{minute:02}:{step % 60:02}", step=step, samples=64 * step, loss=11 - step / 9
        )
        for step in steps
    )


def nanogpt(steps: range) -> str:
    return "".join(f"iter {step}: loss {4 - step / 99:.4f}, time 5.0ms\n" for step in steps)


def read(text: str | bytes, **options: object) -> list[Row | Marker]:
    reader = LogReader("train.log", LogFormat(**options))
    data = text.encode() if isinstance(text, str) else text
    return [*reader.feed(data), *reader.end()]


def steps(found: list[Row | Marker]) -> list[int]:
    return [item.step for item in found if isinstance(item, Row)]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": lambda data: bz2.compress(data, 1),  # in blocks of 100 kB
    "xz": lzma.compress,
    "zst": zstd,
}


# Where the bytes come from


@pytest.mark.parametrize("packer", PACKERS)
def test_a_packed_log_is_read_as_the_log(tmp_path, packer):
    data = megatron(range(1, 1000)).encode()
    path, packed = tmp_path / "train.log", tmp_path / "packed"
    path.write_bytes(data)
    # Rotation packs one part after another into the same file.
    half = data.index(b"\n", len(data) // 2) + 1
    packed.write_bytes(PACKERS[packer](data[:half]) + PACKERS[packer](data[half:]))
    plain = [(row.step, row.loss, row.position.line) for row in read_logs([str(path)])]
    assert [(row.step, row.loss, row.position.line) for row in read_logs([str(packed)])] == plain


@pytest.mark.parametrize("packer", PACKERS)
def test_a_packed_log_that_is_still_written_gives_what_it_holds(tmp_path, packer):
    data = megatron(range(1, 2500)).encode()
    packed = PACKERS[packer](data)
    path = tmp_path / "packed"
    path.write_bytes(packed[: len(packed) * 9 // 10])
    assert len(list(read_logs([str(path)]))) > 100


@pytest.mark.parametrize("packer", ["gz", "bz2", "xz", "zst"])
def test_a_damaged_packed_log_is_unreadable_behind_the_damage(tmp_path, packer):
    packed = bytearray(PACKERS[packer](megatron(range(1, 1000)).encode()))
    for at in range(len(packed) // 2, len(packed) // 2 + 40):
        packed[at] ^= 0xFF
    path = tmp_path / "packed"
    path.write_bytes(packed)
    with pytest.raises(LogUnreadable, match="the compressed data is damaged"):
        list(read_logs([str(path)]))


def test_standard_input_is_read():
    program = (
        "from ckptctl.logs.reading import read_logs\n"
        "print([(row.position.file, row.step) for row in read_logs(['-'])])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=nanogpt(range(3)), capture_output=True, text=True
    )
    assert done.stdout == "[('-', 0), ('-', 1), ('-', 2)]\n", done.stderr


def test_a_named_pipe_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = subprocess.Popen(
        [sys.executable, "-c", f"open({str(path)!r}, 'w').write({nanogpt(range(4))!r})"]
    )
    assert steps(list(read_logs([str(path)]))) == [0, 1, 2, 3]
    assert writer.wait() == 0


@pytest.mark.server
def test_a_log_on_an_object_store_is_read(s3_moto):
    from ckptctl.storage.opening import open_store

    url, options = f"s3://{s3_moto.new_bucket()}", s3_moto.options
    data = megatron(range(1, 60)).encode()
    with open_store(f"{url}/logs", storage_options=options) as store:
        store.put("train.log.gz", gzip.compress(data))
    storage = StorageOptions(storage_options=options)
    for path in (f"{url}/logs/train.log.gz", f"{url}/logs"):
        assert steps(list(read_logs([path], storage=storage))) == [*range(1, 60)]
    with pytest.raises(PathNotFound):
        list(read_logs([f"{url}/logs/none.log"], storage=storage))


def test_a_log_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(PathNotFound):
        list(read_logs([str(tmp_path / "none.log")]))


# In which order


def test_logs_are_read_in_the_order_of_their_clocks(tmp_path):
    for name, minute, first in (("a", 30, 21), ("b", 10, 1)):
        (tmp_path / name).write_text(megatron(range(first, first + 20), minute=minute))
    found = list(read_logs([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert steps(found) == list(range(1, 41))
    assert [Path(row.position.file).name for row in found] == ["b"] * 20 + ["a"] * 20


def test_logs_without_a_clock_are_read_as_named(tmp_path):
    for name, first in (("old", 0), ("new", 10)):
        (tmp_path / name).write_text(nanogpt(range(first, first + 10)))
    found = list(read_logs([str(tmp_path / "old"), str(tmp_path / "new")]))
    assert steps(found) == list(range(20))


def test_logs_that_differ_in_a_number_are_read_by_that_number(tmp_path):
    for version in (0, 2, 10):
        folder = tmp_path / f"version_{version}"
        folder.mkdir()
        (folder / "metrics.csv").write_text(f"step,train_loss\n{version},2.5\n")
    assert steps(list(read_logs([str(tmp_path)]))) == [0, 2, 10]
    paths = [str(tmp_path / f"version_{v}" / "metrics.csv") for v in (10, 0, 2)]
    assert steps(list(read_logs(paths))) == [0, 2, 10]


def test_a_folder_in_which_nothing_is_a_log_is_reported(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(PathNotFound, match="no file in this folder has the name of a log"):
        list(read_logs([str(tmp_path)]))


# What is no log


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\n\n", "no step with a loss in 2 bytes"),
        (bytes(range(256)) * 999, "no step with a loss in 255,744 bytes"),
        (b"\0" * 99_999, "no step with a loss"),
        (b"x" * 3_000_000, "no step with a loss"),
        (b"Epoch 1 done\nall good\n", "no step with a loss"),
        (b"{'loss': 0.91, 'epoch': 0.66}\n" * 3, "3 losses without a step"),
        (
            b"iteration 5/ 10 | learning rate: 1E-5 | number of skipped iterations: 1 |\n",
            "the rows in megatron format have no loss",
        ),
        (b'{"step": 3, "eval_loss": 2.5}\n' * 9, "no step with a loss"),
    ],
    ids=["empty", "blank", "binary", "zeros", "endless", "words", "no step", "no loss", "eval"],
)
def test_what_holds_no_loss_is_reported_with_what_was_found(tmp_path, data, words):
    path = tmp_path / "train.log"
    path.write_bytes(data)
    with pytest.raises(LogWithoutLoss, match=words) as caught:
        list(read_logs([str(path)]))
    assert caught.value.exit_code == 31
    if words.startswith(("no step", "the rows in")):
        assert caught.value.next_command.startswith(f"ckptctl loss {path} --pattern ")
    else:
        assert caught.value.next_command is None


def test_junk_around_rows_changes_nothing():
    junk = bytes(range(256)) * 50 + b"\n" + b"\0" * 5000
    data = junk + junk.join(line.encode() + b"\n" for line in megatron(range(1, 9)).splitlines())
    assert steps(read(data)) == list(range(1, 9))


def test_zeros_that_a_crash_left_in_a_line_are_not_in_the_way():
    text = megatron(range(1, 4)).replace("iteration        2", "\0\0\0\0iteration        2")
    assert steps(read(text)) == [1, 2, 3]


# The caller's own words


def test_a_pattern_of_the_callers_own_is_read():
    text = "@7 L=2.50 rate 1e-3\nnoise\n@8 L=nan rate 1e-3\n"
    found = read(text, pattern=r"@(?P<step>\d+) L=(?P<loss>\S+) rate (?P<lr>\S+)")
    assert steps(found) == [7, 8]
    assert found[0].loss == Number(2.5, 0.01)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not a regular expression"),
        (r"(?P<loss>\d)", "no group named step"),
        (r"(?P<step>\d)(?P<lost>\d)", "unknown group 'lost'"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern, words):
    with pytest.raises(UsageError, match=words):
        LogFormat(pattern=pattern)


def test_a_key_map_says_what_a_record_means():
    lines = [json.dumps({"n": n, "ce": 2.5, "loss": 9.0, "opt": {"rate": 0.5}}) for n in range(4)]
    found = read("\n".join(lines), keys={"step": "n", "loss": "ce", "lr": "opt/rate"})
    assert [(row.step, row.loss.value, row.lr.value) for row in found] == [
        (n, 2.5, 0.5) for n in range(4)
    ]


@pytest.mark.parametrize(
    "text",
    ['{{"step": {0}, "loss": 2.5, "train/ce": 2.25}}\n', "step {0} loss 2.5 train/ce 2.25\n"],
)
def test_a_key_that_no_log_has_is_reported(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text("".join(map(text.format, range(1, 30))))
    damage = DamageLog()
    for name in ("train/ce", "train/cee"):
        keys = LogFormat(keys={"loss": name})
        assert len([*read_logs([str(path)], keys, damage=damage)]) == 29
    assert damage.unused_keys == ["loss=train/cee"]


def test_a_key_map_to_a_field_that_is_not_there_is_refused():
    with pytest.raises(
        UsageError, match="--key los=a: unknown field los; the fields are step, loss,"
    ):
        LogFormat(keys={"los": "a"})


def test_a_format_and_a_pattern_exclude_each_other():
    with pytest.raises(UsageError, match="cannot be combined"):
        LogFormat("csv", pattern=r"(?P<step>\d)")


def test_no_log_at_all_is_refused():
    with pytest.raises(UsageError, match="no log was named"):
        list(read_logs([]))


def test_ckptctls_own_records_in_a_folder_are_no_logs(tmp_path):
    (tmp_path / "train.log").write_text(nanogpt(range(1, 9)))
    record = tmp_path / ".ckptctl" / "branches" / "1.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text('{"step": 4, "loss": 2.5}\n')
    rows = list(read_logs([str(tmp_path)]))
    assert {row.position.file for row in rows} == {str(tmp_path / "train.log")}
