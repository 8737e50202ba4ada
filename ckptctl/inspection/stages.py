"""The stages of an inspection, in order.

Each stage takes the open step and what was found so far, and yields findings; what
later stages and the report need besides, it writes into `StageContext`. A stage that does not
apply (at this level, or without a seal) yields nothing. Replacing one finding by
another that explains it is left to the report, see `inspecting.settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ckptctl.errors import ObjectArchived, PathNotFound
from ckptctl.findings import NEVER_FINISHED, ByStore, Claim, Finding, Severity, Verdict, verdict_of
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import kind_of_file, may_hold_state
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.formats.own.seals import SEAL, Seal
from ckptctl.formatting import command_line, counted
from ckptctl.inspection.coverage import check_part_coverage
from ckptctl.inspection.file_kinds import check_gone, check_owners
from ckptctl.inspection.identity import check_counts, decide_identity, number_in_metadata
from ckptctl.inspection.one_save import check_one_save
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.pickles import PickleReader, inspect_pickles
from ckptctl.inspection.predecessor import check_renamed, check_step_before
from ckptctl.inspection.presence import (
    check_holds_anything,
    check_key_paths,
    check_presence,
    check_sizes,
)
from ckptctl.inspection.rank_files import (
    check_named,
    check_rank_files,
    check_stated_ranks,
    may_hold_weights,
    stated_ranks,
    unlisted,
)
from ckptctl.inspection.safetensors import check_safetensors
from ckptctl.inspection.seals import NOTHING_NOTED, Notes, is_trusted, read_notes
from ckptctl.inspection.shape import (
    check_own_number,
    check_shape,
    check_unchanged,
    claims_further,
    empty_file,
    sidecars_of,
)
from ckptctl.inspection.sidecars import (
    check_documents,
    copied_weights,
    tensors_in_header,
    value_in_archive,
)
from ckptctl.inspection.structure import MAX_QUICK_READS
from ckptctl.inspection.train_state import (
    NO_STATE,
    Sources,
    check_optimizer_steps,
    steps_by_optimizer,
    steps_by_rank,
    train_state,
)
from ckptctl.inspection.whole import Wholeness, check_uncounted, decide_whole
from ckptctl.model import SHARDED, Level, Part, PartFormat, Step, TrainState
from ckptctl.options import Requirements
from ckptctl.records.reads import read_headers, read_indexes
from ckptctl.storage.contract import ShortRead, Span, Store, StoreKind

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked, ContentInspection


class SealBytes(Enum):
    """How an inspection compares the bytes of a step whose seal is required."""

    COMPARED = "the level is raised to `content`"
    AT_LEVEL = "they are compared only if the level that was asked for does"
    LATER = "another inspection compares them"


@dataclass(slots=True)
class StageContext:
    """What an inspection was asked for, and what its stages have found so far.

    `readable` are the paths of parts without a fault in listing and metadata, `sound`
    those without one in their records too. `content` is there once the bytes were read. With
    `chooses_level` nobody asked for a level, and the stage `metadata` chooses it by its cost.
    `contents` are decoded files by path, `copies` those of them that are copies of weights;
    `reads_files`: files of train state are read at this level.
    """

    requirements: Requirements
    level: Level
    asked: Asked | None = None
    confirm: bool = True
    chooses_level: bool = False
    seal_bytes: SealBytes = SealBytes.AT_LEVEL
    findings: list[Finding] = field(default_factory=list)
    readable: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)
    state: TrainState = NO_STATE
    notes: Notes = NOTHING_NOTED
    content: ContentInspection | None = None
    by_store: ByStore | None = None
    pickles: PickleReader | None = None
    identity: Claim | None = None
    wholeness: Wholeness | None = None
    one_save: Claim | None = None
    reads_files: bool = False
    contents: Mapping[str, object] = field(default_factory=dict)
    copies: Collection[str] = ()
    ranks_counted: bool = True

    @property
    def is_deep(self) -> bool:
        """The level asks for more than the listing and the metadata."""
        return self.level.place >= Level.STRUCTURE.place

    def places(self, code: str) -> set[str]:
        """Where the findings of a code are."""
        return {finding.where for finding in self.findings if finding.code == code}

    def reads_small_files(self, opened: OpenStep) -> bool:
        """Whether small files are read at this level: each is a request on an object store."""
        return self.is_deep or opened.store.kind is not StoreKind.OBJECT

    @property
    def faults(self) -> list[Finding]:
        """The faults that were found so far."""
        return [finding for finding in self.findings if finding.severity is Severity.FAULT]


Stage = Callable[[OpenStep, StageContext], Iterable[Finding]]


def names(opened: OpenStep, _context: StageContext) -> Iterator[Finding]:
    """Check the names in the step directory."""
    unfinished = isinstance(opened.named, StepName) and opened.named.unfinished
    return check_shape(opened.step, unfinished=unfinished)


def links(opened: OpenStep, _context: StageContext) -> Iterator[Finding]:
    """Raise `LinkNotFollowed` where a file that may hold state is a link: nothing is known of it.

    Cost: none without such a link.
    """
    for file in opened.files:
        is_linked = file.kind == "link" and layouts.is_saved(file.path)
        if is_linked and may_hold_state(file.path):
            for _ in opened.store.read_spans([Span(opened.in_store(file.path), 0, 1)]):
                pass  # replaced by a file meanwhile, which `unchanged` reports
    yield from ()


def metadata(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Check each part by its metadata, or by the headers of its safetensors files."""
    for part in opened.parts:
        findings = [one for one in part.decoded if isinstance(one, Finding)]
        findings += _check_part(opened, part)
        if not _has_fault(findings):
            context.readable.add(part.path)
        yield from findings
    if opened.beside is not None and not opened.beside.file.size:
        yield empty_file(opened.step, opened.beside.file.path)
    sharded = [part.metadata for part in opened.parts if part.part.format in SHARDED]
    yield from check_holds_anything(sharded)
    if context.chooses_level:
        context.level = cheap_level(opened)
    if context.seal_bytes is SealBytes.COMPARED and _may_be_proven(opened, context):
        context.level = Level.CONTENT


