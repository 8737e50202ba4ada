"""Ranks, wrapped lines, bars and markers: each step is read once, each start is found."""

from __future__ import annotations

import math

import pytest
from test_reading_logs import megatron, nanogpt, read, steps

from ckptctl.logs.reading import read_logs
from ckptctl.logs.rows import Marker, Row
from ckptctl.logs.text_logs import _MAX_READERS
from ckptctl.loss.checking import check_rows

TITAN = (
    "[titan] 2025-09-11 17:33:{second:02},601 - root - INFO - step: {step:2}  loss:  {loss:.4f}"
    "  grad_norm:  2.2490  memory:  1.07GiB(1.13%)  tps: 399,989  tflops: 28.61  mfu: 2.89%"
)


def titan(step: int, loss: float = 5.0) -> str:
    return TITAN.format(step=step, loss=loss + step / 16, second=step % 60)


def test_of_several_ranks_the_first_is_read():
    lines = [f"[rank{rank}]:{titan(step, loss=rank)}" for step in range(1, 9) for rank in (2, 0, 1)]
    found = read("\n".join(lines))
    assert steps(found) == list(range(1, 9))
    assert [row.loss.value for row in found] == [2 + step / 16 for step in range(1, 9)]


def test_a_rank_that_lags_behind_adds_nothing():
    lines = []
    for step in range(1, 20):
        lines.append(f"[rank0]:{titan(step)}")
        if step > 5:
            lines.append(f"[rank1]:{titan(step - 5)}")
    assert steps(read("\n".join(lines))) == list(range(1, 20))


def test_another_rank_is_read_once_the_first_is_silent():
    lines = [f"31: {titan(step)}" for step in range(1, 11)]
    lines += [f"15: {titan(step)}" for step in range(6, 16)]
    assert steps(read("\n".join(lines))) == [*range(1, 11), *range(6, 16)]


def test_ranks_without_a_prefix_are_read_once():
    lines = [titan(step, loss=rank) for step in range(1, 9) for rank in range(4)]
    found = read("\n".join(lines))
    assert steps(found) == list(range(1, 9))
    assert [row.loss.value for row in found] == [step / 16 for step in range(1, 9)]


def test_a_step_that_is_there_twice_in_the_middle_is_a_resume():
    lines = [titan(step) for step in (1, 2, 3, 4, 4, 5, 6)]
    assert steps(read("\n".join(lines))) == [1, 2, 3, 4, 4, 5, 6]


def test_a_marker_of_every_rank_is_one_marker():
    lines = [f"[rank{rank}]:{titan(step)}" for step in range(1, 9) for rank in (0, 1)]
    lines += [f"[rank{rank}]:[titan] Loading the checkpoint at step 5" for rank in (0, 1)]
    lines += [f"[rank{rank}]:{titan(step)}" for step in range(6, 9) for rank in (1, 0)]
    found = read("\n".join(lines))
    assert [item.step for item in found if isinstance(item, Marker)] == [5]
    assert steps(found) == [*range(1, 9), 6, 7, 8]


@pytest.mark.parametrize("width", [60, 80, 100, 132])
def test_a_line_that_a_terminal_wrapped_is_put_together(width):
    whole = [row for row in read(megatron(range(1, 30))) if isinstance(row, Row)]
    lines = [
        line[at : at + width]
        for line in megatron(range(1, 30)).splitlines()
        for at in range(0, len(line), width)
    ]
    for prefix in ("", "[default7]:"):
        marked = [prefix * line.startswith(" [2025") + line for line in lines]
        found = read("\n".join(marked) + "\n")
        assert [(row.step, row.loss, row.grad_norm, row.lr) for row in found] == [
            (row.step, row.loss, row.grad_norm, row.lr) for row in whole
        ]


def test_a_wrapped_line_whose_end_is_missing_is_taken_as_far_as_it_goes():
    first, second, third = megatron(range(1, 4)).splitlines()
    cut = second[: second.index("| loss scale") + 2]
    found = read("\n".join((first, cut, third)))
    assert steps(found) == [1, 2, 3]
    assert found[1].loss.value == pytest.approx(11 - 2 / 9)
    assert found[1].grad_norm is None


@pytest.mark.parametrize(
    "spelling", ["nan", "NaN", "-nan", "NAN", "nan(ind)", "-nan(ind)", "1.#QNAN", "-1.#IND"]
)
def test_nan_is_nan_however_it_is_spelled(spelling):
    text = nanogpt(range(3)).replace("loss 3.9899", f"loss {spelling}")
    losses = [row.loss.value for row in read(text)]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]


