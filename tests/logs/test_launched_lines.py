"""Lines of several ranks or hosts in one log: only the rows of one of them are compared."""

from __future__ import annotations

import json
import math
import os
import random

import pytest

import ckptctl
from ckptctl.logs.log_lines import Launched, split_launcher, take_apart
from ckptctl.logs.reading import read_logs
from ckptctl.logs.rows import Row

LAUNCHERS = {
    "srun --label": lambda rank: f"{rank}: {{}}",
    "torchrun": lambda rank: f"[default{rank}]:{{}}",
    "pdsh": lambda rank: f"node{rank:02}: {{}}",
    "pdsh with a name that ends in letters": lambda rank: f"gpu-{rank}.cluster.local: {{}}",
    "DeepSpeed with addresses": lambda rank: f"10.0.0.{rank + 1}: {{}}",
    "docker compose": lambda rank: f"trainer-{rank + 1}  | {{}}",
    "kubectl logs --prefix": lambda rank: f"[pod/train-{rank}/pytorch] {{}}",
    "Ray": lambda rank: f"(RayTrainWorker pid={100 + rank}, ip=10.0.0.{rank + 1}) {{}}",
    "Ray on one node": lambda rank: f"(RayTrainWorker pid={100 + rank}) {{}}",
    "pdsh around ranks": lambda rank: f"node{rank // 2}: [rank{rank}]: {{}}",
}
RECORDS = {
    "rank": lambda rank: {"rank": rank},
    "global_rank": lambda rank: {"global_rank": rank, "local_rank": 0},
    "host": lambda rank: {"host": f"node{rank}"},
    "hostname and local rank": lambda rank: {"hostname": "node7", "local_rank": rank},
}


def losses_of_ranks(write):
    """Lines of two ranks with losses of their own, in another order at each step, resumed once."""
    draw = random.Random(3)
    for steps in (range(1, 113), range(101, 161)):
        for step in steps:
            loss = 2 + 3 / math.sqrt(step) + 0.05 * math.sin(37 * step)
            ranks = [0, 1] if draw.random() < 0.5 else [1, 0]
            for rank in ranks:
                yield write(rank, step, loss + 0.01 * rank * math.sin(step))


def assert_one_rank_is_compared(log, lines):
    log.write_text("\n".join(lines) + "\n")
    report = ckptctl.check_loss([str(log)], resume_step=100)
    assert (report.verdict.value, report.n_rows) == ("continuous", 172), report.message


@pytest.mark.parametrize("name", LAUNCHERS)
def test_lines_of_each_launcher_are_divided_by_rank(name, tmp_path):
    prefix = LAUNCHERS[name]
    lines = losses_of_ranks(
        lambda rank, step, loss: prefix(rank).format(f"step {step} loss {loss:.6f} lr 3.0e-04")
    )
    assert_one_rank_is_compared(tmp_path / "train.log", lines)


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_divided_by_their_rank_and_host(name, tmp_path):
    source = RECORDS[name]
    lines = losses_of_ranks(
        lambda rank, step, loss: json.dumps({**source(rank), "step": step, "loss": round(loss, 6)})
    )
    assert_one_rank_is_compared(tmp_path / "train.jsonl", lines)


def test_after_a_restart_on_other_nodes_the_same_rank_is_compared(tmp_path):
    lines = losses_of_ranks(
        lambda rank, step, loss: f"[rank{rank}]: step {step} loss {loss:.6f} lr 3.0e-04"
    )
    moved = [f"node{n // 224}{line[5]}: {line}" for n, line in enumerate(lines)]
    assert_one_rank_is_compared(tmp_path / "train.log", moved)


@pytest.mark.parametrize(
    ("text", "launched"),
    [
        ("node017: [rank3]: text", Launched(18, None, "node017", 3)),
        ("trainer-1  | text", Launched(13, None, "trainer-1")),
        ("(Worker pid=712, ip=10.0.0.2) text", Launched(30, None, "10.0.0.2", None, 712)),
        ('{"rank": 3, "host": "n7", "loss": 2.0}', Launched(0, None, "n7", 3)),
        ("step100: loss 2.31", Launched(0)),
        ("epoch3: loss 2.31", Launched(0)),
        ("train: loss 2.31", Launched(0)),
        ("2026-11-20 03:12:44 text", Launched(0)),
        ('{"rank_loss": 3.5, "loss": 2.0}', Launched(0)),
    ],
)
def test_the_prefix_of_a_line_names_its_host_and_its_rank(text, launched):
    assert split_launcher(text) == launched


@pytest.mark.parametrize(
    "prefix",
    [
        "Nov 20 03:12:44 node017-a train[123]: ",
        "<14>Nov 20 03:12:44 node017-a train[123]: ",
        "<30>1 2026-11-20T03:12:44.003Z node017-a train 8710 - - ",
        "2026-11-20T03:12:44.201934+00:00 node017-a train[99]: ",
        "node017-a pytorch ",
    ],
)
@pytest.mark.parametrize(
    "text", ["KeyError: 'lr'", '  File "/job/train.py", line 3, in main', "    x = config[key]"]
)
def test_syslog_and_stern_name_the_host_before_a_traceback(prefix, text):
    line = take_apart(prefix + text)
    assert (line.host, line.message) == ("node017-a", text)


