"""The results of `classify`."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.failures.classes import Action, Domain, Restart
from ckptctl.failures.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Suspect:
    """Hardware that the logs name: a node, its devices, the ranks that ran there.

    `node` is None where the evidence names a device and not the node it is in.
    """

    node: str | None
    devices: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Classification:
    """Why a job ended, as far as its logs tell.

    `failure` is the class (`infra-node`, `job-oom`, …, `unknown`), `confidence` one of
    `high`, `medium`, `low`. `node`, `device` and `rank` are those of the decisive
    evidence, None where it names none. `suspects` is all hardware that the logs name,
    also where something else was decisive, the decisive first. `evidence` is what decided and what
    speaks for the same, first the decisive one; `consequences` is what followed from
    it; `others` is what would have led elsewhere, and `survived` what training went on
    after. `n_lines` were read in `n_files` logs.
    """

    failure: str
    domain: Domain
    action: Action
    restart: Restart
    confidence: str
    message: str
    advice: str
    node: str | None
    device: str | None
    rank: int | None
    suspects: tuple[Suspect, ...]
    evidence: tuple[Evidence, ...]
    consequences: tuple[Evidence, ...]
    others: tuple[Evidence, ...]
    survived: tuple[Evidence, ...]
    n_files: int
    n_lines: int
    next_command: str | None
    exit_code: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the suspected nodes."""
        return tuple(each.node for each in self.suspects if each.node is not None)
