"""Inputs that are made to cost a reader of text more time than their size explains.

Each function makes about `n_bytes` bytes of one kind. They resemble what a reader looks for, and
never end it: long runs, brackets that stay open, lines that almost match, a value with too many
digits. `tests/test_reading_time.py` feeds them to every reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

Make = Callable[[int], bytes]

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."

# What a reader of one kind of text looks for; each is repeated in one line and in many.
LOG_WORDS = (
    "step 1 loss 2.5 ",
    "{'loss': 1.0, 'step': ",
    '{"step": 1, "loss": 2.0, "a": ',
    "iteration 5/ 10 | consumed samples: 1 | lm loss: 1.0E+00 | ",
    "Epoch 1: 50%|#####     | 1/2 [00:00<00:01, loss=1.0] ",
    "epoch 1: 1 / 2 loss=1.0, ",
    "| epoch | step | loss ",
    "Loaded checkpoint from /a/step_1 ",
    "resuming from step ",
    "1/2 [==>...] - ETA: 1s - loss: 1.0 ",
    "[rank0]: ",
    "[1,0]<stdout>:",
    "2026-11-20 03:12:44,123 - INFO - ",
    "Nov 20 03:12:44 node017 kernel: ",
    '"message": "',
    'level=error msg="a',
    "Traceback (most recent call last): ",
    '  File "a.py", line 1, in f ',
    "RuntimeError: CUDA error ",
    XID + " ",
    "NCCL INFO rank 1 nranks 2 ",
    "node017:1:1 [0] NCCL INFO ",
    "Thread 0x1 (most recent call first): ",
    "Rank=1 Node=a Score=0.5 ",
    "rank 1: 1.5 times across ranks (ms): ",
    "out of memory total capacity of 1 GiB 1 GiB free ",
    "State=FAILED Reason=",
    "[pod/train-0/a] 2026-11-20T03:12:44.1Z ",
    "2026-11-20T03:12:44.123Z stdout P ",
    '{"log": "step 1 loss 2\\n", "stream": "stdout"} ',
    "wandb: Run summary: loss 1 ",
    "if error in case of ",
    "'quoted ",
    "loss 1.0 step ",
)
FILLERS = (
    " ",
    "a",
    "7",
    "[",
    "{",
    "(",
    "'",
    '"',
    "\\",
    "|",
    ":",
    "=",
    ",",
    "a=",
    "1,",
    "\t",
    "\r",
    "\x1b[",
    "━",
)

SCRIPT_WORDS = (
    "srun ",
    "python3 -u ",
    "python -m torch.distributed.run ",
    "#SBATCH --signal=B:USR1@300 ",
    "ls -t -t ",
    "bash -c 'a ",
    "trap x ",
    "set -o ",
    "--shutdown-timeout 1 ",
    "timeout",
    "a=$(",
    "x | y ",
    "local a=$(ckptctl ",
    "save-time=",
    "accelerate ",
    "exit-save-grace",
    "ckptctl run ",
    "<<EOF ",
    "-a -b ",
    "wait & ; ",
    "hard-timeout 9 ",
)


def one_line(word: str) -> Make:
    """One line of the word, again and again."""
    return lambda n_bytes: (word.encode() * (n_bytes // len(word.encode()) + 1))[:n_bytes] + b"\n"


def many_lines(word: str, n_chars: int = 200) -> Make:
    """Lines of `n_chars` of the word."""
    line = ((word * (n_chars // len(word) + 1))[:n_chars] + "\n").encode()
    return lambda n_bytes: line * (n_bytes // len(line) + 1)


def short_lines(word: str) -> Make:
    """The word in a line of its own, again and again."""
    line = word.encode() + b"\n"
    return lambda n_bytes: line * (n_bytes // len(line) + 1)


def _begun(word: str, filler: str) -> Make:
    """Lines of 3,000 characters that begin as the word does and go on with a filler."""
    line = (word + filler * (3000 // len(filler)) + "\n").encode()
    return lambda n_bytes: line * (n_bytes // len(line) + 1)


def texts(words: tuple[str, ...]) -> Mapping[str, Make]:
    """Every word in every shape, by a name."""
    makes: dict[str, Make] = {}
    for word in (*words, *FILLERS):
        makes[f"one line of {word!r}"] = one_line(word)
        makes[f"lines of {word!r}"] = many_lines(word)
        makes[f"short lines {word!r}"] = short_lines(word)
    for word in words:
        for filler in (" ", "a", "7", "a ", "1 "):
            makes[f"{word!r} and {filler!r}"] = _begun(word, filler)
    return makes


def _ranks(n_bytes: int) -> bytes:
    """Lines of a thousand ranks with a traceback that does not end."""
    lines = (
        f"[rank{n % 4096}]: Traceback (most recent call last):\n"
        f'[rank{n % 4096}]:   File "a.py", line 1, in f\n'
        for n in range(n_bytes // 80)
    )
    return "".join(lines).encode()


def _steps(n_bytes: int) -> bytes:
    return "".join(f"step {n} loss 2.{n % 10}\n" for n in range(n_bytes // 20)).encode()


def _resumes(n_bytes: int) -> bytes:
    lines = (
        f"resuming from step {n % 97}\nstep {n % 97} loss 2.5\nstep {n % 97 + 1} loss 2.4\n"
        for n in range(n_bytes // 60)
    )
    return "".join(lines).encode()


def _jumps(n_bytes: int) -> bytes:
    return "".join(
        f"step {n * 7919 % 10007} loss 2.{n % 10}\n" for n in range(n_bytes // 20)
    ).encode()


def _ranked_steps(n_bytes: int) -> bytes:
    return "".join(f"[rank{n}]: step {n % 5} loss 2.5\n" for n in range(n_bytes // 28)).encode()


def _deep(n_bytes: int) -> bytes:
    return b'{"step": 1, "loss": ' + b"[" * (n_bytes // 2) + b"]" * (n_bytes // 2) + b"}\n"


def _deep_lines(n_bytes: int) -> bytes:
    line = b'{"step": 1, "loss": ' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}\n"
    return line * (n_bytes // len(line))


def _wide(n_bytes: int) -> bytes:
    """One record with very many keys."""
    return json.dumps({"step": 1, **{f"k{n}/loss": 1.5 for n in range(n_bytes // 18)}}).encode()


def _wide_lines(n_bytes: int) -> bytes:
    lines = (
        json.dumps({"step": n, "loss": 1.0, **{f"k{n}_{m}": m for m in range(50)}})
        for n in range(n_bytes // 700)
    )
    return "\n".join(lines).encode()


def _wide_table(n_bytes: int) -> bytes:
    columns = ",".join(f"c{n}" for n in range(n_bytes // 16))
    return f"step,loss,{columns}\n1,2.5,{'1,' * (n_bytes // 16)}\n".encode()


def _tables(n_bytes: int) -> bytes:
    return ("step,loss,a,b\n" * (n_bytes // 14)).encode()


def _digits(n_bytes: int) -> bytes:
    line = f"step {'9' * 3000} loss {'9' * 900}\n".encode()
    return line * (n_bytes // len(line))


def _digits_json(n_bytes: int) -> bytes:
    line = f'{{"step": {"9" * 3000}, "loss": 0e{"9" * 5000}, "time": 1e999}}\n'.encode()
    return line * (n_bytes // len(line))


def _parts(n_bytes: int) -> bytes:
    line = b"2026-11-20T03:12:44.123456789Z stdout P a\n"
    return line * (n_bytes // len(line))


def _documents(n_bytes: int) -> bytes:
    return b'[{"textPayload": "step 1 loss 2", "insertId": "1"},' * (n_bytes // 52)


def _nested_records(n_bytes: int) -> bytes:
    record = "step 1 loss 2"
    for _ in range(8):
        record = json.dumps({"log": record, "stream": "stdout"})
    return (record + "\n").encode() * (n_bytes // len(record))


def _reversed_records(n_bytes: int) -> bytes:
    lines = (
        json.dumps(
            {"textPayload": f"step {n} loss 2", "timestamp": f"{2e9 - n:.0f}", "insertId": "1"}
        )
        for n in range(n_bytes // 85)
    )
    return "\n".join(lines).encode()


LOGS: Mapping[str, Make] = {
    **texts(LOG_WORDS),
    "tracebacks of many ranks": _ranks,
    "steps": _steps,
    "resumes": _resumes,
    "jumping steps": _jumps,
    "steps of many ranks": _ranked_steps,
    "deep JSON": _deep,
    "deep JSON lines": _deep_lines,
    "a wide record": _wide,
    "wide records": _wide_lines,
    "a wide table": _wide_table,
    "heads of tables": _tables,
    "digits": _digits,
    "digits in JSON": _digits_json,
    "parts of lines": _parts,
    "documents": _documents,
    "nested records": _nested_records,
    "records, the newest first": _reversed_records,
}


def _continued(n_bytes: int) -> bytes:
    return b"#!/bin/bash\nsrun python a.py \\\n" + b"  --flag value \\\n" * (n_bytes // 17)


def _heredocs(n_bytes: int) -> bytes:
    return b"#!/bin/bash\n" + b"cat <<EOF\na\nEOF\n" * (n_bytes // 16)


def _open_heredoc(n_bytes: int) -> bytes:
    return b"#!/bin/bash\ncat <<EOF\n" + b"srun python a.py\n" * (n_bytes // 17)


def _trainings(n_bytes: int) -> bytes:
    return b"#!/bin/bash\n#SBATCH --signal=B:USR1@60\n" + b"srun python a.py x=1\n" * (
        n_bytes // 21
    )


def _piped(n_bytes: int) -> bytes:
    return b"#!/bin/bash\n#SBATCH --signal=B:USR1@60\ntrap x USR1\n" + (
        b"srun python a.py | tee & kill 1\n" * (n_bytes // 32)
    )


def _options(n_bytes: int) -> bytes:
    return b"#!/bin/bash\n" + b"#SBATCH --signal=USR1@60 --requeue $A\n" * (n_bytes // 38)


def _picks(n_bytes: int) -> bytes:
    return b"#!/bin/bash\n" + b"A=$(ckptctl pick ROOT)\n" * (n_bytes // 23)


SCRIPTS: Mapping[str, Make] = {
    **{f"{name}": make for name, make in texts(SCRIPT_WORDS).items()},
    "continued lines": _continued,
    "here-documents": _heredocs,
    "an open here-document": _open_heredoc,
    "trainings": _trainings,
    "trainings in pipes": _piped,
    "options": _options,
    "picks": _picks,
}
