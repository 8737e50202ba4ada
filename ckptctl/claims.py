"""The claims that a verdict consists of.

A claim is proven, contradicted or unknown, and nothing else: what was not recognized, not
checked or not seen is unknown, with what would prove it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ClaimState(StrEnum):
    """Whether a claim holds."""

    PROVEN = "proven"
    CONTRADICTED = "contradicted"
    UNKNOWN = "unknown"


class ClaimName(StrEnum):
    """What is claimed of a step."""

    WHOLE = "whole"
    """What the save consists of is known, and all of it is there."""
    BYTES = "bytes"
    """The bytes are those that were written."""
    ONE_SAVE = "one save"
    """All parts and files were written by the same save."""
    IDENTITY = "identity"
    """It is the step that its name states."""
    STATE = "state"
    """The train state that it holds is recognized."""
    BRANCH = "branch"
    """It is on the branch that the run is on now."""


class Claim(msgspec.Struct, frozen=True):
    """One claim about a step, with its evidence."""

    name: ClaimName
    """What is claimed."""
    state: ClaimState
    """Whether it holds."""
    by: str
    """What proves or contradicts it; of an unknown one, why it is unknown."""
    would_prove: str | None = None
    """What would prove an unknown claim; null for any other."""
    finding: str | None = None
    """The code of the finding that contradicts it, or that leaves it unknown; else null."""

    @classmethod
    def proven(cls, name: ClaimName, by: str) -> Claim:
        """A claim that holds."""
        return cls(name, ClaimState.PROVEN, by)

    @classmethod
    def unknown(cls, name: ClaimName, why: str, would_prove: str | None = None) -> Claim:
        """A claim of which nothing is known yet."""
        return cls(name, ClaimState.UNKNOWN, why, would_prove)

    @property
    def is_proven(self) -> bool:
        """Whether the claim holds."""
        return self.state is ClaimState.PROVEN
