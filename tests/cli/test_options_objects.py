"""No option that a command or a function takes is lost on the way to where it decides.

Each command is run with every option of its options objects given, none at its default. A
profile function watches the real run: it notes the objects that reach the functions which
inspect, choose and open stores.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import get_type_hints

import pytest

import ckptctl
from ckptctl import ContentOptions, Level, PickPolicy, Requirements, StorageOptions, TrainOptions
from ckptctl import options as options_module
from ckptctl.cli.app import run
from ckptctl.cli.commands import command_of
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.options import options_from
from ckptctl.selection.choosing import Search
from ckptctl.selection.retention import RetentionPlan
from ckptctl.selection.verifying import content_asked, open_target
from ckptctl.storage.opening import open_store

KEY = b"a key that is long enough"
PATTERN = r"step_(?P<step>[0-9]+)"

GIVEN: dict[type, dict[str, tuple[str, object]]] = {
    PickPolicy: {
        "level": ("--level=listing", Level.LISTING),
        "allow_missing_state": ("--allow-missing-state", True),
        "accept_unverifiable": ("--accept-unverifiable", True),
        "before": ("--before=1000000", 1_000_000),
        "skip": ("--skip=7,8", frozenset({7, 8})),
        "max_fallback": ("--max-fallback=5", 5),
        "ignore": ("--ignore=*.npz,corpus", ("*.npz", "corpus")),
    },
    Requirements: {
        "pattern": (f"--pattern={PATTERN}", PATTERN),
        "require": ("--require=model", ("model",)),
        "world_size": ("--world-size=2", 2),
        "saved_world_size": ("--saved-world-size=2", 2),
        "grace_s": ("--grace=7", 7.0),
        "require_seal": ("--require-seal", True),
        "key": ("--key-file=key", KEY),
        "remote_checksums": ("--remote-checksums", True),
        "marks": ("--marks=marks.jsonl", "marks.jsonl"),
    },
    ContentOptions: {
        "subset": ("--subset=1/1", "1/1"),
        "deadline_s": ("--deadline=1h", 3600.0),
        "jobs": ("--jobs=1", 1),
        "nan_scan": ("--nan-scan", True),
    },
    StorageOptions: {
        "storage_options": ("--storage-option=anon=true", {"anon": True}),
        "endpoint_url": ("--endpoint-url=http://localhost:1", "http://localhost:1"),
        "timeout_s": ("--timeout=11", 11.0),
    },
}
"""For each field, an option of the command line and the value that must arrive."""


@dataclass
class Seen:
    """The objects that reached each function that decides by them."""

    requirements: list[Requirements] = field(default_factory=list)
    policies: list[PickPolicy] = field(default_factory=list)
    contents: list[ContentOptions] = field(default_factory=list)
    storages: list[StorageOptions] = field(default_factory=list)

    def of(self, kind: type) -> list[object]:
        lists = (self.requirements, self.policies, self.contents, self.storages)
        kinds = (Requirements, PickPolicy, ContentOptions, StorageOptions)
        return list(dict(zip(kinds, lists, strict=True))[kind])


@contextmanager
def watched() -> Iterator[Seen]:
    """Note the options of each call that decides, in every thread, while this lasts."""
    seen = Seen()
    takers: dict[CodeType, Callable[[FrameType], None]] = {
        inspect_step.__code__: lambda f: seen.requirements.append(f.f_locals["requirements"]),
        inspect.unwrap(open_target).__code__: lambda f: seen.requirements.append(
            f.f_locals["requirements"]
        ),
        Search.choose.__code__: lambda f: seen.policies.append(f.f_locals["self"].policy),
        RetentionPlan.__init__.__code__: lambda f: seen.policies.append(f.f_locals["rules"].policy),
        content_asked.__code__: lambda f: seen.contents.append(f.f_locals["content"]),
        open_store.__code__: lambda f: seen.storages.append(
            *options_from(f.f_locals["keywords"], f.f_locals["storage"])
        ),
    }

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in takers:
            takers[frame.f_code](frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def offered(command: str) -> set[str]:
    """The names of the options that a command has."""
    return {name for each in command_of(command).params for name in each.opts}


@pytest.fixture
def sealed_root(sound_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sound root, each step sealed with the key that the options name."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    for number in (10, 20, 30):
        ckptctl.seal(f"{sound_root}@{number}", key=KEY, accept_unverifiable=True, jobs=1)
    return sound_root


COMMANDS: dict[str, tuple[tuple[str, ...], Sequence[type]]] = {
    "pick": (("pick", "ROOT"), (PickPolicy, Requirements, StorageOptions)),
    "scan": (("scan", "ROOT"), (PickPolicy, Requirements, StorageOptions)),
    "preflight": (
        ("preflight", "ROOT", "--probe-storage"),
        (Requirements, StorageOptions),
    ),
    "verify": (
        ("verify", "ROOT@30", "--level=content"),
        (Requirements, ContentOptions, StorageOptions),
    ),
    "verify auto": (("verify", "ROOT@auto"), (Requirements, StorageOptions)),
    "seal": (("seal", "ROOT@30", "--replace"), (Requirements, StorageOptions)),
    "prune": (("prune", "ROOT", "--keep=1"), (Requirements, StorageOptions)),
    "run": (("run", "--root=ROOT", "--", "true"), (Requirements, StorageOptions)),
    "show": (("show", "ROOT@30"), (Requirements, StorageOptions)),
    "reject": (("reject", "ROOT@30", "--reason=test"), (Requirements, StorageOptions)),
    "diff": (("diff", "ROOT@30", "ROOT@20"), (Requirements, StorageOptions)),
    "reshard": (("reshard", "ROOT@30", "new/step_30"), (Requirements, StorageOptions)),
    "convert": (("convert", "ROOT@30", "new.pt"), (Requirements, StorageOptions)),
}

# `@auto` is the step that `pick` takes, which compares no checksums of the store. Options of
# one name that mean something else in a command are not those of the object.
OWN = {
    "verify": {"level"},
    "verify auto": {"level", "remote_checksums", "subset", "deadline_s", "jobs", "nan_scan"},
    "prune": {"level"},
    "seal": {"accept_unverifiable", "jobs"},
    "reshard": {"world_size", "accept_unverifiable", "jobs", "key"},
    "convert": {"world_size", "accept_unverifiable", "jobs", "key"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_a_command_offers_arrives_where_it_decides(name, sealed_root, capsys):
    words, kinds = COMMANDS[name]
    there, own = offered(words[0]), OWN.get(name, set())
    if name == "reshard":
        words = (*words, "--world-size=1")
    taken = {
        kind: {
            field_name: value
            for field_name, (word, value) in given.items()
            if word.partition("=")[0] in there and field_name not in own
        }
        for kind, given in GIVEN.items()
    }
    options = [GIVEN[kind][one][0] for kind, values in taken.items() for one in values]
    at = words.index("--") if "--" in words else len(words)
    argv = [*words[:at], *options, *words[at:]]
    with watched() as seen:
        code = run([word.replace("ROOT", str(sealed_root)) for word in argv])
    assert code != 2, capsys.readouterr().err
    for kind in kinds:
        assert taken[kind], f"{name} offers nothing of {kind.__name__}"
        arrived = seen.of(kind)
        assert arrived, f"no {kind.__name__} arrived"
        for one in arrived:
            values = {field_name: getattr(one, field_name) for field_name in taken[kind]}
            assert values == taken[kind], (name, kind)


def test_preflight_compares_the_newest_steps_under_the_requirements_of_the_choice(sealed_root):
    requirements = Requirements(require_seal=True, key=KEY, marks="marks.jsonl", grace_s=7)
    with watched() as seen:
        ckptctl.preflight(
            str(sealed_root),
            probe_storage=True,
            requirements=requirements,
            policy=PickPolicy(before=25),
        )
    assert [policy.before for policy in seen.policies] == [25, None]
    assert {replace(one, world_size=None) for one in seen.requirements} == {requirements}


# Functions


KEYWORDS = {
    "StorageKeywords": (StorageOptions,),
    "StepKeywords": (Requirements, StorageOptions),
    "PickKeywords": (PickPolicy, Requirements, StorageOptions),
    "TrainKeywords": (TrainOptions, PickPolicy, Requirements, StorageOptions),
    "VerifyKeywords": (ContentOptions, Requirements, StorageOptions),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_keywords_of_a_function_are_the_fields_of_its_objects(name):
    stated = get_type_hints(getattr(options_module, name))
    hints = {
        key: value
        for kind in KEYWORDS[name]
        for key, value in get_type_hints(kind).items()
        if key in {each.name for each in fields(kind)}
    }
    for key in {"level", "prefer"}.intersection(hints):
        hints[key] = hints[key] | str  # a keyword may be the word
    assert stated == hints


def takers() -> Iterator[tuple[str, inspect.Signature]]:
    """The public functions and classes that take options objects."""
    from ckptctl import train

    names = ["Checkpointer", "LossGuard", "Reader", "resolve"]
    found = {f"train.{name}": getattr(train, name) for name in names}
    found |= {name: getattr(ckptctl, name) for name in ckptctl.__all__ if name.islower()}
    for name, function in found.items():
        signature = inspect.signature(function)
        if "storage" in signature.parameters:
            yield name, signature


def test_each_public_function_takes_the_fields_of_its_objects_as_keywords_and_no_others():
    pytest.importorskip("torch")
    seen = set()
    for name, signature in takers():
        parameters = signature.parameters
        kinds = {
            kind.__name__
            for kind in (StorageOptions, Requirements, PickPolicy, ContentOptions, TrainOptions)
            for each in parameters.values()
            if each.annotation == kind.__name__
        }
        keywords = parameters["keywords"].annotation.removeprefix("Unpack[").removesuffix("]")
        assert {kind.__name__ for kind in KEYWORDS[keywords]} == kinds, name
        own = {field_name for kind in KEYWORDS[keywords] for field_name in kind.__slots__}
        # A field that is a parameter as well would be taken by it, and never reach the object.
        assert not own & set(parameters), name
        seen.add(name)
    assert {"pick", "scan", "verify", "seal", "prune", "preflight", "train.resolve"} <= seen


def test_a_keyword_wins_over_the_field_of_an_object():
    (made,) = options_from(
        {"timeout_s": 3.0}, StorageOptions(timeout_s=9.0, endpoint_url="http://a")
    )
    assert made == StorageOptions(timeout_s=3.0, endpoint_url="http://a")


def test_an_unknown_keyword_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        ckptctl.pick("run", nonsense=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Requirements(require=("brains",)), "no kind of train state"),
        (lambda: Requirements(world_size=0), "--world-size is 0"),
        (lambda: Requirements(saved_world_size=0), "--saved-world-size is 0"),
        (lambda: Requirements(grace_s=-1), "--grace is -1"),
        (lambda: Requirements(grace_s=float("nan")), "--grace is nan"),
        (lambda: Requirements(key=b"short"), "the key for seals has 5 bytes"),
        (lambda: PickPolicy(level="deep"), "'deep' is not a level"),
        (lambda: PickPolicy(max_fallback=-1), "--max-fallback is -1"),
        (lambda: ContentOptions(jobs=0), "--jobs is 0"),
        (lambda: ContentOptions(deadline_s=-1), "--deadline is -1"),
    ],
)
def test_an_options_object_refuses_a_wrong_value_when_it_is_made(make, message):
    with pytest.raises(ckptctl.UsageError, match=message):
        make()


def test_the_key_and_the_storage_options_are_not_printed():
    printed = repr((Requirements(key=KEY), StorageOptions(storage_options={"secret": "hunter2"})))
    assert "hunter2" not in printed
    assert "long enough" not in printed
