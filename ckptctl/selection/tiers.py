"""Open and list the roots of one run: one, or several tiers such as local NVMe and shared storage.

The roots are in order of preference. A mandatory root that does not answer is an
error, since a newer step may be in it. An optional one, such as the local disk of
a node that was replaced, may be absent; that is reported, and the others decide.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack

from ckptctl.data_classes import dataclass, field
from ckptctl.errors import StorageError, StorageUnavailable, UsageError
from ckptctl.findings import Finding
from ckptctl.model import FileInfo
from ckptctl.options import StorageOptions
from ckptctl.selection.branches import Resume, read_resumes
from ckptctl.selection.roots import RootListing
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

Trees = Mapping[str, Sequence[FileInfo]]
"""The files of each step, where the listing of the root shows them too."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The addresses of the roots in order of preference, and those that may be absent."""

    urls: tuple[str, ...]
    optional: frozenset[str] = frozenset()

    @property
    def words(self) -> str:
        """The roots as the words of a command line that takes several."""
        words = [*self.mandatory]
        for url in self.urls:
            words += ["--optional-root", url] if url in self.optional else []
        return shlex.join(words)

    @property
    def mandatory(self) -> tuple[str, ...]:
        """The roots that must be there; they bear the record of the run."""
        return tuple(url for url in self.urls if url not in self.optional)

    @property
    def first(self) -> str:
        """The root that steps are saved to: the first mandatory one."""
        return self.mandatory[0]


def roots_in(given: str | Sequence[str], optional: Collection[str] = ()) -> Roots:
    """The roots that a caller named; raises `UsageError` where none of them is mandatory.

    Optional roots come after the others, or keep their place where they are named
    among `given` as well.
    """
    named = (given,) if isinstance(given, str) else tuple(given)
    urls = tuple(dict.fromkeys((*named, *optional)))
    if not urls:
        raise UsageError("no checkpoint root is given", next_command="ckptctl pick ROOT")
    if set(urls) <= set(optional):
        raise UsageError(
            f"every root is optional ({', '.join(urls)}); at least one must be mandatory, "
            "or a storage that is not mounted would pass for a fresh run"
        )
    return Roots(urls, frozenset(optional))


@dataclass(frozen=True, slots=True)
class Tier:
    """One root, open and listed; `error` is why an optional one could not be.

    `resumes` are those that it records, for the steps of the other roots.
    """

    store: Store
    listing: RootListing
    optional: bool = False
    trees: Trees = field(default_factory=dict)
    error: StorageError | None = None
    resumes: tuple[Resume, ...] = ()

    @property
    def is_there(self) -> bool:
        """The root exists and has answered."""
        return self.listing.exists and self.error is None


def open_tiers(
    stack: ExitStack,
    roots: Roots,
    list_all: Callable[[Store], tuple[RootListing, Trees]],
    storage: StorageOptions,
) -> tuple[Tier, ...]:
    """Open every root until `stack` ends, and list it.

    Raises `StorageError` where a mandatory root does not answer, and where one does
    not exist while another root holds steps or was written to before. Cost: one call
    of `list_all` for each root; where there are several, `read_resumes` of each besides.
    """
    tiers = []
    for url in roots.urls:
        store = stack.enter_context(open_store(url, storage))
        optional = url in roots.optional
        try:
            listing, trees = list_all(store)
            several = len(roots.urls) > 1 and listing.known
            resumes = read_resumes(store) if several else ()
        except StorageError as error:
            if not optional:
                raise
            listing = RootListing((), exists=False)
            # A local disk without the folder above the root is absent, as one without the root.
            folders = store.folders
            absent = folders is not None and not os.path.lexists(folders.path_of(""))
            tiers.append(Tier(store, listing, optional=True, error=None if absent else error))
        else:
            tiers.append(Tier(store, listing, optional, trees, resumes=resumes))
    _check_mandatory(tiers, roots)
    return tuple(tiers)


def _check_mandatory(tiers: Sequence[Tier], roots: Roots) -> None:
    used = next((one for one in tiers if one.listing.steps or one.listing.known), None)
    absent = next((one for one in tiers if not one.optional and not one.listing.exists), None)
    if used is None or absent is None:
        return
    url = absent.store.url
    allowed = Roots(roots.urls, roots.optional | {url})
    may_be_absent = len(allowed.optional) < len(allowed.urls)
    holds = f"holds {len(used.listing.steps)} steps" if used.listing.steps else "was in use before"
    raise StorageUnavailable(
        f"{url} does not exist, and {used.store.url} {holds}: a newer step may be in the "
        "missing root. Mount it; if it may be missing, make it an optional root",
        next_command=f"ckptctl pick {allowed.words}" if may_be_absent else "findmnt --real",
    )


def unavailable(tiers: Sequence[Tier]) -> Iterator[Finding]:
    """Yield a `root.unavailable` for each optional root that is absent or did not answer."""
    for tier in tiers:
        if tier.is_there or not tier.optional:
            continue
        url = tier.store.url
        why = f"{url} does not exist" if tier.error is None else tier.error.message
        yield Finding(
            "root.unavailable",
            url,
            f"the optional root was left out: {why}",
            expected="a root that answers",
            found="no folder" if tier.error is None else tier.error.code,
            next_command=f"ckptctl scan {shlex.quote(url)}",
        )
