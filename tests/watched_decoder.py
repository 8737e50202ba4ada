"""Decode files, and record every audit event that Python raises meanwhile.

Run as `python watched_decoder.py MEBIBYTES FOLDER`: memory is limited to so
much, every file of the folder goes through each decoder, and each outcome is
printed as a line of JSON. An audit hook notes every event that Python raises
while a file is decoded (an import, a call of `exec`, a file that is opened, a
process that is started); a decoder raises none.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path

from loaded_modules import load_all_modules

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.pickles.values import decode_tensor_pickle, decode_value

DECODERS = {
    "metadata": decode_metadata,
    "value": decode_value,
    "tensor": decode_tensor_pickle,
}


_OUR_OWN = ("array.__new__", "builtins.id")  # the columns, and finding what is shared


def main() -> None:
    mebibytes, folder = int(sys.argv[1]), Path(sys.argv[2])
    events: list[str] = []
    watching = False

    def note(event: str, args: tuple[object, ...]) -> None:
        if watching and event not in _OUR_OWN:
            events.append(event)

    load_all_modules()
    sys.addaudithook(note)
    resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for name, decode in DECODERS.items():
            gc.collect()  # what is left of the one before is none of this one's memory
            events.clear()
            watching, began = True, time.perf_counter()
            try:
                outcome, message = "read", type(decode(data)).__name__
            except MetadataUnsafe as error:
                outcome, message = "unsafe", error.message
            except MetadataUnreadable as error:
                outcome, message = "unreadable", error.message
            watching, seconds = False, time.perf_counter() - began
            line = [path.name, name, outcome, message, round(seconds, 3), events]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
