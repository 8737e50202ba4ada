"""The state that a load fills, by the names of the entries of the step.

A tensor of the job is read in place. Names that belong to one tensor, such as those of tied
weights, are read apart and compared: one of their values would be lost otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptctl.errors import ModelDiffers, UsageError
from ckptctl.formatting import counted
from ckptctl.model import Metadata
from ckptctl.train.differences import Differences, RankEntries, names_in
from ckptctl.train.state import Parts, check_has_memory, local_tensors


class Wanted:
    """The state that a load fills on this rank, by the names of the entries of the step.

    `saved` is the step as this rank sees it, `own` are the names in it that differ, and `values`
    those that were read before, by their names here. `groups` are the groups of parameters of this
    job's optimizers, as they are before the load.
    """

    def __init__(
        self,
        state: dict[str, Any],
        saved: Metadata,
        own: Mapping[str, str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        self.state = state
        groups = state.get("optimizer", {}).get("param_groups", ())
        self.groups: tuple[dict[str, Any], ...] = tuple(map(dict, groups))
        self._saved = saved
        self._own = own or {}
        self._values = values or {}
        self._flat, self._paths = flatten_state_dict(state)
        self._tied = dict(self._ties())

    def entries(self, parts: Parts, names: Iterable[str]) -> RankEntries:
        """What this rank loads of the step, whose entries have these names.

        Raises `ModelDiffers` if the step was saved by another model or optimizer, and
        `UsageError` for a tensor that nothing can be loaded into: no older step avoids that.
        """
        self._check_fits(parts)
        tensors = self._saved.tensors
        loaded = {self._own.get(name, name) for name in self._flat}
        digits = "".join("01"[name in loaded] for name in names)
        casts = {
            (name.partition(".")[0], tensors[name].dtype, str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors()
            if name in tensors
        }
        return RankEntries(
            int(digits or "0", 2),
            tuple(name for name in self._flat if not self._is_saved(name)),
            parts.given,
            len(self.groups),
            frozenset(one for one in casts if one[1] != one[2]),
        )

    def fill(
        self, differences: Differences, read: Callable[[dict[str, Any]], None]
    ) -> tuple[str, ...]:
        """Fill the state by `read`, which reads the entries of the step into what it is given.

        An optimizer that is not kept is taken out of the state. Returns what is lost: the tensors
        that are one in this job, and differ in the step.
        """
        if not differences.keeps_optimizer:
            del self.state["optimizer"]
        request = self._request(differences)
        read(request)
        return self._put(request)

    def _request(self, differences: Differences) -> dict[str, Any]:
        """What the load reads: a dict for each kind of state, by the rest of the name.

        Kinds of state rather than names are the keys, because torch gathers the keys of all ranks.
        """
        left_out: tuple[str, ...] = ()
        if not differences.keeps_options:
            left_out = ("optimizer.param_groups." if differences.keeps_optimizer else "optimizer.",)
        request: dict[str, Any] = {}
        for name, value in self._flat.items():
            is_read = name in self._values or not self._is_saved(name)
            if is_read or name.startswith(left_out):
                continue
            if name in self._tied:
                value = value.detach().clone()
            kind, _, rest = self._own.get(name, name).partition(".")
            if rest:
                request.setdefault(kind, {})[rest] = value
            else:
                request[kind] = value
        return request

    def _put(self, loaded: Mapping[str, Any]) -> tuple[str, ...]:
        """Put the values of a request that was loaded into the state; tensors are there already."""
        lost = []
        plain = {name: one for one, name in self._own.items()}
        for kind, values in loaded.items():
            for rest, value in values.items() if isinstance(values, dict) else (("", values),):
                name = f"{kind}.{rest}" if rest else kind
                name = plain.get(name, name)
                first = self._tied.get(name)
                if first is not None:
                    if not _same_bits(value, self._flat[first]):
                        lost.append(
                            f"{kind.removesuffix('_tensors')} ({first} and {name} are one tensor "
                            "in this job, and differ in the step)"
                        )
                    continue
                self._set(name, value)
        for name in self._values.keys() & self._paths.keys():
            if self._paths[name][0] in self.state:
                self._set(name, self._values[name])
        return tuple(lost)

    def _set(self, name: str, value: Any) -> None:
        path = self._paths[name]
        container: Any = self.state
        for part in path[:-1]:
            container = container[_key(container, part)]
        container[_key(container, path[-1])] = value

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Each name of the step whose tensor has another name before it, and that name."""
        first: dict[object, str] = {}
        for name, tensor in self._tensors():
            if not self._is_saved(name) or hasattr(tensor, "local_shards"):
                continue
            (local,) = local_tensors(tensor)
            if not local.numel() or local.is_meta or str(local.layout) != "torch.strided":
                continue
            place = local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
            if name != first.setdefault(place, name):
                yield name, first[place]

    def _is_saved(self, name: str) -> bool:
        return name in self._saved.tensors or name in self._saved.bytes_entries

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, value in self._flat.items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def _check_fits(self, parts: Parts) -> None:
        differing = []
        for name, value in self._flat.items():
            is_tensor = name in self._saved.tensors
            if self._is_saved(name) and is_tensor != hasattr(value, "layout"):
                here = type(value).__name__
                there = "a tensor" if is_tensor else "another value"
                raise ModelDiffers(
                    f"{name} is a {here} here and {there} in the step; it was saved by a different "
                    "model or optimizer"
                )
        for name, tensor in self._tensors():
            for local in local_tensors(tensor):
                _check_can_be_written(name, local)
            entry = self._saved.tensors.get(name)
            if entry is not None and entry.shape != tuple(tensor.shape):
                differing.append(
                    f"{name} is {tuple(tensor.shape)} here and {entry.shape} in the step"
                )
        if differing:
            raise ModelDiffers(
                f"{counted(len(differing), 'tensor')} of this job have another shape in the step: "
                f"{differing[0]}; it was saved by a different model"
            )
        if parts.model is not None:
            self._check_naming("model", list(self.state.get("model", ())), 1)
        groups = self.state.get("optimizer", {}).get("param_groups", ())
        self._check_naming("optimizer", [fqn for one in groups for fqn in one["params"]], 2)

    def _check_naming(self, kind: str, own: Sequence[str], depth: int) -> None:
        """Raise `ModelDiffers` if the step has state of other parameters only."""
        saved = {
            str(entry.path[depth])
            for entry in self._saved.tensors.values()
            if entry.path[0] == kind and entry.path[depth:]
            if depth == 1 or entry.path[1] == "state"
        }
        if own and saved and not saved.intersection(own):
            raise ModelDiffers(
                f"the step holds {kind} state of other names: {own[0]} of this job is not in it; "
                f"{_naming(kind, self._saved)}"
            )


