"""Keep numbered files in a folder of a store: created only if absent, and never changed.

Of two writers that add the same number one fails because the other was first, on every storage
that keeps conditional writes. So a file is whole or absent, and the highest number is the newest.
The tokens of a root, the state of a supervised run and the record of a runbook are such files.
"""

from __future__ import annotations

import re

from ckptctl.errors import AlreadyExists
from ckptctl.storage.contract import Store, TooLarge, list_if_there


class NumberedFiles:
    """The files of one folder, named by numbers of `n_digits` digits: `0000000012.json`."""

    def __init__(self, store: Store, folder: str, n_digits: int = 10) -> None:
        self.store = store
        self.folder = folder
        self._n_digits = n_digits
        self._name = re.compile(rf"([0-9]{{{n_digits}}})\.json")

    def path(self, number: int) -> str:
        """The path of a file in the store."""
        name = f"{number:0{self._n_digits}}.json"
        return f"{self.folder}/{name}" if self.folder else name

    def numbers(self) -> list[int]:
        """The numbers that were taken, rising; none where there is no folder. Cost: a listing."""
        names = (entry.path.rpartition("/")[2] for entry in list_if_there(self.store, self.folder))
        matches = (self._name.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int:
        """The highest number that was taken; 0 for none. Cost: a listing."""
        return max(self.numbers(), default=0)

    def read(self, number: int, limit: int) -> bytes:
        """The bytes of a file; raises `PathNotFound`, and `TooLarge` above `limit`."""
        return self.store.read(self.path(number), limit=limit)

    def add(self, number: int, data: bytes) -> None:
        """Create a file; raises `AlreadyExists` where another writer has the number.

        A write that was repeated after a lost answer finds its own file: no two writers may
        write equal bytes.
        """
        try:
            self.store.put(self.path(number), data)
        except AlreadyExists as taken:
            try:
                others = self.store.read(self.path(number), limit=len(data) + 1)
            except TooLarge:
                raise taken from None  # longer than ours: another writer's
            if others != data:
                raise
