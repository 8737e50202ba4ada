"""Find known mistakes in a job script, an environment or a storage.

The mistakes in a script and a storage are found by modules of their own, those in an
environment here. Versions are read from the metadata of the installed packages; nothing is
imported, because importing torch takes seconds.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import ckptctl
from ckptctl.diagnostics.advice import CHECKS, Advice, Diagnosis, diagnosis, fault, warning
from ckptctl.diagnostics.slurm_checks import check_script
from ckptctl.diagnostics.slurm_script import read_script
from ckptctl.diagnostics.storage_traits import check_storage
from ckptctl.errors import UsageError
from ckptctl.findings import Severity
from ckptctl.formatting import command_line
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.outside_numbers import whole
from ckptctl.storage.logs import STDIN, read_bytes
from ckptctl.storage.opening import absolute_url

if TYPE_CHECKING:
    from typing_extensions import Unpack


SUBJECTS = ("slurm", "env", "storage")
_MAX_SCRIPT = 1 << 20


def doctor(
    what: str,
    target: str | None = None,
    *,
    known_variables: frozenset[str] = frozenset(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Diagnosis:
    """Diagnose `what`: `slurm` with a job script, `env`, or `storage` with a root.

    `what` alone may be the job script: its content shows what it is. A script is read, not run.
    The environment is that of this process; variables that begin with `CKPTCTL_` and are not in
    `known_variables`, if given, are reported as misspelt.
    For a storage, small files are written to a folder under the root's `.ckptctl/` and
    removed.

    Raises `UsageError` for another subject, a file that is no job script, or a wrong number of
    targets, and `StorageError`.
    """
    if what not in SUBJECTS and target is None and (what == STDIN or os.path.exists(what)):
        if os.path.isdir(what):
            raise UsageError(
                f"{what}: a folder; as a storage, small files would be written to it",
                next_command=command_line("doctor", "storage", what),
            )
        what, target = "slurm", what
    if what not in SUBJECTS:
        raise UsageError(
            f"doctor diagnoses {', '.join(SUBJECTS)} or a job script; {what!r} is neither of these "
            "words nor a file",
            next_command="ckptctl doctor env",
        )
    if (what == "env") != (target is None):
        needs = "takes no more arguments" if what == "env" else "needs one more argument"
        example = {"env": (), "slurm": ("JOB.sh",), "storage": ("ROOT",)}[what]
        raise UsageError(
            f"doctor {what} {needs}", next_command=command_line("doctor", what, *example)
        )
    if target is None:
        known = known_variables or frozenset(os.environ)
        advice, facts = check_environment(os.environ, known)
        return diagnosis(what, "this process", advice, facts)
    if what == "slurm":
        data = read_bytes(target, limit=_MAX_SCRIPT)
        text = data.decode("utf-8", "backslashreplace")
        if other := _other_than_a_script(text):
            raise UsageError(
                f"{target}: {other}, and no script for sbatch; doctor reads batch scripts only",
                next_command="ckptctl doctor --help",
            )
        script = read_script(text)
        found = check_script(os.path.basename(target), script)
        n_trainings = str(len(script.trainings))
        return diagnosis(what, target, found, (("commands that train", n_trainings),))
    storage = options_from(keywords, storage)
    advice, facts = check_storage(target, storage)
    following = command_line("scan", absolute_url(target))
    return diagnosis(what, target, advice, facts, following)


_MANIFEST = re.compile(r"^[\x22']?kind[\x22']?: *[\x22']?(\w+)", re.MULTILINE)
_MARKS_OF_A_SCRIPT = re.compile(r"^#SBATCH\b|^#!.*\b(?:ba|z|k|da|)sh\b", re.MULTILINE)


def _other_than_a_script(text: str) -> str | None:
    """What a file is that shows to be something else than a batch script; None for a script."""
    if _MARKS_OF_A_SCRIPT.search(text):
        return None
    kind = _MANIFEST.search(text)
    if kind is not None and re.search(r"^\s*[\x22']?apiVersion[\x22']?:", text, re.MULTILINE):
        return f"a manifest of Kubernetes ({kind[1]})"
    if text.lstrip()[:1] == "{":
        return "JSON"
    if re.match(r"#!.*\bpython|(?:import|from) \w+|\"\"\"", text.lstrip()):
        return "a program in Python"
    if "\x00" in text:
        return "binary data"
    return None


_PACKAGES = ("torch", "torchdata", "fsspec", "s3fs", "obstore", "zstandard", "botocore")
_LEAST = {"torch": (2, 4), "fsspec": (2024, 6), "s3fs": (2024, 6), "obstore": (0, 12)}
_EXTRAS = {"torch": "torch", "s3fs": "s3", "obstore": "obstore", "zstandard": "zstd"}
_LEAST_FILES = 4096
_LEAST_SHM = 1 << 30
_OFF = ("0", "false", "no", "off")

_WAITS = "a rank whose peer died waits forever"
# Variable, harmful values (empty: any), severity, effect.
_VARIABLES: tuple[tuple[str, tuple[str, ...], Severity, str], ...] = (
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), Severity.FAULT, f"{_WAITS}; 3 is torch's default"),
    ("NCCL_ASYNC_ERROR_HANDLING", ("0",), Severity.FAULT, _WAITS),
    (
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        ("1", "y", "yes", "true"),
        Severity.FAULT,
        "torch.load runs code from checkpoints",
    ),
    (
        "PYTHONOPTIMIZE",
        (),
        Severity.WARNING,
        "assert is disabled, including torch's checks during a load",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        ("1",),
        Severity.WARNING,
        "every kernel launch blocks: training is slow, and hangs show up differently",
    ),
    ("NCCL_DEBUG", ("TRACE",), Severity.WARNING, "NCCL logs every call; WARN logs its errors"),
    (
        "TORCHELASTIC_USE_AGENT_STORE",
        _OFF,
        Severity.NOTE,
        "the rendezvous store ends with rank 0",
    ),
)


def check_environment(
    environment: Mapping[str, str], known: frozenset[str]
) -> tuple[tuple[Advice, ...], tuple[tuple[str, str], ...]]:
    """The mistakes in the environment, and its facts. `known` are ckptctl's own variables."""
    versions = {name: _version(name) for name in _PACKAGES}
    installed = ((name, version or "not installed") for name, version in versions.items())
    facts = (("ckptctl", ckptctl.__version__), ("python", platform.python_version()), *installed)
    advice = (
        *_versions(versions),
        *_variables(environment),
        *_own_variables(environment, known),
        *_limits(environment),
    )
    return advice, facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")
    return tuple(number for part in parts if (number := whole(part)) is not None)


