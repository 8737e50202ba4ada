"""Every rule, in the order in which they are asked: the first that fits a line speaks for it."""

from __future__ import annotations

from ckptctl.failures.evidence import Rule
from ckptctl.failures.rules import (
    checkpoints,
    collectives,
    cuda,
    divergence,
    frameworks,
    kernel,
    kubernetes,
    memory,
    own_errors,
    programs,
    slurm,
    storage_errors,
    told,
    xids,
)

RULES: tuple[Rule, ...] = (
    *own_errors.RULES,
    *xids.RULES,
    *kernel.RULES,
    *memory.RULES,
    *slurm.RULES,
    *kubernetes.RULES,
    *storage_errors.RULES,
    *checkpoints.RULES,
    *divergence.RULES,
    *cuda.RULES,
    *collectives.RULES,
    *told.RULES,
    *frameworks.RULES,
    *programs.RULES,
)