def _may_be_proven(opened: OpenStep, context: StageContext) -> bool:
    """Whether a required seal may prove the step; reading its bytes is of no use otherwise."""
    if not context.requirements.reads_every_byte(None) or not opened.has_seal:
        return False
    if any(part.path not in context.readable for part in opened.parts):
        return False
    seal, _ = opened.seal
    return seal is not None and is_trusted(seal, context.requirements)


def cheap_level(opened: OpenStep) -> Level:
    """The level of an inspection for which nobody asked for a level."""
    is_cheap = (
        opened.store.kind is not StoreKind.OBJECT and opened.n_structure_reads <= MAX_QUICK_READS
    )
    return Level.STRUCTURE if is_cheap else Level.LISTING


def _check_part(opened: OpenStep, part: OpenPart) -> Iterator[Finding]:
    for held in part.safetensors:
        yield from inspect_safetensors(opened.store, held.folder, held.part, held.headers)
    if part.part.format is PartFormat.RANK_FILES:
        yield from check_rank_files(opened.step, part.part, part.ranges.file_names)
        yield from check_named(opened.step, part.part, part.read_named())
    if part.metadata:
        yield from check_key_paths(part.metadata, part.path)
        yield from check_own_number(opened.step, part.part, part.metadata[0])
        yield from check_presence(part.ranges, part.part.files, part.path)
        yield from check_sizes(part.ranges, part.path)
        yield from check_part_coverage(part.metadata, part.path)


def inspect_safetensors(
    store: Store, folder: str, part: Part, headers: Mapping[str, bytes] | None = None
) -> Iterator[Finding]:
    """Yield what the headers and indexes of a part of safetensors say against it.

    `folder` is where the part is in the store. Storage errors pass through. Cost: one
    read for each file, unless the `headers` are given by path, and for each index; a second
    one for headers of more than 64 KiB.
    """
    read = read_headers(store, folder, part.files)
    if headers is not None:
        known = headers
        read = ((file, known[file.path]) for file in part.files if file.path in known)
    return check_safetensors(part, read, read_indexes(store, folder, part.files))


