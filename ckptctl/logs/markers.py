"""Recognize the lines that mark the start of a process.

A trainer names the step either as the last one that the checkpoint holds, or as the first
one that will run; the marker holds the former.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptctl.logs.rows import LogPosition, Marker
from ckptctl.outside_numbers import clamped, whole

MAX_TEXT = 300
"""Characters of a marker's line that are kept."""


@dataclass(frozen=True, slots=True)
class _Phrase:
    """A phrase; with `first_step`, its number is the first step to run, not the last one held."""

    pattern: re.Pattern[str]
    fresh: bool = False
    first_step: bool = False


def _phrase(pattern: str, *, fresh: bool = False, first_step: bool = False) -> _Phrase:
    return _Phrase(re.compile(pattern, re.IGNORECASE), fresh, first_step)


_STEP = r"(?:step|iter(?:ation)?|checkpoint|ckpt)[ _:=\-]{1,3}(?P<step>\d{1,12})(?![.\-_]?\d)\b"

# The first phrase that matches counts.
_PHRASES = (
    # Megatron-LM, Megatron Bridge
    _phrase(
        r"successfully loaded checkpoint from .{0,500}? at iteration\s{1,20}(?P<step>\d{1,12})"
    ),
    # torchtitan
    _phrase(r"Loading the checkpoint at step (?P<step>\d{1,12})"),
    _phrase(r"Loading the checkpoint from .{0,500}?step[-_](?P<step>\d{1,12})"),
    _phrase(r"Training starts at step:? (?P<step>\d{1,12})", first_step=True),
    _phrase(r"this is a fresh start", fresh=True),
    # fairseq, metaseq
    _phrase(r"Loaded checkpoint .{0,500}?\(epoch \d{1,9} @ (?P<step>\d{1,12}) updates\)"),
    _phrase(r"No existing checkpoint found", fresh=True),
    # Lightning, NeMo
    _phrase(
        r"Restored all states from the checkpoint(?: at)?\b(?:.{0,500}?step=(?P<step>\d{1,12}))?"
    ),
    # mmengine, mmcv
    _phrase(r"resumed epoch:? \d{1,9}, iter:? (?P<step>\d{1,12})"),
    # detectron2
    _phrase(r"Starting training from iteration (?P<step>\d{1,12})", first_step=True),
    # Hugging Face
    _phrase(r"Continuing training from global step (?P<step>\d{1,12})"),
    # OLMo-core
    _phrase(r"Loading checkpoint from .{0,500}?\bstep(?P<step>\d{1,12})\b"),
    _phrase(r"will train from scratch", fresh=True),
    # KempnerForge
    _phrase(r"Starting training: step=(?P<step>\d{1,12})"),
    # nanoGPT
    _phrase(r"Initializing a new model from scratch", fresh=True),
    # RWKV: every process writes it, even one that resumes
    _phrase(r"^\s*NEW RUN\b", fresh=True),
    # Custom training loops
    _phrase(
        r"\bresum(?:ed|ing)\b.{0,160}?\b(?:step|iteration|iter)[ _:=\-]{1,3}(?P<step>\d{1,12})"
    ),
    # Custom training loops that name the file or the folder. Only what is named a step is one:
    # the number of a file can be that of an epoch.
    _phrase(
        r"(?<!to )\b(?:load|(?:re)?loaded|restored|loading|restoring) (?:from )?"
        r"(?:the |a |full |training |trainer |model |optimizer |all |and ){0,6}"
        r"(?:checkpoint|ckpt|snapshot|state (?=from))\b(?! for )"
        rf"(?:.{{0,300}}?{_STEP})?"
    ),
    _phrase(
        r"\b(?:checkpoint|ckpt|snapshot)(?: \S{1,300})? (?:was |has been )?(?:successfully )?"
        rf"(?:(?:re)?loaded|restored)\b(?:.{{0,300}}?{_STEP})?"
    ),
    # "loss after the resume from step 36" tells of one.
    _phrase(
        r"(?<!can )(?<!to )(?<!the )(?<!a )(?<!this )(?<!each )\bresume (?:training )?(?:from|at) "
        rf".{{0,300}}?{_STEP}"
    ),
    _phrase(
        r"\b(?:continu(?:e|ing)|restart(?:ing|ed)?|start(?:ing)?)(?: the)?(?: training)? "
        rf"(?:from|at|after) .{{0,200}}?{_STEP}"
    ),
    # nanoGPT, without a step
    _phrase(r"(?:^|[^\w\s'] ?)resuming (?:training )?from \S+"),
)

HINTS: Sequence[bytes] = (
    *(b"heckpoint", b"ckpt", b"napshot", b"tate from", b"ontinu", b"tarting ", b"Start from"),
    *(b"raining starts", b"ing training", b"fresh start", b"from scratch", b"estored all states"),
    *(b"esumed ", b"esuming ", b"esume ", b"NEW RUN"),
    *(b"accumulate_grad_batches", b"Trainer.fit` stopped"),
)
"""Every marker's line contains one of these literals; other lines are not matched."""

# With few kinds of characters kept, a line has a tenth of its length, and lines that differ
# only in numbers are equal.
_DROPPED = bytes(byte for byte in range(256) if byte not in b"chkpemngsudNW\n")
_OUTLINES = tuple((hint.translate(None, _DROPPED), hint) for hint in HINTS)
_MAX_OUTLINES = 4_000
_MAX_OUTLINE_BYTES = 1_000


class HintFinder:
    """Finds the literals of `HINTS` in the blocks of a log.

    A search of a block for every literal takes longer than all else that is done with a
    log. The search is limited to lines whose outline (what is left of a line without most
    characters) is new: a log consists of few kinds of lines.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def find(self, block: bytes) -> list[bytes]:
        """The literals that the lines of a block contain."""
        new = set(block.translate(None, _DROPPED).split(b"\n")).difference(self._seen)
        if not new:
            return []
        outlines = b"\n".join(new)
        suspected = [each for each in _OUTLINES if each[0] in outlines]
        if len(self._seen) > _MAX_OUTLINES:
            self._seen.clear()
        self._seen.update(
            outline
            for outline in new
            if len(outline) <= _MAX_OUTLINE_BYTES
            and not any(kept in outline for kept, _ in suspected)
        )
        return [hint for _, hint in suspected if hint in block]


_ACCUMULATED = re.compile(r"accumulate_grad_batches\W{1,4}(\d{1,5})\b")


def accumulated_in(text: str) -> int | None:
    """How many batches make one step of Lightning, where a line shows its setting."""
    match = _ACCUMULATED.search(text)
    return max(1, clamped(match[1])) if match else None


_STOPPED = re.compile(r"`Trainer\.fit` stopped: `max_steps=(\d{1,12})` reached")


def stopped_in(text: str) -> int | None:
    """The step at which Lightning ended a training, where a line announces it."""
    match = _STOPPED.search(text)
    return clamped(match[1]) if match else None


def read_marker(text: str, position: LogPosition) -> Marker | None:
    """The marker in a line; None where there is none."""
    for phrase in _PHRASES:
        match = phrase.pattern.search(text)
        if match is None:
            continue
        named = match.groupdict().get("step")
        step = whole(named)
        if step is not None and phrase.first_step:
            # Trainers count steps from 0 or from 1; both mean a fresh start.
            step = max(0, step - 1)
        fresh = phrase.fresh or step == 0
        return Marker(position, text.strip()[:MAX_TEXT], None if fresh else step, fresh)
    return None