def _key(container: Any, part: str | int) -> Any:
    """The key of a container that DCP names by `part`: it makes text of the keys of a dict."""
    if not isinstance(container, dict) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


def _check_can_be_written(name: str, tensor: Any) -> None:
    """Raise `UsageError` for a tensor without memory, or of which elements share their memory."""
    check_has_memory(name, tensor)
    is_strided = str(tensor.layout) == "torch.strided"
    steps = zip(tensor.shape, tensor.stride(), strict=True) if is_strided else ()
    if tensor.numel() and any(n > 1 and step == 0 for n, step in steps):
        raise UsageError(
            f"{name} is an expanded view, whose elements share their memory, so it cannot be "
            "loaded into: clone() it, or register it with persistent=False"
        )


def _naming(kind: str, saved: Metadata) -> str:
    """How the step names the tensors of this kind, as the reason why a name is not in it."""
    names = [name for name in saved.tensors if name.startswith(f"{kind}.")]
    return f"it holds {names[0]}, and was saved by a different model or optimizer"


def kinds_in(saved: Metadata) -> frozenset[str]:
    """The kinds of state that a step contains: the first names of its entries."""
    return frozenset(name.partition(".")[0] for name in names_in(saved))


def _same_bits(one: Any, other: Any) -> bool:
    """Whether the parts of two tensors on this rank have equal bits, which NaN has with itself."""
    import torch

    pairs = zip(local_tensors(one), local_tensors(other), strict=True)
    return all(
        torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        for ours, theirs in pairs
    )
