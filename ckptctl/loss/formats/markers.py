"""Which lines say that a process began, and from what?

A line that names a step names it in its trainer's own way: as the last step that the
checkpoint holds, or as the first that will run. Whether the job really went on from
there is the assessment's question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.loss.rows import LogPosition, Marker

MAX_TEXT = 300
"""So much of a marker's line is kept, in characters."""


@dataclass(frozen=True, slots=True)
class _Phrase:
    """A phrase; `first_step` says that its number is the first step to run, not the last held."""

    pattern: re.Pattern[str]
    fresh: bool = False
    first_step: bool = False


def _phrase(pattern: str, *, fresh: bool = False, first_step: bool = False) -> _Phrase:
    return _Phrase(re.compile(pattern, re.IGNORECASE), fresh, first_step)


# The first that is found counts.
_PHRASES = (
    # Megatron-LM, Megatron Bridge
    _phrase(r"successfully loaded checkpoint from .*? at iteration\s+(?P<step>\d+)"),
    # torchtitan
    _phrase(r"Loading the checkpoint at step (?P<step>\d+)"),
    _phrase(r"Loading the checkpoint from .*?step[-_](?P<step>\d+)"),
    _phrase(r"Training starts at step:? (?P<step>\d+)", first_step=True),
    _phrase(r"this is a fresh start", fresh=True),
    # fairseq, metaseq
    _phrase(r"Loaded checkpoint .*?\(epoch \d+ @ (?P<step>\d+) updates\)"),
    _phrase(r"No existing checkpoint found", fresh=True),
    # Lightning, NeMo
    _phrase(r"Restored all states from the checkpoint(?: at)?\b(?:.*?step=(?P<step>\d+))?"),
    # mmengine, mmcv
    _phrase(r"resumed epoch:? \d+, iter:? (?P<step>\d+)"),
    # detectron2
    _phrase(r"Starting training from iteration (?P<step>\d+)", first_step=True),
    # Hugging Face
    _phrase(r"Continuing training from global step (?P<step>\d+)"),
    # OLMo-core
    _phrase(r"Loading checkpoint from .*?\bstep(?P<step>\d+)\b"),
    _phrase(r"will train from scratch", fresh=True),
    # KempnerForge
    _phrase(r"Starting training: step=(?P<step>\d+)"),
    # nanoGPT
    _phrase(r"Initializing a new model from scratch", fresh=True),
    # RWKV: written by every process, none of which says that it resumed
    _phrase(r"^\s*NEW RUN\b", fresh=True),
    # whoever says it in plain words
    _phrase(r"\bresum(?:ed|ing)\b.{0,160}?\b(?:step|iteration|iter)[ _:=\-]{1,3}(?P<step>\d+)"),
    # nanoGPT again, which names no step
    _phrase(r"Resuming training from \S+"),
)

HINTS: Sequence[bytes] = (
    b"uccessfully loaded checkpoint",
    b"oading the checkpoint",
    b"raining starts at",
    b"fresh start",
    b"oaded checkpoint",
    b"No existing checkpoint",
    b"estored all states",
    b"esumed ",
    b"esuming ",
    b"tarting training",
    b"Continuing training",
    b"oading checkpoint from",
    b"from scratch",
    b"NEW RUN",
)
"""One of these is in every marker's line: most lines need no closer look."""


def read_marker(text: str, position: LogPosition) -> Marker | None:
    """The marker that a line is; None where it is none."""
    for phrase in _PHRASES:
        match = phrase.pattern.search(text)
        if match is None:
            continue
        named = match.groupdict().get("step")
        step = None if named is None else int(named)
        if step is not None and phrase.first_step:
            # Counting from 0 or from 1, the first step is the first.
            step = max(0, step - 1)
        fresh = phrase.fresh or step == 0
        return Marker(position, text.strip()[:MAX_TEXT], None if fresh else step, fresh)
    return None
