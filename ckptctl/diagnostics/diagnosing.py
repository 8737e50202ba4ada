"""Find known mistakes in a job script, an environment or a storage.

The mistakes in a script are found by `slurm`, those in an environment and a storage here.
Versions are read from the metadata of the installed packages; nothing is
imported, because importing torch takes seconds.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Unpack

import ckptctl
from ckptctl.diagnostics.advice import CHECKS, Advice, Diagnosis, advice_of, diagnosis
from ckptctl.diagnostics.slurm import check_script, read_script
from ckptctl.errors import AlreadyExists, PathNotFound, StorageError, UsageError
from ckptctl.findings import Severity
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formatting import command_line
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.outside_numbers import whole
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import check_root_there
from ckptctl.storage.contract import Store, read_range, storage_time_s
from ckptctl.storage.logs import STDIN, read_bytes
from ckptctl.storage.opening import absolute_url, join_url, open_store

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
    (storage,) = options_from(keywords, storage)
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
            fix = f"pip install '{name}>={wanted}'"
            yield advice_of("package.old", name, f"{name} {version} is older than {wanted}", fix)
    fsspec, s3fs = versions["fsspec"], versions["s3fs"]
    if fsspec and s3fs and _numbers(fsspec)[:2] != _numbers(s3fs)[:2]:
        fix = f"pip install 's3fs=={fsspec}'"
        yield advice_of("package.pair", "s3fs", f"s3fs {s3fs} with fsspec {fsspec}", fix)
    for name, extra in _EXTRAS.items():
        if versions[name] is None:
            yield advice_of("package.absent", name, name, f"pip install 'ckptctl[{extra}]'")


def _variables(environment: Mapping[str, str]) -> Iterator[Advice]:
    unset = CHECKS["variable.harmful"].fix
    for name, values, severity, does in _VARIABLES:
        value = environment.get(name)
        if value and (not values or value.lower() in [each.lower() for each in values]):
            yield Advice("variable.harmful", severity, name, f"{name}={value}: {does}", unset)
    if environment.get("RANK") and not environment.get("WORLD_SIZE"):
        yield advice_of("variable.half", "RANK", f"RANK={environment['RANK']}")
    if environment.get("SLURM_JOB_ID") and not environment.get("PYTHONUNBUFFERED"):
        yield advice_of("variable.buffered", "PYTHONUNBUFFERED")
    folder = environment.get("TMPDIR")
    if folder and not os.access(folder, os.W_OK):
        yield advice_of("variable.tmpdir", "TMPDIR", f"TMPDIR={folder}")


def _own_variables(environment: Mapping[str, str], known: frozenset[str]) -> Iterator[Advice]:
    for name in sorted(environment):
        if name.startswith("CKPTCTL_") and name not in known:
            yield advice_of("variable.unknown", name)


def _limits(environment: Mapping[str, str]) -> Iterator[Advice]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        yield advice_of("limit.files", "ulimit -n", f"a process may open {files:,} files")
    try:
        shared = shutil.disk_usage("/dev/shm").total  # noqa: S108 - its size is asked for
    except OSError:
        return
    if shared < _LEAST_SHM and "KUBERNETES_SERVICE_HOST" in environment:
        yield advice_of("limit.shm", "/dev/shm", f"{shared >> 20:,} MiB")  # noqa: S108


# The properties of a storage that checkpoints need. Small files in a folder under `.ckptctl/` are
# written, listed, read, replaced and created by several concurrent writers, and removed. Neither
# speed nor large amounts of data are tested.


_BYTES = 65536
_ROUNDS = 3
_WRITERS = 4
_REPLACEMENTS = 10
_CLOCK_S = 60.0


def check_storage(
    url: str, storage: StorageOptions
) -> tuple[tuple[Advice, ...], tuple[tuple[str, str], ...]]:
    """The faults of the storage under a root, and facts about it.

    Raises `StorageUnavailable` and `AccessDenied` if the storage did not answer or is not
    writable, `PathNotFound` and `UsageError` if the root does not exist. Written files are
    always removed.
    """
    with open_store(url, storage) as store:
        begun = time.monotonic()
        check_root_there(store, list_root(store))
        answered = time.monotonic() - begun
        folder = f"{OWN_FOLDER}/doctor-{secrets.token_hex(6)}"
        facts = [("kind", store.kind.value), ("a listing takes", f"{answered * 1000:.0f} ms")]
        try:
            advice = [each for each in _observations(store, folder, facts) if each is not None]
        finally:
            left = _removed(store, folder)
    if left is not None:
        advice.append(left)
    return tuple(advice), tuple(facts)


def _observations(
    store: Store, folder: str, facts: list[tuple[str, str]]
) -> Iterator[Advice | None]:
    for name, test in (
        ("a listing shows new files at once", _listing),
        ("a read after an overwrite returns the new bytes", _overwriting),
        ("one of several concurrent writers succeeds, the others get an error", _exclusive),
        ("a reader sees the old file or the new one", _atomic),
        ("the clock agrees with this machine", _clock),
    ):
        found = test(store, folder)
        facts.append((name, "yes" if found is None else "no"))
        yield found


def _listing(store: Store, folder: str) -> Advice | None:
    names = [f"{folder}/listed-{number}" for number in range(_ROUNDS)]
    for name in names:
        store.put(name, bytes(_BYTES))
    listed = {info.path: info.size for info in store.list_dir(folder)}
    if all(listed.get(name) == _BYTES for name in names):
        return None
    missing = sum(listed.get(name) != _BYTES for name in names)
    detail = f"{missing} of {_ROUNDS} new files are missing from the listing"
    return advice_of("storage.listing", store.url, detail)


def _overwriting(store: Store, folder: str) -> Advice | None:
    name = f"{folder}/replaced"
    for fill in (b"a", b"b", b"c"):
        store.put(name, fill * _BYTES, replace=True)
        if store.read(name, limit=_BYTES) != fill * _BYTES:
            return advice_of("storage.stale", store.url, "the old bytes were returned")
    if read_range(store, name, _BYTES - 10, 10) != b"c" * 10:
        return advice_of("storage.ranges", store.url, "other bytes were returned")
    return None


def _exclusive(store: Store, folder: str) -> Advice | None:
    ready = threading.Barrier(_WRITERS)

    def succeeds(name: str, writer: int) -> bool:
        ready.wait()
        with suppress(AlreadyExists):
            store.put(name, bytes([writer]) * 100)
            return True
        return False

    for number in range(_ROUNDS):
        with ThreadPoolExecutor(_WRITERS) as pool:
            n_won = sum(pool.map(partial(succeeds, f"{folder}/won-{number}"), range(_WRITERS)))
        if n_won != 1:
            detail = f"{n_won} of {_WRITERS} writers of one new file succeeded"
            return advice_of("storage.exclusive", store.url, detail)
    return None


def _atomic(store: Store, folder: str) -> Advice | None:
    name = f"{folder}/swapped"
    store.put(name, b"0" * _BYTES)
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                data = store.read(name, limit=_BYTES)
            except PathNotFound:
                wrong.append("the file was briefly missing")
                return
            if len(set(data)) != 1 or len(data) != _BYTES:
                wrong.append("a reader saw part of the new file")
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        for number in range(_REPLACEMENTS):
            store.put(name, str(number).encode() * _BYTES, replace=True)
    finally:
        done.set()
        reader.join()
    if not wrong:
        return None
    return advice_of("storage.atomic", store.url, f"while a file was replaced, {wrong[0]}")


def _clock(store: Store, folder: str) -> Advice | None:
    before = time.time()
    at = storage_time_s(store, f"{folder}/clock")
    if before - _CLOCK_S <= at <= time.time() + _CLOCK_S:
        return None
    detail = f"a new file has a time {at - before:+.0f} s from the clock of this machine"
    return advice_of("storage.clock", store.url, detail)


def _removed(store: Store, folder: str) -> Advice | None:
    try:
        with suppress(PathNotFound):
            for info in store.list_dir(folder):
                store.remove(info.path)
        if store.folders is not None:
            store.remove(folder)
    except (StorageError, OSError) as error:
        return advice_of("storage.left", join_url(store.url, folder), str(error))
    return None