@pytest.mark.parametrize("spelling", ["inf", "Infinity", "+inf", "1.#INF", "INF"])
def test_infinity_is_infinite_however_it_is_spelled(spelling):
    text = nanogpt(range(3)).replace("loss 3.9899", f"loss {spelling}")
    assert [row.loss.value for row in read(text)][1] == math.inf


@pytest.mark.parametrize("spelling", ["NaN", "Infinity", "-Infinity", '"nan"'])
def test_json_that_is_not_finite_is_read(spelling):
    found = read(f'{{"step": 1, "loss": {spelling}}}\n{{"step": 2, "loss": 2.5}}\n')
    assert not math.isfinite(found[0].loss.value)
    assert steps(found) == [1, 2]


@pytest.mark.parametrize("value", ["inf", "-Infinity", "nan", "1e999"])
def test_a_count_or_a_time_that_is_not_finite_is_no_value(value):
    (row,) = read(
        f"step 7 | loss 2.5 | grad_norm {value} | tokens {value} | step_time_ms {value}\n"
    )
    assert (row.tokens, row.step_time_s) == (None, None)
    assert not math.isfinite(row.grad_norm.value)
    counted = [f"step {n} loss 2.5 tokens {value if n == 4 else 1e6 * n}\n" for n in range(2, 7)]
    report = check_rows([*read("".join(counted)), *read("step 5 loss 2.5\nstep 6 loss 2.5\n")])
    assert report.recomputed.tokens is None


def test_a_row_of_skipped_steps_has_no_loss():
    text = megatron(range(1, 4)).splitlines()
    text[1] = text[1].replace(" lm loss: 1.077778E+01 |", "")
    found = read("\n".join(text))
    assert [row.loss is None for row in found] == [False, True, False]


def test_the_second_row_of_megatron_is_read_as_a_mean_of_one_step_more():
    marker = " successfully loaded checkpoint from /c [ t 1/1, p 1/1 ] at iteration 5\n"
    found = read(megatron(range(1, 9)) + marker + megatron(range(6, 10)))
    rows = [row for row in found if isinstance(row, Row)]
    assert [row.interval for row in rows] == [1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1]
    tens = megatron(range(1, 2)) + megatron(range(10, 60, 10))
    assert [row.interval for row in read(tens)] == [1, 10, 10, 10, 10, 10]


def bar(step: int, total: int = 165) -> str:
    return f"\r {100 * step // total}%|##   | {step}/{total} [00:10<00:20,  2.5s/it]"


def entry(loss: float) -> str:
    return f"\r           \r{{'loss': {loss}, 'learning_rate': 1e-05, 'epoch': 0.5}}\n"


def test_a_dictionary_has_the_step_of_the_bar_that_is_drawn_behind_it():
    text = "".join(bar(step - 1) + entry(1.25) + bar(step) for step in range(1, 9))
    assert steps(read(text)) == list(range(1, 9))


def test_the_bar_of_an_evaluation_names_no_step():
    text = bar(0)
    for step in (10, 20, 30):
        text += bar(step) + entry(1.25) + bar(step)
        text += "".join(bar(n, 4) for n in range(5)) + "\r{'eval_loss': 1.5, 'epoch': 1.0}\n"
    assert steps(read(text)) == [10, 20, 30]


def test_the_last_dictionary_of_a_run_that_died_has_the_step_of_the_bar_before_it():
    text = bar(10) + entry(1.25) + bar(10) + bar(20) + entry(1.5)
    assert steps(read(text)) == [10, 20]


