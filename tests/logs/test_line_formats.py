"""Every format is found out by itself, and every number of it is read with its unit."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from random import Random

import pytest
from every_case import all_cases

from ckptctl.errors import UsageError
from ckptctl.logs.console import Rounds
from ckptctl.logs.fields import FIELDS
from ckptctl.logs.reading import FORMATS, LogFormat, LogReader
from ckptctl.logs.rows import LogPosition, Marker, Number, Row
from ckptctl.logs.text_logs import HINTS, read_marker
from ckptctl.loss.checking import check_loss

SAMPLES = json.loads((Path(__file__).parent / "data" / "samples.json").read_text())
PREFIXES = ("", "0: ", "[rank0]:", "[default7]:", "[rank 0] ", "\x1b[32m", "17: ")


def read(text: str | bytes, **options: str) -> tuple[LogReader, list[Row | Marker]]:
    reader = LogReader("train.log", LogFormat(**options))
    data = text.encode() if isinstance(text, str) else text
    return reader, [*reader.feed(data), *reader.end()]


def rows(text: str | bytes, **options: str) -> list[Row]:
    return [item for item in read(text, **options)[1] if isinstance(item, Row)]


def values(row: Row) -> dict[str, object]:
    told = {name: getattr(row, name) for name in FIELDS if name != "interval"}
    return {name: value for name, value in told.items() if value is not None}


def expected(sample: dict) -> dict[str, object]:
    return {
        name: Number(pytest.approx(value[0]), pytest.approx(value[1]))
        if isinstance(value, list)
        else value
        for name, value in sample["row"].items()
    }


def test_a_sample_is_known_by_itself_and_read_whole():
    with all_cases() as case:
        for sample in SAMPLES:
            with case(sample["format"]):
                reader, found = read("\n".join(sample["lines"]) + "\n")
                assert reader.log.format == sample["format"]
                assert [values(row) for row in found] == [expected(sample)]


def test_a_sample_is_read_alike_when_its_format_is_stated():
    with all_cases() as case:
        for sample in SAMPLES:
            with case(sample["format"]):
                text = "\n".join(sample["lines"]) + "\n"
                assert rows(text, name=sample["format"]) == rows(text)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_a_launcher_writes_before_a_line_changes_nothing(prefix):
    with all_cases() as case:
        # A table is a file of its own, no output of a launcher.
        for sample in (each for each in SAMPLES if each["format"] != "csv"):
            with case(sample["format"]):
                lines = [prefix + line for line in "\n".join(sample["lines"]).split("\n")]
                found = rows("\n".join(lines) + "\n")
                assert [values(row) for row in found] == [expected(sample)]


def test_every_format_has_a_sample():
    # DeepSpeed's own lines have no loss, and are read only when asked for.
    without = {"deepspeed", "mmengine-iter"}
    binary = {"tensorboard", "wandb", "trainer-state"}
    assert {sample["format"] for sample in SAMPLES} == set(FORMATS) - without - binary


def test_a_format_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match=r"--format gpt2: unknown format; the formats are csv"):
        LogFormat("gpt2")


def test_steps_that_are_counted_again_in_each_epoch_go_on():
    lines = [
        f"Epoch [{epoch}/3], Step [{step}/40], Loss: {4 - (epoch * 40 + step) / 100:.4f}"
        for epoch in (1, 2, 3)
        for step in range(10, 41, 10)
    ]
    assert [row.step for row in rows("\n".join(lines))] == list(range(10, 121, 10))
    # Where the step is that of the run, it stays so.
    lines = [f"epoch {step // 40} step {step} loss {4 - step / 100:.4f}" for step in range(1, 121)]
    assert [row.step for row in rows("\n".join(lines))] == list(range(1, 121))
    # Where they begin at 0, the first of an epoch follows the last row of the epoch before.
    lines = [
        f"DEBUG TRAIN Batch {epoch}/{batch} loss 4.1{batch} rank 0"
        for epoch in (1, 2, 3)
        for batch in range(0, 400, 100)
    ]
    assert [row.step for row in rows("\n".join(lines))] == list(range(0, 1200, 100))


def test_an_epoch_that_is_begun_again_has_the_steps_that_it_had():
    begun = [(1, 20), (1, 40), (2, 20), (2, 30), (2, 20), (2, 40), (3, 20)]
    lines = [f"Epoch {epoch}, step {step}/40, loss 2.3{step}" for epoch, step in begun]
    assert [row.step for row in rows("\n".join(lines))] == [20, 40, 60, 70, 60, 80, 100]


def test_a_bar_that_is_drawn_again_is_one_row_and_the_next_bar_goes_on():
    bars = [(n, 4, loss) for n, loss in ((1, 5.1), (1, 5.0), (2, 4.9), (3, 4.8), (4, 4.7))]
    bars += [(1, 4, 4.6), (2, 4, 4.5), (2, 4, 4.4)]
    text = "".join(
        f"\rTraining: 25%|██| {n}/{of} [00:01<00:03, 1.2it/s, loss={x}]" for n, of, x in bars
    )
    assert [(row.step, row.loss.value) for row in rows(text + "\n")] == [
        (1, 5.0), (2, 4.9), (3, 4.8), (4, 4.7), (5, 4.6), (6, 4.4),
    ]  # fmt: skip


BLOCKS = {
    "nemo-rl": "12",
    "composer": "3140",
}


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("between", ["", "\n", "Saved a checkpoint\n"])
def test_each_of_several_blocks_is_a_row(form, between):
    (sample,) = (sample for sample in SAMPLES if sample["format"] == form)
    text = "\n".join(sample["lines"]) + "\n"
    texts = [text.replace(BLOCKS[form], str(step)) for step in (7001, 7002, 7003)]
    found = rows(between.join(texts))
    assert [row.step for row in found] == [7001, 7002, 7003]
    assert all(row.has_loss for row in found)


@pytest.mark.parametrize("every", [1, 4])
def test_a_dictionary_that_is_written_twice_around_a_late_bar_is_one_row(every):
    """tqdm draws a bar every 0.1 s at most, and again after it has written a line."""
    text = ""
    for step in range(1, 21):
        if step % 5 == 0:
            loss = f"{{'loss': 1.4{step}, 'epoch': 0.{step}}}"
            text += f"[INFO|2026-11-20 22:55:57] llamafactory.train.callbacks:143 >> {loss}\n"
            text += f"\r{' ' * 60}\r{loss}\n\r  1%|▏| {step}/600 [00:26<25:00,  5.09s/it]"
        elif step % every == 0:
            text += f"\r  1%|▏| {step}/600 [00:26<25:00,  5.09s/it]"
    found = [(row.step, row.loss.value) for row in rows(text + "\n")]
    assert found == [(5, 1.45), (10, 1.41), (15, 1.415), (20, 1.42)]


@pytest.mark.parametrize("n_dictionaries", [1, 2])
def test_a_dictionary_that_a_logger_writes_behind_a_bar_has_the_step_of_that_bar(n_dictionaries):
    """LLaMA-Factory logs the loss itself, and the trainer writes it once more."""
    text = ""
    for step in range(1, 21):
        text += f"\r  1%|▏| {step}/600 [00:26<25:00,  5.09s/it]"
        if step % 5 == 0:
            loss = f"{{'loss': 1.4{step}, 'epoch': 0.{step}}}"
            text += f"[INFO|2026-11-20 22:55:57] llamafactory.train.callbacks:143 >> {loss}\n"
            if n_dictionaries == 2:
                text += f"\r{' ' * 60}\r{loss}\n\r  1%|▏| {step}/600 [00:26<25:00,  5.09s/it]"
    found = [(row.step, row.loss.value) for row in rows(text + "\n")]
    assert found == [(5, 1.45), (10, 1.41), (15, 1.415), (20, 1.42)]


def bars(steps):
    return "".join(f"\r  1%|▏| {step}/600 [00:26<25:00,  5.09s/it]" for step in steps)


def test_dictionaries_that_a_buffer_held_back_have_no_step():
    """Standard output of a pipe is written in blocks, and the bars on standard error at once."""
    held = "".join(f"{{'loss': 1.4{step}, 'epoch': 0.{step}}}\n" for step in range(5, 30, 5))
    text = bars(range(1, 301)) + held + bars(range(301, 600)) + held
    assert rows(text + "\n") == []


def test_a_second_dictionary_of_a_step_leaves_the_first_its_bar():
    text = ""
    for step in (5, 10, 15):
        text += bars(range(step - 4, step + 1))
        text += f"\n{{'loss': 1.4{step}, 'epoch': 0.1}}\n{{'loss': 1.4{step}, 'mfu': 0.4}}\n"
    assert {5, 10, 15} <= {row.step for row in rows(text)}


def test_a_bar_may_have_a_tag_behind_its_epoch():
    text = "".join(
        f"\rEpoch {epoch} [FAST]:  39%|▍| {batch}/30 [01:39<02:31, 4.95it/s, loss=0.{batch}]"
        for epoch, n in ((7, 12), (8, 30))
        for batch in range(1, n + 1)
    )
    assert [row.step for row in rows(text + "\n")][-1] == 60


FORMS_BY_EPOCH = (
    "Epoch: {epoch} Step: {batch}/500 loss: {loss:.4f}",
    "epoch {epoch} step {batch} loss {loss:.4f}",
    "Epoch [{epoch}/5], Step [{batch}/500], Loss: {loss:.4f}",
    "(trainer:762) INFO: {epoch}epoch:train:{first}-{batch}batch: acc=0.6, loss={loss:.4f}",
)


@pytest.mark.parametrize("form", FORMS_BY_EPOCH)
def test_the_epochs_of_a_log_go_on_from_those_of_the_log_before(form, tmp_path):
    """The job ended in epoch 4, and resumed from the checkpoint after epoch 2."""
    random = Random(7)
    noise = {step: random.gauss(0, 0.03) for step in range(10, 2500, 10)}
    for name, first, last in (("1.log", 10, 1600), ("2.log", 1010, 2000)):
        lines = (
            form.format(
                epoch=(step - 1) // 500 + 1,
                batch=(step - 1) % 500 + 1,
                first=(step - 1) % 500 - 8,
                loss=2 + 4 * exp(-step / 600) + noise[step],
            )
            for step in range(first, last + 1, 10)
        )
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    report = check_loss([str(tmp_path / "1.log"), str(tmp_path / "2.log")])
    assert report.assessments[0].replay.is_proof
    assert report.assessments[0].resume.first_step == 1010


HEADINGS = (
    "Epoch {epoch}/5",
    "Epoch: {epoch}",
    "Epoch [{epoch}/5]",
    "===== Epoch {epoch} =====",
    "Starting epoch {epoch}",
    "2026-11-20 03:12:44,201 - INFO - some.trainer - Epoch {epoch}/5",
    "INFO:root:epoch {epoch}:",
    "--> Training epoch {epoch} of 5",
)


@pytest.mark.parametrize("heading", HEADINGS)
@pytest.mark.parametrize("line", ["Batch {}/50: loss: {:.4f}", "[{}/50] loss={:.4f}"])
def test_an_epoch_that_a_line_above_names_has_the_steps_below_it(heading, line, tmp_path):
    """The job ended in epoch 4, and resumed from the checkpoint after epoch 2."""
    random = Random(7)
    noise = {step: random.gauss(0, 0.03) for step in range(1, 251)}
    for name, first, last in (("1.log", 1, 170), ("2.log", 101, 200)):
        lines = []
        for step in range(first, last + 1):
            epoch, batch = (step - 1) // 50 + 1, (step - 1) % 50 + 1
            lines += [heading.format(epoch=epoch)] if batch == 1 else []
            lines.append(line.format(batch, 2 + 4 * exp(-step / 60) + noise[step]))
            lines += [f"Saving checkpoint, epoch {epoch}"] if batch == 50 else []
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    report = check_loss([str(tmp_path / "1.log"), str(tmp_path / "2.log")])
    assert report.verdict.value == "continuous"
    assert report.assessments[0].resume.first_step == 101


def test_an_epoch_that_is_named_below_its_steps_is_no_epoch_of_the_next_ones():
    lines = [
        line
        for epoch in (1, 2, 3)
        for line in (
            *(f"batch {n}/4 loss {3 - epoch / 9:.4f}" for n in range(1, 5)),
            f"Epoch {epoch}",
        )
    ]
    assert [row.step for row in rows("\n".join(lines) + "\n")] == [*range(1, 13)]


def test_a_log_that_continues_another_changes_no_steps_of_it():
    """`--follow` reads both while they grow; the second job has twice the ranks."""
    first, second = Rounds(), Rounds()
    second.follow(first)
    assert [first.step(step, 40, epoch) for epoch in (1, 2) for step in (20, 40)] == [
        20,
        40,
        60,
        80,
    ]
    assert [second.step(20, 20, epoch) for epoch in (2, 3)] == [60, 80]
    assert first.step(20, 40, 3) == 100


BESIDE_TRAINING = (
    "[dev] step {}: loss {:.5f}",
    "step {} | val loss {:.5f}",
    "Validate: [0][{}/3000]  Loss: {:.5f}",
    "\rEvaluating:  10%|█ | {}/3000 [00:10<10:00, 1.0it/s, loss={:.4f}]",
    "\rValidation DataLoader 0:  10%|█ | {}/3000 [00:10<10:00, 1.0it/s, loss={:.4f}]",
    # A mean since the epoch or the process began follows a resume only slowly.
    "\rsteps:  10%|█ | {}/3000 [00:10<10:00, 1.0it/s, avr_loss={:.4f}]",
    "Validation epoch {}: loss {:.5f}",
    "Epoch {} validation loss: {:.5f}",
    "Epoch {}\nvalidation loss: {:.5f}",
)


@pytest.mark.parametrize("form", BESIDE_TRAINING)
def test_what_is_measured_beside_the_training_is_not_its_loss(form):
    lines = (form.format(step, 2 + step / 1000) for step in range(10, 400, 10))
    assert not any(row.has_loss for row in rows("\n".join(lines) + "\n"))


@pytest.mark.parametrize("head", ["Epoch [1/3]", "Epoch 1/3", "Epoch 1", "Training"])
def test_the_epoch_before_a_bar_is_not_its_step(head):
    bars = (f"\r{head}:  1%|▏ | {n}/500 [00:01<10:00, 1.2it/s, Loss=2.1{n}]" for n in range(1, 9))
    assert [row.step for row in rows("".join(bars) + "\n")] == [*range(1, 9)]


@pytest.mark.parametrize(
    "line",
    [
        "global_step: 7 train_loss: 2.5000",
        "step     7/10000 | train loss 2.500000 | norm 0.1234 | lr 1.00e-04 | (12.34 ms)",
        "Step 7, Train Loss: 2.5000, Val Loss: 2.6000",
        "Step 7, Val Loss: 2.6000, Train Loss: 2.5000",
        "it 7/1000 loss 2.5000",
        "batch 7 loss 2.5000",
        "steps: 7/9 avg_loss: 2.5000",
        "step 7 loss tensor(2.5000, device='cuda:0', grad_fn=<NllLossBackward0>)",
        "iter: 7, lr: 0.000033, 'loss': '2.500000', eta: 5:10:47, batch_cost: 0.5 sec",
        "train | inner iter: 1/ 8 | global iter:  7/  5000| tot_loss: 2.5000 | pg_loss: -0.0428",
    ],
)
def test_a_loop_of_ones_own_is_read_however_it_is_put(line):
    (row,) = rows(line + "\n")
    assert (row.step, row.loss.value) == (7, 2.5)


def test_a_batch_is_a_step_although_the_epoch_has_a_row_of_its_own():
    lines = [
        line
        for epoch in (1, 2)
        for line in (
            *(f"epoch {epoch} batch {n}/4 loss {3 - epoch / 9:.4f}" for n in (1, 2, 3, 4)),
            f"Epoch {epoch} train loss: 2.5000",
        )
    ]
    assert [row.step for row in rows("\n".join(lines) + "\n")] == [*range(1, 9)]


def test_a_log_that_is_not_read_is_answered_with_its_first_mention_of_a_loss(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("starting\nsteps: 7/90 avr_loss=0.0725\n")
    assert "line 2: steps: 7/90 avr_loss=0.0725" in check_loss([str(log)]).message


@pytest.mark.parametrize(
    "line",
    [
        "| epoch 1 | 5/ 2983 batches | ms/batch 12.34 | loss 2.5",
        "Step 7, Val Loss: 2.6000",
        "INFO 2025-07-11 10:00:00 train.py:232 step:20K smpl:160K loss:0.512 lr:1.0e-05",  # LeRobot
    ],
)
def test_a_number_that_is_no_step_and_a_loss_of_validation_make_no_row(line):
    assert rows(line + "\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "Loaded checkpoint ckpt/step_300.pt",
        "Loading checkpoint from ckpt/step_300.pt",
        "=> loaded checkpoint 'ckpt/step_300.pt' (epoch 3)",
        "Checkpoint loaded from ckpt/step_300.pt",
        "Checkpoint loaded successfully (step 300)",
        "Restored checkpoint from ckpt, step=300",
        "Restoring from checkpoint /data/checkpoint-300",
        "Resuming from checkpoint ckpt/step_300.pt",
        "INFO: resume from ckpt/step_300.pt",
        "Continuing from step 300",
        "Starting from step 300",
        "Restarting training at step 300",
        "Loaded model and optimizer state from ckpt/step_300.pt",
    ],
)
def test_common_lines_about_a_loaded_checkpoint_are_markers(line):
    assert any(hint in line.encode() for hint in HINTS)
    marker = read_marker(line, LogPosition("a", 1))
    assert marker is not None
    assert (marker.step, marker.fresh) == (300, False)


@pytest.mark.parametrize(
    "line",
    [
        "Saved checkpoint ckpt/step_300.pt",
        "Checkpoint stored at ckpt/step_300",
        "Starting checkpoint save at step 300",
        "Starting evaluation at step 300",
        "you can resume from step_300.pt",
        "failed to load checkpoint ckpt/step_300.pt",
        "Loaded checkpoint for the teacher",
        "step 300 | continue | loss 2.3",
    ],
)
def test_lines_about_saves_and_advice_are_no_markers(line):
    assert read_marker(line, LogPosition("a", 1)) is None


def test_a_time_of_the_day_before_a_line_is_its_clock():
    found = rows("".join(f"[12:03:{n}] step {n} loss 2.3{n}\n" for n in range(10, 40)))
    assert [row.at for row in found[:3]] == [43390.0, 43391.0, 43392.0]


def test_a_number_before_its_unit_is_the_throughput():
    found = rows("".join(f"step {n} | loss 2.3{n} | 8,9{n} tok/s\n" for n in range(10, 40)))
    assert [row.throughput.value for row in found[:2]] == [8910, 8911]


def test_the_learning_rate_with_a_colon_behind_an_iteration():
    found = rows("".join(f"iter {n}: loss 2.3{n}, lr: 0.0030{n}\n" for n in range(10, 40)))
    assert [row.lr.value for row in found[:2]] == [0.00301, 0.003011]
