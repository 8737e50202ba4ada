"""See whether the state of the optimizer is real: zero, impossible, of another shape, or stale.

Such a step is whole and every byte of it is as it was saved; a resume from it starts the optimizer
anew, or with the moments of another time. Tensors of DCP are read; what optimizers keep in
files of `torch.save` is named as not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ckptctl.findings import Finding
from ckptctl.formats.frameworks.state_keys import has_shape_of_parameter, is_moment_name, is_square
from ckptctl.formatting import command_line, counted, inside, some_of, verb
from ckptctl.inspection.beside import Neighbours
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.predecessor import compared_before
from ckptctl.inspection.structure import NO_CRC
from ckptctl.model import SHARDED, TensorEntry
from ckptctl.records.not_finite import Values

N_COMPARED = 64
"""So many records of moments, and of weights, are compared with the step before."""


def check_optimizer_state(
    opened: OpenStep,
    values: Mapping[str, Values],
    train_step: int | None,
    neighbours: Neighbours | None,
) -> Iterator[Finding]:
    """Yield what is wrong with the tensors that an optimizer keeps.

    `values` are those that were scanned, by the path of the part and the FQN. Yields
    `optimizer.zero`, `optimizer.idle`, `optimizer.negative`, `optimizer.shape`,
    `optimizer.unchanged`, and `optimizer.unseen` where state of an optimizer was not read.
    Cost: besides the bytes that were scanned, one metadata and `2 * N_COMPARED` short reads of
    the step before.
    """
    parts = [p for p in opened.parts if p.part.format in SHARDED and len(p.metadata) == 1]
    moments = {
        inside(part.path, fqn): entry
        for part in parts
        for fqn, entry in part.metadata[0].tensors.items()
        if is_moment_name(fqn)
    }
    scanned = {name: values[name] for name in moments if name in values}
    if not scanned:
        yield _unseen(opened)
        return
    yield from _zero(opened, scanned, train_step)
    negative = [n for n, one in scanned.items() if is_square(n) and one.n_negative]
    if negative:
        total = sum(scanned[name].n_negative for name in negative)
        yield Finding(
            "optimizer.negative",
            negative[0],
            f"{counted(len(negative), 'mean')} of squares {verb(len(negative), 'is', 'are')} below "
            f"zero in {counted(total, 'value')} ({some_of(negative)}): no optimizer writes that",
            expected="values of 0 or more",
            found=f"{total:,} below 0",
            next_command=command_line("explain", "optimizer.negative"),
        )
    for part in parts:
        yield from _other_shape(part)
        if neighbours is not None:
            yield from _unchanged(opened, part, neighbours)


def _unseen(opened: OpenStep) -> Finding:
    return Finding(
        "optimizer.unseen",
        "",
        "no tensor that an optimizer keeps was read: the step has none in DCP, or its "
        "optimizer names them otherwise",
        next_command=command_line("show", opened.url, "--tensors"),
    )


def _zero(
    opened: OpenStep, scanned: Mapping[str, Values], train_step: int | None
) -> Iterator[Finding]:
    zero = [name for name, one in scanned.items() if one.n_values and one.is_zero]
    if not zero or (train_step or 0) < 1:
        return
    if len(zero) == len(scanned):
        yield Finding(
            "optimizer.zero",
            zero[0],
            f"all {len(zero):,} tensors that the optimizer keeps are zero at train step "
            f"{train_step:,}: a resume starts the optimizer anew",
            expected="moments of the steps before",
            found="zero",
            next_command=command_line("pick", opened.store.url, "--before", str(train_step)),
        )
        return
    yield Finding(
        "optimizer.idle",
        zero[0],
        f"{len(zero):,} of {len(scanned):,} tensors that the optimizer keeps are zero "
        f"({some_of(zero)}): their parameters had no gradient, or their state was lost",
    )


def _other_shape(part: OpenPart) -> Iterator[Finding]:
    tensors = part.metadata[0].tensors
    shapes = _shapes_of_parameters(tensors)
    other = []
    alike: dict[str, int] = defaultdict(int)
    for fqn, entry in tensors.items():
        expected = shapes.get(_parameter_of(fqn)) if has_shape_of_parameter(fqn) else None
        if expected and entry.shape in expected:
            alike[_last(fqn)] += 1
        elif expected and entry.shape:
            other.append(f"{fqn} {list(entry.shape)} beside {list(min(expected))}")
    # An optimizer that keeps all of them in another form has another kind of moment.
    other = [text for text in other if alike[_last(text.partition(" ")[0])]]
    if other:
        yield Finding(
            "optimizer.shape",
            inside(part.path, other[0].partition(" ")[0]),
            f"{counted(len(other), 'moment')} {verb(len(other), 'has', 'have')} another shape than "
            f"the parameter: {some_of(other)}",
            expected="the shapes of the parameters",
            found=counted(len(other), "other shape"),
            next_command=command_line("explain", "optimizer.shape"),
        )


def _shapes_of_parameters(tensors: Mapping[str, TensorEntry]) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the tensors that are no moments, by FQN, and by FQN without the first word.

    Two networks may have parameters of one name below it.
    """
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for fqn, entry in tensors.items():
        if not is_moment_name(fqn):
            shapes[fqn].add(entry.shape)
            shapes[fqn.partition(".")[2]].add(entry.shape)
    return shapes


def _last(fqn: str) -> str:
    return fqn.rpartition(".")[2]


def _parameter_of(fqn: str) -> str:
    """The name of the parameter in that of its moment: `optim.state.layers.0.w.exp_avg`."""
    owner = fqn.rpartition(".")[0]
    _, state, name = owner.partition(".state.")
    return name if state else owner.partition(".")[2]


def _unchanged(opened: OpenStep, part: OpenPart, neighbours: Neighbours) -> Iterator[Finding]:
    """Yield `optimizer.unchanged` where weights have moved, and no moment has."""
    tensors = part.metadata[0].tensors
    trained = {_parameter_of(fqn) for fqn in tensors if is_moment_name(fqn)}
    moments: list[int] = []
    weights: list[int] = []
    for number in range(len(part.crcs)):
        entry = part.ranges.owner(number).entry
        if not isinstance(entry, TensorEntry) or not entry.shape or part.crcs[number] == NO_CRC:
            continue
        if is_moment_name(entry.fqn):
            moments.append(number)
        elif not trained.isdisjoint((entry.fqn, entry.fqn.partition(".")[2])):
            weights.append(number)
    moments, weights = _spread(moments), _spread(weights)
    before = compared_before(neighbours, part, [*moments, *weights])
    if before is None:
        return
    same = [n for n in moments if before.crcs.get(n) == part.crcs[n]]
    moved = [n for n in weights if n in before.crcs and before.crcs[n] != part.crcs[n]]
    if same and moved and all(n in same for n in moments if n in before.crcs):
        yield Finding(
            "optimizer.unchanged",
            inside(part.path, part.ranges.owner(same[0]).entry.fqn),
            f"all {counted(len(same), 'compared moment')} {verb(len(same), 'is', 'are')} as in "
            f"{before.opened.name} to the last bit, while {len(moved):,} of {len(weights):,} "
            "compared weights have moved: the state of the optimizer is that of an earlier step",
            expected="moments that moved with the weights",
            found="unchanged moments",
            next_command=command_line("diff", before.opened.url, opened.url, "--values"),
        )


def _spread(numbers: Sequence[int]) -> list[int]:
    return [*numbers[:: max(1, -(-len(numbers) // N_COMPARED))]]
