"""Files of records are read exactly: event files, W&B's, trainer states, tables."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
from made_logs import (
    VERSION_EVENT,
    event_record,
    field,
    scalar_event,
    start_event,
    tensor_event,
    wandb_file,
    wandb_history,
)

from ckptctl.errors import LogUnreadable
from ckptctl.logs.binary_logs import crc32c
from ckptctl.logs.reading import DamageLog, LogFormat, LogReader, read_logs
from ckptctl.logs.rows import Marker, Number, Row
from ckptctl.loss.segments import split


def read(data: bytes, name: str = "log", piece: int = 1 << 20) -> tuple[LogReader, list]:
    reader = LogReader(name)
    found = []
    for at in range(0, len(data), piece):
        found += reader.feed(data[at : at + piece])
    return reader, [*found, *reader.end()]


def events(steps: range, scale: float = 1.0) -> bytes:
    return VERSION_EVENT + b"".join(
        scalar_event(step, {"lm loss": scale / step}) + scalar_event(step, {"learning-rate": 0.5})
        for step in steps
    )


# RFC 3720, B.4
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_crc_is_castagnolis(data, crc):
    assert crc32c(data) == crc


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_scalars_of_one_step_are_one_row_with_whole_floats(piece):
    reader, found = read(events(range(1, 5)), piece=piece)
    assert reader.log.format == "tensorboard"
    assert [row.step for row in found] == [1, 2, 3, 4]
    assert [row.loss.value for row in found] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert {row.loss.quantum for row in found} == {0.0}
    assert {row.lr for row in found} == {Number(0.5, 0.0)}
    assert found[0].at == 1.7e9


def test_a_scalar_that_is_stored_as_a_tensor_is_read():
    _, found = read(VERSION_EVENT + tensor_event(7, "train/loss", 2.5))
    assert [(row.step, row.loss) for row in found] == [(7, Number(2.5, 0.0))]


def test_a_nan_in_an_event_file_is_a_nan():
    _, found = read(VERSION_EVENT + scalar_event(7, {"loss": math.nan}))
    assert math.isnan(found[0].loss.value)


def test_the_start_of_a_resumed_writer_is_a_marker_of_the_step_before():
    _, found = read(VERSION_EVENT + start_event(21) + scalar_event(21, {"loss": 2.0}))
    assert isinstance(found[0], Marker)
    assert (found[0].step, found[0].fresh) == (20, False)


def test_an_image_between_scalars_is_passed_over():
    image = event_record(field(2, 3) + field(5, bytes(200_000)))
    for piece in (999, 1 << 20):
        reader, found = read(events(range(1, 3)) + image + events(range(3, 5)), piece=piece)
        assert [row.step for row in found] == [1, 2, 3, 4]
        assert reader.log.damage is None


def test_a_flipped_byte_ends_the_reading_of_an_event_file_and_is_reported():
    data = bytearray(events(range(1, 9)))
    data[len(data) // 2] ^= 0xFF
    reader, found = read(bytes(data))
    assert "wrong CRC-32C" in reader.log.damage
    assert 2 <= len(found) < 8


def test_an_event_that_is_cut_short_is_one_that_is_still_written():
    reader, found = read(events(range(1, 4))[:-3])
    assert reader.log.damage is None
    assert [row.step for row in found] == [1, 2, 3]


@pytest.mark.torch
@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")
def test_what_torch_writes_is_read(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 20):
            writer.add_scalar("lm loss", 2.5 / step, step)
            writer.add_scalar("new style", 1.0, step, new_style=True)
    found = list(read_logs([str(tmp_path)]))
    assert [row.step for row in found] == list(range(1, 20))
    assert [row.loss.value for row in found] == pytest.approx([2.5 / s for s in range(1, 20)])


@pytest.mark.parametrize("piece", [1, 1000, 1 << 20])
@pytest.mark.parametrize("typed", [False, True])
def test_the_history_of_an_offline_run_is_read(typed, piece):
    records = [
        wandb_history(
            step, {"train/loss": 2.5 / step, "_timestamp": 1.7e9, "note": "x" * 700}, typed=typed
        )
        for step in range(1, 100)
    ]
    data = wandb_file([field(1, 0) + field(17, b""), *records])
    if piece == 1:
        data = data[:40_000]
    reader, found = read(data, piece=piece)
    assert reader.log.format == "wandb"
    assert reader.log.damage is None
    assert [row.step for row in found] == list(range(1, len(found) + 1))
    assert len(found) == 99 or piece == 1
    assert [row.loss.value for row in found] == [2.5 / row.step for row in found]
    assert found[0].at == 1.7e9


def test_a_flipped_byte_ends_the_reading_of_an_offline_run_and_is_reported():
    data = bytearray(wandb_file(wandb_history(step, {"loss": 1.5}) for step in range(1, 50)))
    data[len(data) // 2] ^= 0xFF
    reader, found = read(bytes(data))
    assert "wrong CRC-32" in reader.log.damage
    assert 0 < len(found) < 49


def test_zeros_that_a_crash_left_at_the_end_are_no_damage():
    history = wandb_file(wandb_history(step, {"loss": 1.5}) for step in range(1, 5))
    for data in (events(range(1, 5)), history):
        for piece in (5, 1 << 20):
            reader, found = read(data + bytes(9_999), piece=piece)
            assert [row.step for row in found] == [1, 2, 3, 4]
            assert reader.log.damage is None


def trainer_state(steps: range) -> dict:
    history = [
        {"epoch": step / 10, "grad_norm": 0.5324, "learning_rate": 1e-4, "loss": 4.25, "step": step}
        for step in steps
    ]
    history.insert(3, {"epoch": 0.3, "eval_loss": 4.1, "eval_runtime": 1.0, "step": 3})
    history.append({"step": steps[-1], "total_flos": 1.0, "train_loss": 4.0, "train_runtime": 9.0})
    return {"best_metric": None, "global_step": steps[-1], "log_history": history, "max_steps": 30}


@pytest.mark.parametrize("piece", [1, 13, 1 << 20])
@pytest.mark.parametrize("indent", [2, None])
def test_a_trainer_state_gives_its_training_rows(piece, indent):
    data = json.dumps(trainer_state(range(1, 11)), indent=indent).encode()
    reader, found = read(data, name="checkpoint-10/trainer_state.json", piece=piece)
    assert reader.log.format == "trainer-state"
    assert [row.step for row in found] == list(range(1, 11))
    assert found[0].loss.value == 4.25
    # It is set by hand, and not known to a single digit.
    assert found[0].lr.quantum == pytest.approx(1e-6)


def test_a_document_of_a_list_of_records_is_read():
    data = json.dumps([{"step": step, "loss": 1.5} for step in range(5)], indent=1).encode()
    assert [row.step for row in read(data)[1]] == [0, 1, 2, 3, 4]


def test_of_the_trainer_states_in_a_folder_the_newest_is_read(tmp_path):
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        text = json.dumps(trainer_state(range(1, step + 1)))
        (folder / "trainer_state.json").write_text(text)
    assert [row.step for row in read_logs([str(tmp_path)])] == list(range(1, 11))


def test_the_history_that_a_trainer_state_has_from_an_older_one_is_no_restart(tmp_path):
    files = []
    for last in (20, 40):
        folder = tmp_path / f"checkpoint-{last}"
        folder.mkdir()
        state = trainer_state(range(1, last + 1))
        for record in state["log_history"]:
            if "loss" in record:
                record["loss"] = 4 - record["step"] / 100
        files.append(str(folder / "trainer_state.json"))
        Path(files[-1]).write_text(json.dumps(state))
    found = split(read_logs(files))
    assert [(each.first_step, each.last_step) for each in found.segments] == [(1, 20), (21, 40)]
    assert found.n_copies == 20


def test_sparse_cells_of_one_step_are_one_row():
    text = "epoch,step,train_loss,lr,val_loss\n0,49,,0.5,\n0,49,2.25,,\n0,49,,,2.5\n0,99,2.125,,\n"
    _, found = read(text.encode())
    assert [(row.step, row.loss and row.loss.value, row.lr and row.lr.value) for row in found] == [
        (49, 2.25, 0.5),
        (99, 2.125, None),
    ]


def test_the_mean_of_an_epoch_is_no_loss_of_its_last_step():
    text = "epoch,step,train_loss_epoch,train_loss_step\n0,48,,2.25\n0,49,,2.5\n0,49,2.75,\n"
    later = "1,50,,2.0\n"
    found = rows(text + later)
    assert [(row.step, row.loss.value) for row in found] == [(48, 2.25), (49, 2.5), (50, 2.0)]
    only = rows("epoch,step,train_loss_epoch\n0,49,2.75\n1,99,2.5\n")
    assert [(row.step, row.loss.value) for row in only] == [(49, 2.75), (99, 2.5)]


def rows(text: str) -> list[Row]:
    return [item for item in read(text.encode())[1] if isinstance(item, Row)]


@pytest.mark.parametrize(
    "record",
    [
        '{"step": 7, "metrics": {"loss": 2.5, "lr": 1e-4}}',
        '{"event": "train_step", "data": {"step": 7, "loss": 2.5}}',
        '{"step": 7, "train": {"loss": {"value": 2.5}}}',
        '{"key": "loss", "value": 2.5, "step": 7}',
        '{"name": "train/loss", "value": 2.5, "global_step": 7, "time": 1700000000.5}',
        '{"optimizer_step": 7, "losses/total": 2.5, "losses/ce": 2.4}',
        '{"iter": 7, "nll": 2.5}',
        ':::MLLOG {"key": "train_loss", "value": 2.5, "metadata": {"step_num": 7, "lineno": 9}}',
        ':::MLLOG {"key": "tracked_stats", "value": {"train_loss": 2.5}, "metadata": {"step": 7}}',
        '{"train_lr": 1e-4, "train_loss": 2.5, "epoch": 3, "global_step": 7}',
    ],
)
def test_a_record_is_read_whatever_its_logger_put_around_the_names(record):
    (row,) = rows(record + "\n")
    assert (row.step, row.loss.value) == (7, 2.5)


@pytest.mark.parametrize(
    "record",
    [
        '{"step": 7, "metrics": {"val": {"loss": 2.5}}}',
        '{"train_lr": 1e-4, "train_loss": 2.5, "epoch": null}',
        '{"train_lr": 1e-4, "train_loss": 2.5, "epoch": 0.5}',
        ':::MLLOG {"key": "eval_loss", "value": 2.5, "metadata": {"step_num": 7}}',
        '{"key": "lr", "value": 2.5, "step": 7}',
    ],
)
def test_a_record_of_something_else_than_training_has_no_loss(record):
    assert [row.loss for row in rows(record + "\n")] in ([], [None])


@pytest.mark.parametrize(
    "header",
    [
        "Step,Training Loss,Validation Loss",
        "# step loss lr",
        ",step,loss",
        "step|loss",
    ],
)
def test_a_table_is_read_by_its_header(header):
    cells = {
        "Step": "7",
        "step": "7",
        "loss": "2.5",
        "Training Loss": "2.5",
        "lr": "1e-4",
    }
    between = next((mark for mark in ",|" if mark in header), " ")
    names = header.removeprefix("# ").split(between)
    (row,) = rows(header + "\n" + between.join(cells.get(name, "") for name in names) + "\n")
    assert (row.step, row.loss.value) == (7, 2.5)


def test_the_unit_of_a_column_is_that_of_its_finest_number():
    lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate([2.3417, 2.3, 12.25])]
    _, found = read("\n".join(lines).encode())
    assert [row.loss.quantum for row in found] == pytest.approx([1e-4, 1e-4, 1e-3])


def test_damage_in_the_middle_is_raised_after_the_rows_or_reported(tmp_path):
    data = bytearray(events(range(1, 9)))
    data[len(data) // 2] ^= 0xFF
    path = Path(tmp_path, "events.out.tfevents.1.host.2.0")
    path.write_bytes(data)
    found: list[Row | Marker] = []
    with pytest.raises(LogUnreadable, match=r"wrong CRC-32C; the rest was not read"):
        found.extend(read_logs([str(path)]))
    damage = DamageLog()
    assert list(read_logs([str(path)], damage=damage))
    assert len(damage.messages) == 1


def test_the_step_of_the_run_outweighs_the_step_that_wandb_counts():
    for name in ("train/global_step", "trainer/global_step"):
        records = [
            wandb_history(n, {"train/loss": 3 - n / 10, name: 31 + n, "_timestamp": 1.7e9 + n})
            for n in range(5)
        ]
        evaluation = wandb_history(5, {"eval/accuracy": 0.5, "train/loss": 9.0})
        _, found = read(wandb_file([*records, evaluation]))
        assert [row.step for row in found] == [31, 32, 33, 34, 35]


def test_the_mean_of_a_run_of_the_trainer_is_no_row():
    data = b"".join(scalar_event(step, {"train/loss": 3.0 - step / 10}) for step in range(1, 6))
    _, found = read(data + scalar_event(5, {"train/train_loss": 2.7}))
    assert [row.step for row in found] == [1, 2, 3, 4, 5]
    _, alone = read(b"".join(scalar_event(step, {"train_loss": 2.7}) for step in range(1, 6)))
    assert len(alone) == 5


@pytest.mark.parametrize(
    "times", ['"time": 1795165200.5', '"date": "2026-11-20 09:00:00"', '"time": "2026-11-20 09:00"']
)
def test_the_time_of_a_record_is_a_clock(times):
    (found,) = rows(f'{{"step": 7, "loss": 2.5, {times}}}\n')
    assert (found.at is not None) == ('09:00"' not in times)
    assert found.step_time_s is None


def test_the_time_since_the_start_of_a_record_differs_between_attempts():
    (found,) = rows('{"step": 7, "loss": 2.5, "elapsed": 61.25}\n')
    assert found.step_time_s == Number(61.25, 0.01)


def test_a_metric_that_is_ignored_is_not_read():
    text = '{"step": 7, "loss": 2.5, "tokens": 4096}\n'
    reader = LogReader("log", LogFormat(ignored=("tokens",)))
    (found,) = [*reader.feed(text.encode()), *reader.end()]
    assert (found.loss.value, found.tokens) == (2.5, None)
