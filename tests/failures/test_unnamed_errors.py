"""An error that no rule names still ends a program: it is answered, with low confidence."""

from __future__ import annotations

import pytest

import ckptctl

FRAMES = (
    "Traceback (most recent call last):\n"
    '  File "/job/train.py", line 3, in main\n'
    "    batch = next(batches)\n"
)
OTHER_NAMES = (
    "queue.Empty",
    "_queue.Empty",
    "StopIteration",
    "subprocess.TimeoutExpired: Command 'aws' timed out after 30 seconds",
    "struct.error: unpack requires a buffer of 8 bytes",
    "app.steps.main.<locals>.Stopped: at 9",
    "DeprecationWarning: the argument is gone",
)
NUMBERED = (
    "KeyError: 0",
    "KeyError: None",
    "ValueError: 0 is no size",
)
RAISED = FRAMES.replace("batch = next(batches)", "raise Exception(7)")
NATIVE = (
    "terminate called after throwing an instance of 'std::out_of_range'\n  what():  vector::at",
    "panic: runtime error: index out of range [3] with length 3\n\ngoroutine 1 [running]:",
    "thread 'tokio-runtime-worker' (71) panicked at src/loader.rs:4:5:\nindex out of bounds",
    'Exception in thread "main" java.lang.NullPointerException: key',
    "F1120 03:12:44.123456 1234 plan.cc:12] Check failed: n == m (1 vs. 2) ",
    "2026-11-20 03:12:44.1: F core/plan.cc:12] Check failed: n == m (1 vs. 2)",
    "*** Error in `python': free(): invalid pointer: 0x00007f ***",
    "double free or corruption (!prev)",
    "*** stack smashing detected ***: terminated",
    "*** SIGSEGV received at time=1763608364 on cpu 17 ***",
    "*** SIGSEGV (@(nil)), received by PID 11743 (TID 12350) on cpu 17; stack trace: ***",
)


@pytest.mark.parametrize("end", OTHER_NAMES)
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "(Trainer pid=71) "])
def test_the_end_of_a_traceback_is_an_error_whatever_its_name(tmp_path, prefix, end):
    answer = classified(
        tmp_path, "".join(prefix + line + "\n" for line in (FRAMES + end).split("\n"))
    )
    assert (answer.failure, answer.confidence, answer.evidence[0].text) == ("job-code", "low", end)


@pytest.mark.parametrize("end", NUMBERED)
def test_an_exception_whose_message_is_a_number_is_an_error(tmp_path, end):
    answer = classified(tmp_path, FRAMES + end)
    assert (answer.failure, answer.confidence) == ("job-code", "medium")


@pytest.mark.parametrize("end", ["Exception: 7", "Exception", "app.errors.Error: 7"])
def test_the_frames_of_an_exception_show_whose_it_is(tmp_path, end):
    raised, called, below, waiting, alone = (
        classified(tmp_path, before + end)
        for before in (
            RAISED,
            FRAMES,
            RAISED.replace("/job/train.py", "/opt/lib/python3.12/site-packages/x/y.py"),
            FRAMES.replace("batch = next(batches)", "torch.npu.synchronize()"),
            "",
        )
    )
    assert (raised.failure, raised.confidence, raised.action) == ("job-code", "medium", "fix")
    assert (called.failure, called.confidence, called.action) == ("job-code", "low", "investigate")
    assert [each.failure for each in (below, waiting, alone)] == ["unknown"] * 3
    assert below.evidence[0].text == end


@pytest.mark.parametrize("text", NATIVE)
def test_an_abort_of_native_code_is_an_error_of_the_program(tmp_path, text):
    answer = classified(tmp_path, text)
    assert (answer.failure, answer.confidence) == ("job-code", "low")


@pytest.mark.parametrize(
    ("after", "failure"),
    [
        ("RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.", "job-oom"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "job-oom"),
    ],
)
def test_a_named_error_explains_an_unnamed_one_before_it(tmp_path, after, failure):
    first = classified(tmp_path, f"{FRAMES}queue.Empty\n\n{FRAMES}{after}")
    native = classified(tmp_path, f"{NATIVE[0]}\n{after}")
    assert (first.failure, native.failure) == (failure, failure)


@pytest.mark.parametrize(
    "line",
    [
        "MeanSquaredError: 0.352",
        "RelativeError: 0.03, step 12",
        "val_error: 12.3",
        "loss.error: 0.5",
        "Error: 0.12",
        "Step: 12",
        "app.done: yes",
    ],
)
def test_a_metric_is_no_exception(tmp_path, line):
    assert classified(tmp_path, line).failure == "unknown"


def test_the_end_of_a_traceback_whose_beginning_is_missing_is_an_error(tmp_path):
    tail = FRAMES.split("\n", 1)[1]
    assert classified(tmp_path, tail + "KeyError: None").failure == "job-code"
    assert classified(tmp_path, tail + "queue.Empty").failure == "job-code"


def test_a_timeout_of_a_collective_explains_the_abort_that_reports_it(tmp_path):
    timeout = "what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
    answer = classified(tmp_path, f"{NATIVE[0].split(chr(10))[0]}\n  {timeout}")
    assert answer.failure == "hang"


def test_lines_long_after_a_traceback_that_never_ended_are_no_exception(tmp_path):
    head = FRAMES + "".join(f"    layer {n}\n" for n in range(2000))
    assert classified(tmp_path, head + "app.done: yes").failure == "unknown"


def test_a_cancelled_task_is_a_consequence(tmp_path):
    assert classified(tmp_path, FRAMES + "asyncio.exceptions.CancelledError").failure == "unknown"


def classified(tmp_path, text):
    log = tmp_path / "job.log"
    log.write_text(text + "\n")
    return ckptctl.classify(str(log))