@pytest.mark.parametrize(
    ("line", "step", "fresh"),
    [
        ("successfully loaded checkpoint from /c [ t 1/1, p 1/1 ] at iteration 500", 500, False),
        ("[titan] 2025 - root - INFO - Loading the checkpoint at step 25", 25, False),
        ("[titan] 2025 - root - INFO - Training starts at step 26", 25, False),
        ("[titan] 2025 - root - INFO - Training starts at step 1", None, True),
        ("No checkpoint was provided, this is a fresh start.", None, True),
        ("Loaded checkpoint /c/checkpoint_last.pt (epoch 143 @ 40015 updates)", 40015, False),
        ("Loaded checkpoint /c/checkpoint_last.pt (epoch 1 @ 0 updates)", None, True),
        ("Restored all states from the checkpoint at /c/step=1200.ckpt", 1200, False),
        ("Restored all states from the checkpoint at /c/last.ckpt", None, False),
        ("mmdet - INFO - resumed epoch: 12, iter: 76800", 76800, False),
        ("Starting training from iteration 40", 39, False),
        ("Starting training from iteration 0", None, True),
        ("  Continuing training from global step 50", 50, False),
        ("Resuming training from out-owt", None, False),
        ("Resuming training from step 1200", 1200, False),
        ("[rank 0] INFO     Starting training: step=0, max_steps=30", None, True),
        ("No checkpoint found in save folder ('a'), will train from scratch...", None, True),
        ("Loading checkpoint from 'work/olmo/step20'...", 20, False),
    ],
)
def test_a_line_that_says_where_a_process_begins_is_a_marker(line, step, fresh):
    found = read(nanogpt(range(3)) + line + "\n" + nanogpt(range(2, 4)))
    (marker,) = [item for item in found if isinstance(item, Marker)]
    assert (marker.step, marker.fresh, marker.position.line) == (step, fresh, 4)
    assert steps(found) == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "saving checkpoint at iteration 500 to /c",
        "Checkpointing active. Checkpoints will be loaded from and saved to /c",
        "checkpoint at step 500 was deleted",
    ],
)
def test_a_line_about_a_checkpoint_is_not_yet_a_marker(line):
    found = read(nanogpt(range(3)) + line + "\n")
    assert not [item for item in found if isinstance(item, Marker)]


def test_lines_of_a_training_loop_of_ones_own_wait_for_a_better_format():
    text = "step 1 loss 9.0\n" * 3 + megatron(range(1, 4))
    assert [row.loss.value for row in read(text)] == pytest.approx([11 - s / 9 for s in (1, 2, 3)])
    text = "".join(f"[{n}] step {n} | train loss: {9 - n}.50 lr: 1e-4\n" for n in range(1, 4))
    assert [(row.step, row.loss.value) for row in read(text)] == [(1, 8.5), (2, 7.5), (3, 6.5)]


def test_few_rows_of_ones_own_stand_before_the_marker_that_follows_them():
    rows = "".join(f"step {n} loss {9 - n}.50\n" for n in range(1, 4))
    found = read(rows + "Resuming training from step 2\n" + rows)
    assert [isinstance(item, Marker) for item in found] == [False] * 3 + [True] + [False] * 3


def test_numbered_lines_are_no_ranks_that_need_memory():
    text = "".join(
        f"{n}: step {n} of nothing, {{ [step= 'loss': %| -\n" for n in range(_MAX_READERS + 500)
    )
    assert steps(read(text + megatron(range(1, 4)))) == [1, 2, 3]


def test_validation_losses_are_no_rows():
    text = nanogpt(range(2)) + "step 2: train loss 4.0390, val loss 4.0427\n" + nanogpt(range(2, 4))
    assert [row.loss.value for row in read(text)] == pytest.approx([4, 3.9899, 3.9798, 3.9697])
    titan_lines = [titan(1), titan(2), titan(2, loss=9.0).replace("step:", "validate step:")]
    assert steps(read("\n".join([*titan_lines, titan(3)]))) == [1, 2, 3]


def test_the_same_rank_is_read_after_a_restart_and_in_the_next_log(tmp_path):
    def printed(steps, order):
        return [f"[rank{rank}]:{titan(step, loss=rank)}" for step in steps for rank in order]

    marker = "[rank2]:[titan] Loading the checkpoint at step 5"
    one = [*printed(range(1, 9), (0, 1, 2)), marker, *printed(range(6, 12), (2, 1, 0))]
    found = [row for row in read("\n".join(one)) if isinstance(row, Row)]
    assert [row.loss.value - row.step / 16 for row in found] == [0] * len(found)
    (tmp_path / "a.log").write_text("\n".join(printed(range(1, 9), (0, 1, 2))))
    (tmp_path / "b.log").write_text("\n".join(printed(range(6, 12), (2, 1, 0))))
    logs = [str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    found = [row for row in read_logs(logs) if isinstance(row, Row)]
    assert [row.loss.value - row.step / 16 for row in found] == [0] * len(found)


def test_a_rotated_log_is_read_from_its_oldest_file(tmp_path):
    for name, first in (("t.log", 7), ("t.log.1", 4), ("t.log.2", 1)):
        lines = [f"step {step} loss 2.{step}" for step in range(first, first + 3)]
        (tmp_path / name).write_text("\n".join(lines))
    logs = [str(tmp_path / name) for name in ("t.log", "t.log.1", "t.log.2")]
    assert [row.step for row in read_logs(logs)] == list(range(1, 10))
