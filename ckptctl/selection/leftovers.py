"""Multipart uploads that a killed save has left, and how they are told from running ones.

Their parts are in no listing and are billed until somebody aborts them. An upload of an
attempt that no longer holds the root is abandoned: whoever began it may not publish any
more. One under a name without an attempt is another tool's, and counts as abandoned once
it is older than a day. Everything else may still be running, and stays.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress

from ckptctl.errors import AccessDenied, PathNotFound
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.selection.fencing import holder
from ckptctl.storage.contract import NotSupported, Store, Upload

MAX_AGE_S = 24 * 3600.0
"""No single object takes a day to write."""


def abandoned_uploads(
    store: Store, pattern: re.Pattern[str] | None = None, *, number: int | None = None
) -> Sequence[Upload]:
    """The uploads into steps of a root that nobody will end; with `number` into that step.

    Empty where the client cannot list them, or nobody allows it: a lifecycle rule of the
    bucket has to abort them then. Cost: a listing of the fence, and one request for each
    1,000 uploads.
    """
    found: Sequence[Upload] = ()
    with suppress(NotSupported, AccessDenied, PathNotFound):
        found = store.list_uploads()
    if not found:
        return ()
    held = holder(store)
    token = held.number if held else 0
    abandoned = []
    for upload in found:
        named = step_name(upload.path.partition("/")[0], pattern)
        if named is None or (number is not None and named.number != number):
            continue
        old = upload.begun_s is not None and time.time() - upload.begun_s > MAX_AGE_S
        if 0 < named.attempt < token or (not named.attempt and old):
            abandoned.append(upload)
    return abandoned