def _versions(versions: Mapping[str, str | None]) -> Iterator[Advice]:
    for name, least in _LEAST.items():
        version = versions[name]
        if version is not None and _numbers(version) < least:
            wanted = ".".join(map(str, least))
            yield Advice(
                "package.old",
                Severity.FAULT,
                name,
                f"{name} {version} is older than {wanted}, the oldest supported version",
                f"pip install '{name}>={wanted}'",
            )
    fsspec, s3fs = versions["fsspec"], versions["s3fs"]
    if fsspec and s3fs and _numbers(fsspec)[:2] != _numbers(s3fs)[:2]:
        yield Advice(
            "package.pair",
            Severity.FAULT,
            "s3fs",
            f"s3fs {s3fs} requires fsspec {s3fs}, but fsspec {fsspec} is installed",
            f"pip install 's3fs=={fsspec}'",
        )
    for name, extra in _EXTRAS.items():
        if versions[name] is None:
            yield Advice(
                "package.absent",
                Severity.NOTE,
                name,
                f"{name} is not installed; commands that need it fail with an error that names it",
                f"pip install 'ckptctl[{extra}]'",
            )


def _variables(environment: Mapping[str, str]) -> Iterator[Advice]:
    unset = CHECKS["variable.harmful"].fix
    for name, values, severity, does in _VARIABLES:
        value = environment.get(name)
        if value and (not values or value.lower() in [each.lower() for each in values]):
            yield Advice("variable.harmful", severity, name, f"{name}={value}: {does}", unset)
    if environment.get("RANK") and not environment.get("WORLD_SIZE"):
        yield fault(
            "variable.half",
            "RANK",
            f"RANK={environment['RANK']} without WORLD_SIZE: each process acts as a job of its own",
        )
    if environment.get("SLURM_JOB_ID") and not environment.get("PYTHONUNBUFFERED"):
        yield Advice(
            "variable.buffered",
            Severity.NOTE,
            "PYTHONUNBUFFERED",
            "Python buffers its output: the last lines before a kill are lost",
            CHECKS["variable.buffered"].fix,
        )
    folder = environment.get("TMPDIR")
    if folder and not os.access(folder, os.W_OK):
        yield fault(
            "variable.tmpdir",
            "TMPDIR",
            f"TMPDIR={folder} cannot be written to",
        )


def _own_variables(environment: Mapping[str, str], known: frozenset[str]) -> Iterator[Advice]:
    for name in sorted(environment):
        if name.startswith("CKPTCTL_") and name not in known:
            yield fault(
                "variable.unknown",
                name,
                f"ckptctl has no variable {name}: it has no effect",
            )


def _limits(environment: Mapping[str, str]) -> Iterator[Advice]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield warning(
            "limit.files",
            "ulimit -n",
            f"a process may open {files:,} files; data loaders and sharded saves need more",
        )
    try:
        shared = shutil.disk_usage("/dev/shm").total  # noqa: S108 - its size is asked for
    except OSError:
        return
    if shared < _LEAST_SHM and "KUBERNETES_SERVICE_HOST" in environment:
        yield warning(
            "limit.shm",
            "/dev/shm",  # noqa: S108
            f"shared memory is {shared >> 20:,} MiB: workers of data loaders end with a bus error",
        )