def structure(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Check the head and the tail of each record, and the steps that the optimizers count."""
    for part in opened.parts if context.is_deep else ():
        if part.metadata:
            findings = [*_check_structure(opened, part)]
            if part.path in context.readable and not _has_fault(findings):
                context.sound.add(part.path)
            yield from findings
    if context.is_deep and opened.beside is not None:
        yield from opened.beside.structure.findings


def _has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.severity is Severity.FAULT for finding in findings)


def _check_structure(opened: OpenStep, part: OpenPart) -> Iterator[Finding]:
    yield from part.structure.findings
    if part.part.format is PartFormat.RANK_FILES:
        steps = steps_by_rank(part)
    else:
        steps = steps_by_optimizer(part.metadata, part.structure, part.path)
    yield from check_optimizer_steps(steps, opened.url)


def whole(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the families of files with each other and with those of the steps beside."""
    lost: list[Finding] = []
    if not context.faults:
        lost = [*check_owners(opened, context.requirements.owners)]
        yield from lost
    n_ranks = context.requirements.saved_world_size
    context.wholeness = decide_whole(opened, n_ranks, is_deep=context.is_deep)
    sharded = any(part.metadata for part in opened.parts if part.part.format in SHARDED)
    faults = {fault.where for fault in context.faults}
    for finding in context.wholeness.findings:
        # The metadata of a sharded part states what the save consists of.
        is_known = sharded or lost
        if finding.where not in faults and not (is_known and finding.code == "format.unlisted"):
            yield finding


def gone(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the kinds of files with those of the steps before; a seal names those of its step."""
    if context.notes.seal is None and not context.faults:
        yield from check_gone(opened)


def stale_shards(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare names, and a few records of each shard file, with those of the step before."""
    for part in opened.parts if context.is_deep else ():
        are_records = part.part.format is not PartFormat.RANK_FILES
        if not are_records or part.path in context.readable:
            yield from check_renamed(opened, part)
        if are_records and part.path in context.sound:
            yield from check_step_before(opened, part)


def pickles(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Find what would run code where the pickles of the step are loaded."""
    context.pickles = inspect_pickles(
        opened, is_deep=context.is_deep, reads_files=context.reads_small_files(opened)
    )
    yield from context.pickles.findings(context.requirements.allow_globals)


def state(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Find the train state, in the entries and in the files beside the shards."""
    # On an object store they wait for a deeper level, or for a reason.
    step, sidecars = opened.step, sidecars_of(opened.step)
    is_cheap = context.reads_small_files(opened) or any(
        claims_further(step, part.own_number) for part in opened.parts
    )
    sharded = [part for part in opened.parts if part.part.format in SHARDED]
    headers = {
        held.in_step(path): tensors_in_header(header)
        for part in opened.parts
        for held in part.safetensors
        for path, header in held.headers.items()
    }
    contents: dict[str, object] = {p: held for p, held in headers.items() if held is not None}
    if opened.beside is not None:
        sidecars = (*sidecars, opened.beside.file)
        if opened.beside.content is not None:
            contents[opened.beside.file.path] = opened.beside.content
    damaged = {fault.where for fault in context.faults}
    mapped = context.requirements.state_map
    rank_files = (part for part in opened.parts if part.part.format is PartFormat.RANK_FILES)
    unnamed = [
        part.ranges.file_names
        for part in rank_files
        if may_hold_weights(step, part.part, part.ranges.file_names)
    ]
    for sidecar in opened.sidecars if is_cheap or unnamed or opened.has_sidecars else ():
        if sidecar.finding is not None and sidecar.path not in damaged:
            yield sidecar.finding
        if sidecar.content is not None:
            contents[sidecar.path] = sidecar.content
    if is_cheap:
        needed = layouts.documents_parsed(step.layout, step.parts, step.files)
        others = [file for file in sidecars if kind_of_file(step.layout, file.path) is None]
        yield from check_documents(opened.store, opened.folder, needed, others)
    copies = copied_weights(opened, contents) if is_cheap else frozenset()
    context.reads_files, context.contents, context.copies = is_cheap, contents, copies
    context.state = train_state(
        Sources(
            step.layout,
            [(part.path, one) for part in sharded for one in part.metadata],
            sidecars,
            contents,
            {
                (part.path, fqn): value
                for part in sharded
                if is_cheap and part.path in context.readable
                for fqn, value in part.numbers(mapped).items()
            },
            step.number if layouts.counts_training_steps(step.layout) else None,
            mapped,
            copies,
        )
    )
    if "model" not in context.state.held:
        yield from map(unlisted, unnamed)


def counts(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the steps that files count with the steps before, and the ranks that have files.

    Those are compared with what a file states, or with the ranks that wrote before. Unless the
    files are read anyway, none is read for it but of a step with fewer files than the one before.
    """
    known = {finding.where for finding in context.findings}
    for part in opened.parts:
        if part.part.format is not PartFormat.RANK_FILES:
            continue
        context.ranks_counted = context.reads_files
        contents = dict(context.contents)
        for file in part.part.files if context.reads_files else ():
            if full_match(TABLES.states_ranks, file.path) and file.kind == "file":
                path = part.in_store(file.path)
                contents[file.path] = value_in_archive(opened.store, path, file.size)
        for finding in check_stated_ranks(opened.step, part.part, contents):
            if finding.where not in known:
                yield finding
        if not (context.requirements.saved_world_size or stated_ranks(opened.step, contents)):
            yield from check_uncounted(opened, part.part, reads_only_step=context.reads_files)
    if context.reads_files:
        decoded = context.contents.items()
        of_step = {path: content for path, content in decoded if path not in context.copies}
        yield from check_counts(opened, of_step)


def notes(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the step with its seal, and read the marks on it."""
    asked = context.requirements.require_seal or context.requirements.marks is not None
    if asked or any(layouts.is_own(file.path) for file in opened.files):
        faults = frozenset(fault.where for fault in context.faults)
        binds = context.level is Level.CONTENT
        context.notes = read_notes(opened, context.requirements, faults, binds=binds)
        yield from context.notes.findings


def identity(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare what the train state and the optimizer count with the number in the name."""
    step = context.state.step
    reads_optimizer = context.reads_small_files(opened)
    found, context.identity = decide_identity(
        opened, step, count_of, reads_optimizer=reads_optimizer
    )
    # A file that another step left here explains the count, but for one of that whole step.
    named = number_in_metadata(opened)
    is_whole = named is not None and step.value is not None and abs(named - step.value) <= 1
    codes = ("step.foreign",) if is_whole else ("step.foreign", "state.mixed")
    is_explained = any(map(context.places, codes))
    if not (is_explained or context.notes.accepted):
        yield from found


def count_of(opened: OpenStep, level: Level = Level.LISTING) -> int | None:
    """The steps that the train state of another step counts. Cost: its listing and sidecars.

    At `listing`, no file of an object store is read.
    """
    context = StageContext(Requirements(), level)
    context.findings += [*metadata(opened, context)]
    context.findings += [*state(opened, context)]
    return context.state.step.value


def one_save(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the write times of the files, and the steps that the parts were written for."""
    by_store = context.by_store
    is_proven = not context.places("seal.digest") and (
        (context.content is not None and context.content.whole)
        or (by_store is not None and by_store.n_same == by_store.n_files)
    )
    if context.notes.accepted or any(one.code in NEVER_FINISHED for one in context.findings):
        return
    is_explained = context.places("seal.digest") | context.places("store.rewritten")
    found, context.one_save = check_one_save(
        opened,
        context.state.step.value,
        # A checksum that differs already shows what was written again.
        None if is_explained else context.notes.seal,
        is_proven=is_proven,
    )
    yield from (one for one in found if not (is_explained and one.code == "state.mixed"))


def lost_weights(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Find NaN in the weights of a step whose own log ends with a loss of 0, NaN or infinity."""
    is_cheap = context.reads_small_files(opened)
    sound = all(part.path in context.readable for part in opened.parts)
    if opened.step.layout == "transformers" and is_cheap and sound and not context.notes.accepted:
        from ckptctl.inspection.optimizer_state import check_weights

        yield from check_weights(opened)


def content(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare every byte with the checksums of the records and with the seal."""
    if context.level is not Level.CONTENT:
        return
    from ckptctl.inspection.content import inspect_content

    seal = context.notes.seal
    context.content = inspect_content(opened, context.asked, seal, context.places("seal.digest"))
    yield from context.content.findings
    if not context.content.whole:
        context.level = Level.STRUCTURE
    elif seal is None and not opened.has_seal and not (context.asked and context.asked.is_helper):
        yield Finding(
            "seal.missing",
            SEAL,
            "there is no seal: a valid shard of another step would not be detected",
            next_command=command_line("seal", opened.url),
        )


def optimizer_state(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """See whether the state of the optimizer is real, where that was asked for."""
    asked, read = context.asked, context.content
    if asked is None or not asked.state_check or asked.is_helper or read is None:
        return
    from ckptctl.inspection.optimizer_state import check_optimizer_state

    step = context.state.step.value
    train_step = opened.step.number if step is None else step
    # A part of the bytes was asked for: then files that hold other state are not read, either.
    limits = asked.limits if asked.choose is None else None
    for finding in check_optimizer_state(opened, read.values, train_step, limits):
        if finding.code != "optimizer.unseen" or context.state.optimizer.found:
            yield finding


def store_checksums(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Compare the checksums that the store keeps with those in the seal."""
    if context.requirements.remote_checksums:
        from ckptctl.inspection.content import ask_store

        context.by_store, findings = ask_store(opened, context.notes.seal, context.findings)
        yield from findings


def seal_compared(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Yield `seal.not-compared` where a required seal was not compared with every byte.

    A step that is refused for another reason is left to that.
    """
    if not context.requirements.require_seal or context.seal_bytes is SealBytes.LATER:
        return
    seal = context.notes.seal
    undecided = verdict_of(context.findings) in (Verdict.COMPLETE, Verdict.UNVERIFIABLE)
    is_compared = context.content is not None and context.content.whole
    if seal is None or is_compared or not undecided or context.places("seal.required"):
        return
    why_not = _not_by_store(seal, context)
    if why_not is not None:
        yield Finding(
            "seal.not-compared",
            SEAL,
            f"a seal that proves the step is required, and {why_not}: bytes that were changed "
            "without changing a size would not be detected",
            next_command=command_line("verify", opened.url, "--level", "content", "--require-seal"),
        )


def _not_by_store(seal: Seal, context: StageContext) -> str | None:
    """Why the store's checksums do not prove the bytes; None if they do."""
    by_store = context.by_store
    if by_store is None:
        return f"level {context.level.value} does not compare the bytes with it"
    if by_store.n_files != by_store.n_same:
        return "the store's checksums prove only a part of the files"
    if not context.requirements.detects_intent:
        return None
    names = {
        file.stored.algorithm
        for file in seal.files
        if file.stored is not None and file.path not in seal.step.metadata
    }
    weak = sorted(names - {"sha256"})
    if not weak:
        return None
    return f"other bytes with the store's checksum ({', '.join(weak)}) can be made on purpose"


def archived(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Yield `step.archived` where a file of the step must be restored before it can be read.

    A listing shows the archive tier of a restored object too. Cost: nothing unless the listing
    shows one; else a read of one byte of each such file of a step without a fault.
    """
    held = [file for file in opened.files if file.archived and layouts.is_saved(file.path)]
    if not held or context.faults:
        return
    spans = (Span(opened.in_store(file.path), 0, 1) for file in held if file.size)
    try:
        for _ in opened.store.view_spans(spans):
            pass
    except ObjectArchived as error:
        n_bytes = sum(file.size for file in held)
        found = f"{counted(len(held), 'file')} ({n_bytes:,} bytes) in an archive tier"
        yield Finding(
            "step.archived",
            held[0].path,
            f"{found}: the step is complete by its listing, and cannot be loaded until they are "
            "restored",
            next_command=error.next_command,
        )


def unchanged(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """List the step a second time: what was read is one step only if nobody wrote meanwhile.

    At `listing` only a fault depends on that: metadata that is newer than the sizes of the files.
    An unfinished save shows in the listing alone.
    """
    faults = {fault.code for fault in context.faults}
    if context.is_deep or (context.confirm and faults - NEVER_FINISHED):
        yield from opened.changes()


def contradictions(opened: OpenStep, context: StageContext) -> Iterator[Finding]:
    """Ask once more for what a stale listing could explain: changes, missing and short files."""
    contradiction = contradicted(opened, context.findings)
    if contradiction is not None:
        yield contradiction
    yield from stale_sizes(opened, context.findings)
    if context.confirm:
        yield from left_out(opened, context.findings)


STAGES: tuple[Stage, ...] = (
    links,
    names,
    metadata,
    structure,
    whole,
    stale_shards,
    pickles,
    state,
    counts,
    notes,
    gone,
    identity,
    lost_weights,
    content,
    optimizer_state,
    store_checksums,
    one_save,
    seal_compared,
    archived,
    unchanged,
    contradictions,
)

HELPER_STAGES: tuple[Stage, ...] = (content,)
"""Those of a process that reads a share of the bytes for another one, which reports."""


MAX_ASKED = 4
"""Missing files that are asked for by name; any of them shows that a listing lacks one."""

_MISSING = frozenset({"shard.missing", "metadata.missing", "file.missing"})


def left_out(opened: OpenStep, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a `step.unknown` where a file is there that the listing lacks.

    The listing of a local file system is complete. Storage errors pass through. Cost: a read
    of one byte for each file that is missing, at most `MAX_ASKED`.
    """
    if opened.store.kind is StoreKind.LOCAL:
        return
    listed = {file.path for file in opened.files}
    missing = [f.where for f in findings if f.code in _MISSING and f.where not in listed]
    for where in missing[:MAX_ASKED]:
        if _is_there(opened, where):
            yield _not_listed(opened.step, where)
            return


def _is_there(opened: OpenStep, path: str) -> bool:
    try:
        return _reads(opened, path, 0) or True  # an empty one is there
    except PathNotFound:
        return False


def _reads(opened: OpenStep, path: str, offset: int) -> bool:
    """Whether a file has a byte at `offset`. Cost: a read of one byte."""
    try:
        for _ in opened.store.read_spans([Span(opened.in_store(path), offset, 1)]):
            pass
    except ShortRead:
        return False
    return True


_TOO_SHORT = frozenset(
    {"shard.truncated", "file.unreadable", "record.framing", "file.missing", "seal.gone"}
)
"""Codes of files that may be shorter than they must be."""


def stale_sizes(opened: OpenStep, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a `step.unknown` where a file that is too short is longer than two listings show.

    A cache of attributes shows the size of an earlier moment. Storage errors pass through. Cost:
    a read of one byte of each file that is too short, at most `MAX_ASKED`, and where one is
    longer a listing.
    """
    listed = {file.path: file for file in opened.files if file.kind == "file"}
    named = dict.fromkeys(f.where for f in findings if f.code in _TOO_SHORT and f.where in listed)
    for where in [*named][:MAX_ASKED]:
        size = listed[where].size
        try:
            if not _reads(opened, where, size):
                continue
        except PathNotFound:
            continue
        # A file that grows meanwhile is longer in a second listing, too.
        sizes = {file.path: file.size for file in opened.list_again()}
        if sizes.get(where, size + 1) <= size:
            what = f"a listing shows {size:,} bytes of {where}, and it has more"
            yield _unknown(opened.step, where, what)
            return


def contradicted(opened: OpenStep, findings: Sequence[Finding]) -> Finding | None:
    """A `step.unknown` where a `step.changed` among the findings is not borne out; else None.

    The step is listed once more: a change that no listing shows, and one that a read
    contradicts, states that the storage cannot be trusted. Storage errors pass through.
    Cost: nothing without a `step.changed`; else one listing, a read of one byte for each
    file that is gone from it, at most `MAX_ASKED`, and where one is there a further listing.
    """
    changed = next((finding for finding in findings if finding.code == "step.changed"), None)
    if changed is None:
        return None
    step = opened.listed
    now = opened.list_again()
    gone = {file.path for file in step.files} - {file.path for file in now}
    hidden = [path for path in sorted(gone)[:MAX_ASKED] if _is_there(opened, path)]
    if hidden:
        # A save over the step may have written them after the listing.
        now = opened.list_again()
        hidden = [path for path in hidden if all(file.path != path for file in now)]
    if hidden:
        return _not_listed(step, hidden[0])
    # Where the first listing failed there is nothing that could have changed since.
    if step.files and any(check_unchanged(step.url, step.files, now)):
        return None
    what = (
        f"one answer reports {changed.where} as missing or changed, "
        "and a listing shows it unchanged"
    )
    return _unknown(step, changed.where, what)


def _not_listed(step: Step, where: str) -> Finding:
    return _unknown(step, where, f"{where} exists, and a listing does not show it")


def _unknown(step: Step, where: str, what: str) -> Finding:
    message = f"{what}: the storage contradicts itself, and nothing is known about the step"
    return Finding("step.unknown", where, message, next_command=command_line("verify", step.url))
