"""Run one case, which its category, its number and the seed determine."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from random import Random

from broken_files import MAKERS
from failing_s3 import N_CASES as N_REQUESTS
from failing_s3 import Bucket, failing_s3
from failing_storage import N_CHANGES, N_FAULTS, Counts, changing, failing
from found_records import N_RECORDS, found_record
from hostile_and_odd import (
    N_HOSTILE,
    N_MUTATIONS,
    N_NAMES,
    N_SOUND,
    hostile,
    mutation,
    odd_names,
    sound_copies,
)
from interrupted import N_CASES as N_INTERRUPTED
from interrupted import Save, interrupted, saves
from loaded_modules import load_all_modules
from made_checkpoints import checkpoints, unpacked
from made_roots import make_templates
from made_runs import N_CASES as N_RUNS
from made_runs import made_run
from oracle import Case, Outcome, Watch, judge
from peers import load, outcome_of_load
from rank_file_steps import N_CASES as N_RANK_FILES
from rank_file_steps import rank_file_step
from retained_roots import N_CASES as N_RETAINED
from retained_roots import retained
from short_memory import N_CASES as N_SHORTAGES
from short_memory import Starved, short_of_memory
from sound_steps import Harm, Library, Sound, sound_as, tree

import ckptctl
from ckptctl import Level

REPOSITORY = Path(__file__).resolve().parent.parent.parent


N_CASES = {
    **{category: n for category, (_, n) in MAKERS.items()},
    "D": N_INTERRUPTED,
    "F": N_FAULTS,
    "G": N_SHORTAGES,
    "I": N_REQUESTS,
    "J": N_CHANGES,
    "K": N_HOSTILE,
    "M": N_MUTATIONS,
    "N": N_NAMES,
    "O": N_SOUND,
    "P": N_RETAINED,
    "Q": N_RECORDS,
    "R": N_RANK_FILES,
    "S": N_RUNS,
}
"""How many cases of each category a whole campaign has."""


class Bench:
    """Runs cases in a folder of its own; `peers` is the share that torch loads too."""

    def __init__(self, folder: Path, seed: int, *, peers: float) -> None:
        logging.disable(logging.CRITICAL)  # torch prints long warnings about what it cannot load
        self._root = folder
        self._folder = folder
        self._seed = seed
        self._peers = peers
        self._library = _library(folder)
        self._truth: dict[str, dict[str, object]] = {}
        self._saves: list[Save] = []
        self._counts: Counts | None = None
        self._starved: Starved | None = None
        self._bucket: Bucket | None = None
        self._templates: Path | None = None
        load_all_modules()
        self._watch = Watch()

    def run(self, category: str, number: int) -> Outcome:
        """Run one case, and remove its files."""
        chance = Random(f"{self._seed}-{category}-{number}")
        subjects = self._library.all()
        subject = subjects[chance.randrange(len(subjects))]
        if category in "FJ":
            subject = subjects[0]
        # Its own folder: a thread of an earlier case may still be at work in that one's.
        self._root = self._folder / f"case-{category}-{number}" / "run"
        outcome = Outcome(category, number, subject.name, "", False, "none", "content")
        try:
            if category in MAKERS:
                case = MAKERS[category][0](number, chance, subject)
                self._judged(case, subject, outcome, chance)
            elif category == "D":
                self._interrupted(number, chance, outcome)
            elif category == "K":
                self._judged(hostile(number, subject), subject, outcome, chance, peer=False)
            elif category == "O":
                self._sound(number, chance, outcome)
            elif category == "Q":
                self._found_record(number, chance, outcome)
            elif category in "GIPRS":
                self._in_processes(category, number, chance, subject, outcome)
            else:
                self._watched(category, number, chance, subject, outcome)
            if outcome.problem == "false alarm":
                self._keep(outcome)
        finally:
            shutil.rmtree(self._root.parent, ignore_errors=True)
        return outcome

    def _keep(self, outcome: Outcome) -> None:
        """Move aside the file of a false alarm, and return whether the step is still refused."""
        name = f"{self._seed}-{outcome.category}-{outcome.number}"
        kept = REPOSITORY / ".cache" / "campaign" / "kept" / name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self._root, kept, symlinks=True)
        chosen = ckptctl.pick(str(self._root), level=Level.CONTENT).chosen
        again = "pick refuses it" if chosen is None else f"pick takes {chosen.number}"
        outcome.said += f" (asked again, {again}; the tree is kept in {kept})"

    def close(self) -> None:
        """End the processes that were started for the cases."""
        for one in (self._starved, self._bucket):
            if one is not None:
                one.close()

    def _judged(
        self, case: Case, subject: Sound, outcome: Outcome, chance: Random, *, peer: bool = True
    ) -> None:
        outcome.step, outcome.about, outcome.sealed = subject.name, case.about, case.sealed
        step = tree(self._root, subject, sealed=case.sealed and bool(subject.seal))
        case.spoil(step)
        judge(case, outcome, subject, step, self._watch)
        if peer and chance.random() < self._peers:
            outcome.loaded = outcome_of_load(step, subject, self._values(subject))
            if outcome.loaded == "differs" and outcome.harm != "values":
                outcome.problem = outcome.problem or "torch loads other values than were saved"

    def _interrupted(self, number: int, chance: Random, outcome: Outcome) -> None:
        self._saves = self._saves or saves(REPOSITORY / ".cache" / "campaign", self._folder)
        case, save = interrupted(number, chance, self._saves)
        # Which of two sound steps a load should give depends on where it stopped.
        self._judged(case, save.new, outcome, chance, peer=case.harm is Harm.VALUES)

    def _sound(self, number: int, chance: Random, outcome: Outcome) -> None:
        case = sound_copies(number, chance, self._library, self._root)
        step = max(self._root.iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
        outcome.step, outcome.about = step.name, case.about
        judge(case, outcome, sound_as(step), step, self._watch)

    def _watched(
        self, category: str, number: int, chance: Random, subject: Sound, outcome: Outcome
    ) -> None:
        """Categories whose answers are compared with more than a verdict."""
        try:
            with self._watch:
                if category == "F":
                    self._counts = self._counts or Counts(self._new_root)
                    failing(number, chance, self._counts, self._new_root(), outcome)
                elif category == "J":
                    changing(number, chance, subject, tree(self._root, subject), outcome)
                elif category == "M":
                    mutation(number, chance, subject, self._root, outcome)
                else:
                    odd_names(number, chance, subject, self._root, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug
            outcome.problem = f"crashed with {type(error).__name__}: {str(error)[:200]}"
        if self._watch.events:
            outcome.problem = f"caused {', '.join(sorted(set(self._watch.events)))}"

    def _in_processes(
        self, category: str, number: int, chance: Random, subject: Sound, outcome: Outcome
    ) -> None:
        """The processes and servers that serve many cases."""
        try:
            if category == "P":
                self._templates = self._templates or make_templates(self._folder / "templates")
                retained(chance, self._templates, self._root, outcome)
                return
            if category == "R":
                rank_file_step(chance, unpacked("rank-files"), self._root, outcome)
                return
            if category == "S":
                self._root.mkdir(parents=True)
                made_run(chance, self._root, outcome)
                return
            if category == "G":
                self._starved = self._starved or Starved(self._folder / "starved")
                short_of_memory(number, chance, subject, self._root, self._starved, outcome)
                return
            subject = self._library.all()[0]
            outcome.step = subject.name
            self._bucket = self._bucket or Bucket(self._folder / "bucket", subject)
            failing_s3(number, chance, self._bucket, outcome)
        except Exception as error:  # noqa: BLE001 - one case must not end all of them
            outcome.problem = f"crashed with {type(error).__name__}: {str(error)[:200]}"

    def _found_record(self, number: int, chance: Random, outcome: Outcome) -> None:
        outcome.step, outcome.harm = "", "none"
        try:
            found_record(number, chance, self._root, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug
            outcome.problem = f"crashed with {type(error).__name__}: {str(error)[:200]}"

    def _new_root(self) -> Path:
        shutil.rmtree(self._root, ignore_errors=True)
        return tree(self._root, self._library.all()[0]).parent

    def _values(self, subject: Sound) -> dict[str, object]:
        if subject.name not in self._truth:
            self._truth[subject.name] = load(subject.path, subject)
        return self._truth[subject.name]


def _library(folder: Path) -> Library:
    """The checkpoints that the tests use."""
    copies = folder / "sound"
    shutil.copytree(checkpoints(), copies / "made")
    shutil.copytree(unpacked("dcp-versions"), copies / "versions")
    return Library(copies / "made", copies / "versions", folder)