@pytest.mark.parametrize("text", ["python3[123]: segfault at 0 ip 7", "slurmd[123]: error: text"])
def test_the_tag_of_what_the_kernel_or_a_scheduler_reports_stays(text):
    assert take_apart(f"Nov 20 03:12:44 node017 {text}").message == text


def test_what_ray_reports_of_any_rank_is_no_row(tmp_path):
    log = tmp_path / "train.log"
    lines = []
    for step in range(1, 9):
        lines.append(f"(RayTrainWorker pid=28177) step: {step}, loss: {3 / step:.6f}")
        if step in (3, 5, 6):  # Ray leaves out most of them
            lines.append(
                f"(RayTrainWorker pid=2822{step % 2}) Reporting training result {step - 1}: "
                f"TrainingReport(checkpoint=None, metrics={{'loss': 0.08332, 'lr': 0.01, "
                f"'step': {step - 1}}}, validation=False) from rank 1 [repeated 6x across cluster]"
            )
    log.write_text("\n".join(lines))
    assert [row.step for row in read_logs([str(log)]) if isinstance(row, Row)] == [*range(1, 9)]


@pytest.mark.parametrize("front", ["", "logs=", "metrics=", "step done: metrics="])
def test_a_dictionary_behind_a_name_is_a_row(tmp_path, front):
    rows = [f"{front}{{'loss': {3 - step / 10}, 'lr': 0.01, 'step': {step}}}" for step in (1, 2, 3)]
    (tmp_path / "train.log").write_text("\n".join(rows))
    assert [row.step for row in rows_of(tmp_path / "train.log")] == [1, 2, 3]


def test_the_process_of_ray_is_no_rank():
    line = take_apart("(RayTrainWorker pid=712, ip=10.0.0.2) CUDA out of memory")
    assert (line.host, line.rank, line.message) == ("10.0.0.2", None, "CUDA out of memory")


def rows_of(log):
    return [row for row in read_logs([str(log)]) if isinstance(row, Row)]


@pytest.mark.parametrize(
    "line",
    [
        "step {} loss 2,9530 lr 0,0003",
        "step {}: loss 2,953, lr 0,0003",
        "step={} loss=2,95 lr=3e-4",
    ],
)
def test_a_comma_can_be_that_of_the_decimals(line, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(line.format(step) + "\n" for step in range(1, 20)))
    row = rows_of(log)[0]
    assert abs(row.loss.value - 2.953) < 0.01
    assert row.lr.value == 3e-4


def test_a_comma_groups_thousands_of_tokens(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {step} loss 2.95 tokens 12,288\n" for step in range(1, 20)))
    assert rows_of(log)[0].tokens.value == 12_288


@pytest.mark.parametrize(
    "evaluation",
    [
        "step {}: train loss 2.5000, val loss 2.6000",
        "held-out step {} loss 3.1",
        "dev step {} loss 3.1",
        '{{"type": "eval", "step": {}, "loss": 3.1}}',
        '{{"event": "validation", "step": {}, "loss": 3.1}}',
        '{{"prefix": "valid", "step": {}, "loss": 3.1}}',
    ],
)
def test_an_evaluation_before_the_row_of_its_step_is_no_row(evaluation, tmp_path):
    log = tmp_path / "train.log"
    record = evaluation.startswith("{{")
    train = '{{"step": {}, "loss": 2.25}}' if record else "step {} loss 2.25 lr 3e-4"
    lines = [
        form.format(step)
        for step in range(1, 40)
        for form in ((evaluation, train) if step % 10 == 0 else (train,))
    ]
    log.write_text("\n".join(lines) + "\n")
    rows = rows_of(log)
    assert [row.step for row in rows] == [*range(1, 40)]
    assert {row.loss.value for row in rows} == {2.25}


def test_null_losses_after_a_resume_are_named(tmp_path):
    log = tmp_path / "train.jsonl"
    rows = [{"step": step, "loss": 2 + 1 / step} for step in range(1, 60)]
    rows += [{"step": step, "loss": None, "lr": 3e-4} for step in range(50, 80)]
    log.write_text("\n".join(map(json.dumps, rows)) + "\n")
    report = ckptctl.check_loss([str(log)], resume_step=49)
    assert report.message.startswith("30 rows after step 49 have no loss (`null` is how orjson and")


def attempt(path, first, last, changed_s):
    steps = range(first, last + 1)
    path.write_text("".join(f"step {n} loss {2 + 3 / n + n % 7 / 50:.6f}\n" for n in steps))
    os.utime(path, (changed_s, changed_s))


def test_logs_of_a_folder_without_clocks_are_read_in_the_order_of_their_last_change(tmp_path):
    attempt(tmp_path / "zeta.log", 1, 60, 1_700_000_000)
    attempt(tmp_path / "alpha.log", 51, 120, 1_700_009_000)
    report = ckptctl.check_loss([str(tmp_path)])
    assert report.verdict.value == "continuous"
    assert report.order == (
        f"logs in the order of their last change: {tmp_path}/zeta.log, {tmp_path}/alpha.log"
    )


def test_logs_of_a_folder_without_clocks_are_read_in_the_order_of_their_numbers(tmp_path):
    attempt(tmp_path / "attempt_10.log", 51, 120, 1_700_000_000)
    attempt(tmp_path / "attempt_2.log", 1, 60, 1_700_009_000)
    report = ckptctl.check_loss([str(tmp_path)])
    assert report.verdict.value == "continuous"
    assert report.order.startswith("logs in the order of the numbers in their names: ")
