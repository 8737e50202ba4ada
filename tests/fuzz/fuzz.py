"""Fuzz what reads the bytes of a checkpoint, led by the code that they reach.

    python tests/fuzz/fuzz.py [TARGET...] [--seconds 60] [--keep]

Each target runs in a process of its own: at most 512 MiB, at most ten seconds an
input. It begins with the corpus in the repository, and adds what it finds to
`.cache/fuzz/TARGET`. An input that crashes a target is written to
`.cache/fuzz/crashes`; make it a test. `--keep` puts some of the inputs that reached
something new into the corpus, short and long ones. Takes `atheris`, which `make fuzz`
installs.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.tar.xz"
CACHE = HERE.parent.parent / ".cache" / "fuzz"
MAX_KEPT = 100
MAX_KEPT_BYTES = 4 << 10


def unpacked(name: str) -> Path:
    """The folder of a target's inputs: those that earlier runs found, and the corpus."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    if CORPUS.exists():
        with tarfile.open(CORPUS) as tar:
            for member in tar.getmembers():
                if member.name.startswith(f"{name}/"):
                    data = tar.extractfile(member)
                    (CACHE / member.name).write_bytes(data.read() if data else b"")
    return folder


def fuzz(name: str) -> None:
    """Become the fuzzer of a target; the other arguments are libFuzzer's."""
    import atheris

    with atheris.instrument_imports(include=["ckptctl"], enable_loader_override=False):
        from targets import Watch
    watch = Watch()
    atheris.Setup(sys.argv[:1] + sys.argv[3:], lambda data: watch.feed(name, bytes(data)) and None)
    atheris.Fuzz()


def libfuzzer(name: str, *options: str) -> int:
    """Run the fuzzer of a target in a process of its own."""
    command = [sys.executable, __file__, "--one", name, *options]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}:{HERE}"}
    return subprocess.run(command, env=environment).returncode


def keep(names: list[str]) -> None:
    """Write some of the inputs that reached something new into the corpus, short and long ones."""
    with tarfile.open(CORPUS, "w:xz") as tar:
        for name in names:
            found = sorted((CACHE / name).iterdir(), key=lambda path: path.stat().st_size)
            found = [path for path in found if path.stat().st_size <= MAX_KEPT_BYTES]
            for path in found[:: max(1, -(-len(found) // MAX_KEPT))]:
                data = path.read_bytes()
                about = tarfile.TarInfo(f"{name}/{path.name[:12]}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))


def main() -> int:
    """Fuzz one target after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ("metadata", "record", "pickled", "seal", "mark", "safetensors")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="put what was found into the corpus")
    asked = parser.parse_args()
    crashes = CACHE / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in asked.targets or names:
        print(f"== {name}, {asked.seconds} s", flush=True)
        options = [
            f"-max_total_time={asked.seconds}",
            "-timeout=10",
            "-rss_limit_mb=512",
            "-max_len=65536",
            "-print_final_stats=1",
            "-verbosity=0",
            f"-artifact_prefix={crashes}/{name}-",
            str(unpacked(name)),
        ]
        if libfuzzer(name, *options):
            failed.append(name)
    if asked.keep and not failed:
        keep(list(names))
    if failed:
        print(f"crashed: {', '.join(failed)}; the inputs are in {crashes}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2])
    else:
        sys.exit(main())
