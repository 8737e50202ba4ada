"""Guard against a bad loss: all ranks decide together whether to apply a step.

All ranks learn of a loss that is not finite, or far above the recent ones, at the same
step, before the optimizer uses it. `ckptctl loss` checks, from the log, whether the loss
continued across a resume.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, SupportsFloat, Unpack

from ckptctl.distributed.process_group import ProcessGroup, make_group
from ckptctl.errors import CkptctlError, StorageUnavailable, UsageError
from ckptctl.formats.own.marks import MarkKind
from ckptctl.formatting import and_more, command_line, counted
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.history import check_token, held_token
from ckptctl.selection.marking import mark
from ckptctl.selection.roots import list_root
from ckptctl.storage.opening import join_url, open_store

_MIN_RECENT = 10  # fewer losses do not show the usual range


class LossAction(StrEnum):
    """What to do about a bad loss."""

    GO_ON = "go-on"
    WARN = "warn"
    SKIP = "skip"
    STOP = "stop"


class LossKind(StrEnum):
    """What is wrong with a loss, if anything."""

    SOUND = "sound"
    SPIKE = "spike"
    NOT_FINITE = "not-finite"


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What all ranks do about the loss of `step`.

    `rank` is one on which it is bad, `in_a_row` the number of consecutive bad steps up to
    this one. `rejected` are the addresses of the steps that were marked, on rank 0.
    """

    step: int
    action: LossAction
    kind: LossKind
    message: str
    rank: int | None = None
    in_a_row: int = 0
    rejected: tuple[str, ...] = ()
    next_command: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the loss is good."""
        return self.kind is LossKind.SOUND

    @property
    def skip(self) -> bool:
        """Whether to skip the update: zero the gradients and continue."""
        return self.action is LossAction.SKIP

    @property
    def stop(self) -> bool:
        """Whether to stop the training, and not to resume it from the newest step."""
        return self.action is LossAction.STOP


class LossGuard:
    """Checks each loss before the optimizer uses it.

    ```python
    guard = LossGuard("skip", root=root)
    for step in range(start, n_steps + 1):
        loss = model(batch).loss
        verdict = guard.check(step, loss)
        if verdict.stop:
            sys.exit(verdict.message)
        if verdict.skip:
            continue
        loss.backward()
    ```

    `action` is what to do about a bad loss: `warn`, `skip` the update, or `stop`. After
    `after` bad ones in a row it is `stop` in any case: then the weights themselves are
    suspect, and with a `root` the steps that were saved since are rejected, or the newest
    one where none was, so that `pick` and `resume` take an older one. A loss is a spike
    above `spike_factor` times the largest of the last `recent` sound ones; 0 turns that off.
    `storage` opens a `root` on an object store; its fields are keywords, too, as for
    `Checkpointer`. Every rank makes one, once its process group is initialized; `group` can
    be shared.

    Cost of `check`: one all-reduce of one number, and the wait for the loss itself where it
    is on a GPU.
    """

    def __init__(
        self,
        action: LossAction | str = LossAction.WARN,
        *,
        spike_factor: float = 10.0,
        recent: int = 100,
        after: int = 10,
        root: str | os.PathLike[str] | None = None,
        group: ProcessGroup | None = None,
        storage: StorageOptions = StorageOptions(),
        **keywords: Unpack[StorageKeywords],
    ) -> None:
        actions = [known.value for known in LossAction if known is not LossAction.GO_ON]
        if action not in actions:
            raise UsageError(
                f"{str(action)!r} is not an action; expected one of {', '.join(actions)}"
            )
        self._action = LossAction(action)
        if not (spike_factor == 0 or spike_factor > 1):
            raise UsageError(f"spike_factor is {spike_factor}; it must be above 1, or 0 for none")
        for name, value in (("after", after), ("recent", recent)):
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be 1 or more")
        self._factor = spike_factor
        self._recent: deque[float] = deque(maxlen=recent)
        self._after = after
        self._root = None if root is None else os.fspath(root)
        (self._storage,) = options_from(keywords, storage)
        self._group = make_group() if group is None else group
        self._in_a_row = 0
        self._first_bad = 0

    def check(self, step: int, loss: SupportsFloat) -> GuardVerdict:
        """What to do about the loss of `step`, the same on every rank. Every rank calls it.

        Raises `RanksLost` if a rank is lost.
        """
        value = float(loss)
        own = self._kind(value)
        rank = self._group.rank
        # One number encodes kind and rank: the largest is the worst kind, on its last rank.
        order = list(LossKind).index(own)
        (worst,) = self._group.most(order * self._group.size + (rank if order else 0))
        kind = list(LossKind)[worst // self._group.size]
        if kind is LossKind.SOUND:
            self._recent.append(value)
            self._in_a_row = 0
            return GuardVerdict(step, LossAction.GO_ON, kind, f"step {step}: the loss is {value:g}")
        if not self._in_a_row:
            self._first_bad = step
        self._in_a_row += 1
        named = worst % self._group.size
        what = f"the loss is {value:g}"
        if named != rank:
            what = "the loss is not finite" if kind is LossKind.NOT_FINITE else "the loss is bad"
        if kind is LossKind.SPIKE:
            what += f", more than {self._factor:g} times the largest of the last ones"
        what += f" (on rank {named})" if self._group.size > 1 else ""
        return self._bad(step, kind, named, what)

    def _kind(self, value: float) -> LossKind:
        if not math.isfinite(value):
            return LossKind.NOT_FINITE
        if self._factor and len(self._recent) >= _MIN_RECENT:
            highest = max(self._recent)
            if highest > 0 and value > highest * self._factor:
                return LossKind.SPIKE
        return LossKind.SOUND

    def _bad(self, step: int, kind: LossKind, rank: int, what: str) -> GuardVerdict:
        stop = self._action is LossAction.STOP or self._in_a_row >= self._after
        if not stop:
            return GuardVerdict(
                step, self._action, kind, f"step {step}: {what}", rank, self._in_a_row
            )
        row = "" if self._in_a_row == 1 else f", {self._in_a_row:,} bad losses in a row"
        message = f"step {step}: {what}{row}; do not resume from the newest step"
        rejected: tuple[str, ...] = ()
        command = None if self._root is None else _command_for(["pick", self._root], self._storage)
        if self._root is not None and self._group.is_first:
            reason = f"the loss went bad at step {self._first_bad}, and training stopped at {step}"
            try:
                rejected = _reject_since(self._root, self._first_bad, reason, self._storage)
            except CkptctlError as error:
                # Training stops anyway; a person has to write the mark.
                message += f": {error.message}"
                command = error.next_command
        return GuardVerdict(
            step, LossAction.STOP, kind, message, rank, self._in_a_row, rejected, command
        )


def _reject_since(
    root: str, first_bad: int, reason: str, storage: StorageOptions
) -> tuple[str, ...]:
    """Reject the steps of `root` from `first_bad - 1` on, or else the newest; their addresses.

    The loss of step N is computed with the weights that step N - 1 left: a step saved at N
    - 1 or later is suspect. Without such a step, the newest one led to the bad loss and
    would do so again. If this process has resumed from the root, it rejects only while it holds
    the root: the steps of a later attempt have other weights.

    Raises `StorageError` if the root cannot be listed or a mark cannot be written, with the
    command that writes it, and `Fenced`. Cost: one listing, and an inspection and a write
    per step.
    """
    with open_store(root, storage) as store:
        steps = list_root(store).steps
        token = held_token(root)
        suspect = [step for step in steps if step.number >= first_bad - 1] or list(steps[:1])
        addresses = [join_url(root, step.name) for step in suspect]
        failed: list[tuple[str, CkptctlError]] = []
        for address in addresses:
            if token is not None:
                check_token(store, token)
            by = "ckptctl.train.LossGuard"
            try:
                mark(address, MarkKind.REJECTED, reason=reason, by=by, storage=storage)
            except CkptctlError as error:  # the other steps must not stay usable
                failed.append((address, error))
        if failed:
            address, why = failed[0]
            words = ["reject", address, "--reason", reason]
            raise StorageUnavailable(
                f"{address}{and_more(failed)} could not be rejected ({why.message}): "
                "do not resume from it",
                next_command=_command_for(words, storage),
            ) from why
        return tuple(addresses)


def _command_for(words: list[str], storage: StorageOptions) -> str:
    """A ckptctl command line for the same storage."""
    return command_line(*words, *storage.arguments())


def why_lost(model: Any, loss: float | None) -> str:
    """Why the weights of a model are lost after a step of this loss; empty where they are not.

    A loss that is not finite alone proves nothing: a scaler for fp16 skips such a step, and
    so does `LossGuard`. Cost: nothing for a finite loss, else one pass over the parameters.
    """
    if model is None or loss is None or math.isfinite(loss):
        return ""
    n_lost = n_all = 0
    for parameter in model.parameters():
        n_lost += not _is_finite(getattr(parameter, "to_local", lambda one=parameter: one)())
        n_all += 1
    if not n_lost:
        return ""
    what = counted(n_all, "parameter")
    return f"the loss was {loss:g}, and {n_lost:,} of {what} of the model hold NaN or infinity"


def _is_finite(tensor: Any) -> bool:
    """Whether no value is NaN or infinite, of a tensor of any dtype and layout."""
    import torch

    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout is not torch.strided:
        tensor = tensor.values()
    four_bits = str(tensor.dtype) == "torch.float4_e2m1fn_x2"  # holds no such values
    if four_bits or tensor.is_meta:
        return True
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch 2.13: no `isfinite` for float8
    return bool(torch.isfinite(tensor).all())
