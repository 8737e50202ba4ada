"""However a log's bytes come, and whatever stands around them, its rows are the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import VERSION_EVENT, scalar_event, wandb_file, wandb_history
from msgspec.structs import replace

from ckptctl.logs.fields import Precision, parse_number
from ckptctl.logs.reading import LogReader
from ckptctl.logs.rows import Marker, Row
from ckptctl.storage.logs import MAX_LINE

SAMPLES = json.loads((Path(__file__).parent / "data" / "samples.json").read_text())


def log_of(form: str) -> bytes:
    """A log of some steps in one format, with noise and a marker between them."""
    lines: list[str] = []
    for sample in SAMPLES:
        if sample["format"] == form:
            lines += ["noise: 12 % of it", *sample["lines"], "Resuming training from step 7"]
    if form == "csv":
        lines = ["step,loss,lr", *(f"{n},{n / 7:.4f},1e-4" for n in range(5))]
    return ("\n".join(lines) + "\n").encode()


LOGS = {form: log_of(form) for form in sorted({sample["format"] for sample in SAMPLES})}
LOGS["tensorboard"] = VERSION_EVENT + b"".join(scalar_event(n, {"loss": 1.5}) for n in range(9))
LOGS["wandb"] = wandb_file(wandb_history(n, {"loss": 1.5}) for n in range(9))
LOGS["trainer-state"] = json.dumps(
    {"max_steps": 9, "log_history": [{"step": n, "loss": 1.5} for n in range(9)]}, indent=2
).encode()


def read(pieces: list[bytes]) -> list[Row | Marker]:
    reader = LogReader("train.log")
    found = [item for piece in pieces for item in reader.feed(piece)]
    return [*found, *reader.end()]


def cut(data: bytes, boundaries: list[int]) -> list[bytes]:
    edges = [0, *sorted({boundary % (len(data) + 1) for boundary in boundaries}), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


ANY = st.sampled_from(sorted(LOGS))
PRINTED = st.sampled_from(sorted({sample["format"] for sample in SAMPLES}))


@settings(max_examples=150, deadline=None)
@given(form=ANY, boundaries=st.lists(st.integers(0, 5000), max_size=30))
def test_where_the_stream_is_cut_changes_no_row(form, boundaries):
    whole = read([LOGS[form]])
    assert any(isinstance(item, Row) for item in whole)
    assert read(cut(LOGS[form], boundaries)) == whole


@pytest.mark.parametrize("form", LOGS)
def test_a_stream_of_single_bytes_gives_the_same_rows(form):
    data = LOGS[form]
    assert read([data[at : at + 1] for at in range(len(data))]) == read([data])


COLOURS = ("\x1b[31m", "\x1b[0m", "\x1b[38;2;180;60;0m", "\x1b[K", "\x1b]0;title\x07", "\x1b(B")


@settings(max_examples=150, deadline=None)
@given(
    form=PRINTED,
    places=st.dictionaries(st.integers(0, 3000), st.sampled_from(COLOURS), max_size=12),
)
def test_terminal_codes_change_no_row(form, places):
    data = LOGS[form].decode()
    coloured = data
    for at in sorted((at for at in places if at <= len(data)), reverse=True):
        coloured = coloured[:at] + places[at] + coloured[at:]
    assert numbers(read([coloured.encode()])) == numbers(read([data.encode()]))


@settings(max_examples=100, deadline=None)
@given(
    form=PRINTED.filter(lambda form: form != "csv"),
    rank=st.integers(0, 9999),
    prefix=st.sampled_from(("{}: ", "[rank{}]:", "[rank{}]: ", "[default{}]:", "[rank {}] ")),
)
def test_the_prefix_of_a_rank_changes_no_row(form, rank, prefix):
    data = LOGS[form].decode()
    lines = [prefix.format(rank) + line for line in data.split("\n")]
    assert numbers(read(["\n".join(lines).encode()])) == numbers(read([data.encode()]))


@settings(max_examples=150, deadline=None)
@given(junk=st.lists(st.binary(max_size=300), max_size=8))
def test_no_bytes_at_all_make_a_reader_fail(junk):
    for item in read(junk):
        assert isinstance(item, (Row, Marker))


@settings(max_examples=200, deadline=None)
@given(form=ANY, flips=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), max_size=5))
def test_flipped_bytes_make_no_reader_fail(form, flips):
    data = bytearray(LOGS[form])
    for at, bits in flips:
        data[at % len(data)] ^= bits
    for item in read([bytes(data)]):
        assert isinstance(item, (Row, Marker))


@given(value=st.floats(1e-6, 1e6), decimals=st.integers(0, 8))
def test_a_number_of_fixed_decimals_has_their_unit(value, decimals):
    text = f"{value:,.{decimals}f}"
    number = parse_number(text)
    assert number is not None
    assert number.value == float(text.replace(",", ""))
    assert number.quantum in (0, pytest.approx(10**-decimals))


@given(value=st.floats(1e-30, 1e30), decimals=st.integers(0, 8))
def test_a_number_with_an_exponent_has_the_unit_of_its_last_digit(value, decimals):
    number = parse_number(f"{value:.{decimals}E}")
    assert number is not None
    assert abs(number.value - value) <= 0.51 * number.quantum
    power = int(f"{value:.{decimals}E}".partition("E")[2])
    assert number.quantum == pytest.approx(10.0 ** (power - decimals))


@given(value=st.floats(0.01, 900), suffix=st.sampled_from("KMGTB"))
def test_a_suffix_scales_the_value_and_its_unit(value, suffix):
    scale = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}[suffix]
    plain, scaled = parse_number(f"{value:.2f}"), parse_number(f"{value:.2f}{suffix}")
    assert plain is not None
    assert scaled is not None
    assert scaled.value == pytest.approx(plain.value * scale)
    assert scaled.quantum == pytest.approx(plain.quantum * scale)


@given(values=st.lists(st.floats(0.1, 90), min_size=1, max_size=30), decimals=st.integers(1, 6))
def test_a_column_without_trailing_zeros_has_at_worst_the_unit_of_its_texts(values, decimals):
    column = Precision()
    for value in values:
        text = repr(round(value, decimals))
        number = parse_number(text)
        assert number is not None
        refined = column.refine(number)
        assert refined.value == number.value
        assert refined.quantum <= number.quantum
        # Never finer than what was rounded to.
        assert refined.quantum >= 0.99 * 10**-decimals or math.isclose(refined.quantum, 0)


def numbers(found: list[Row | Marker]) -> list[object]:
    """Rows and markers without what the text around them may change."""
    return [replace(item, text="") if isinstance(item, Marker) else item for item in found]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path):
    program = (
        "import resource, sys\n"
        "from ckptctl.logs.reading import read_logs\n"
        "n = sum(1 for _ in read_logs([sys.argv[1]]))\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    line = "iter {:9d}: loss 2.3456, time 5.00ms, mfu 15.34%\n"
    noise = "x" * 1990 + "\n"
    peaks = []
    for n_rows in (1_000, 100_000):
        path = tmp_path / "train.log"
        with path.open("w") as file:
            for step in range(n_rows):
                file.write(line.format(step) + noise)
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
        )
        counted, peak = map(int, done.stdout.split())
        assert counted == n_rows
        peaks.append(peak)
    assert path.stat().st_size > 200_000_000
    path.unlink()
    assert peaks[1] - peaks[0] < 8  # MiB


def test_a_zero_with_an_exponent_that_no_float_holds_is_a_zero():
    assert parse_number("0e400").value == 0
    assert math.isfinite(parse_number("0e400").quantum)


FEW = [0.0, 0.00012, 0.25, 0.5, 9.996, 99.5, 0.1 + 0.2]
PRINTED_NUMBERS = st.builds(
    str.format, st.sampled_from(["{:.4f}", "{:.1E}", "{!r}", "{:.1f}%"]), st.sampled_from(FEW)
)


PLACES = st.sampled_from(
    [
        "[2026-01-02 03:{n:02}:05] [step {step}] loss={loss}, lr=0.0002, step_time=1.25s",
        "2026-01-02T03:12:{n:02}.5Z step {step}/9,999 | loss {loss} | eta 0:{n}:07 | 1.5 {n} it/s",
        "Epoch 0:  30%|█{bar}  | {step}/900 [00:0{n}<00:07,  3.91it/s, loss={loss}, v=3]",
        "[rank{rank}]: step: {step}  loss:  {loss}  memory:  1.07GiB({n}.13%)  mfu: 2.89%",
        "iter {step}: loss {loss}, time {n}.5ms, mfu -1{n}.00%",
        "a={n}:{loss} step {step} loss {loss} lr -{n}e-05",
        "step {step}: loss {loss} group{n} lr={loss}e-3 ratio {n}:1.5 seen {n},000",
    ]
)


def at_once(reader: LogReader, data: bytes) -> list[Row | Marker]:
    """The rows of a reader that has no templates."""
    found = []
    for line in data.splitlines(keepends=True):
        found += reader.feed(line)
        for templates in getattr(reader.log, "_templates", {}).values():
            templates.clear()
    return [*found, *reader.end()]


@settings(max_examples=300, deadline=None)
@given(losses=st.lists(PRINTED_NUMBERS, min_size=1, max_size=60), place=PLACES)
def test_a_line_of_a_known_form_is_read_as_the_first_one(losses, place):
    lines = [
        place.format(step=n + 10, n=n, loss=loss, rank=n % 3, bar="█" * (n % 4) + " " * (n % 3))
        for n, loss in enumerate(losses)
    ]
    data = ("\n".join(lines) + "\n").encode()
    assert read([data]) == at_once(LogReader("train.log"), data)


def test_rows_of_several_ranks_and_widths_are_read():
    lines = [
        f"[rank{rank}]: step: {step}  loss: {9 - step / 300:.4f}  memory: 4.10GiB(4.34%)  "
        f"tps: {1000 + step % 7:,}  mfu: 31.25%"
        for step in range(1, 1200)
        for rank in range(12)
    ]
    rows = read([("\n".join(lines) + "\n").encode()])
    assert [row.step for row in rows] == list(range(1, 1200))
    assert [row.loss.value for row in rows] == [float(f"{9 - n / 300:.4f}") for n in range(1, 1200)]
    assert {row.loss.quantum for row in rows} == {1e-4}
    assert [row.position.line for row in rows] == list(range(1, 1199 * 12, 12))


def test_a_bar_without_a_line_end_has_all_its_steps():
    bars = "".join(
        f"\rEpoch 0:  9%|█  | {n}/20000 [00:01<00:09, 9.7it/s, v_num=0, train_loss=2.{n}]"
        for n in range(1, 20_000)
    ).encode()
    assert len(bars) > MAX_LINE
    rows = read([bars[at : at + 100_000] for at in range(0, len(bars), 100_000)])
    assert [row.step for row in rows] == [*range(1, 20_000)]
