"""The model of recovery cost: MTBF, optimal interval, effective training time.

Formulas only. All times are in seconds. The interval of Young and Daly is the time of
training between two saves; the one that is best for availability includes the save.

Sources: J. W. Young, 1974; J. T. Daly, 2006; Saxena et al., arXiv 2410.18124; Kokolis
et al., arXiv 2410.21680.
"""

from __future__ import annotations

import math
from enum import Enum

DAY_S = 86_400.0


def mtbf_of(n_nodes: int, failures_per_node_day: float) -> float:
    """Mean time between failures of a job on `n_nodes`, in seconds.

    Measured fleets: 0.0065 and 0.00234 failures per node and day (Kokolis et al.). Holds for
    large jobs; small ones failed less often than the formula predicts.
    """
    return DAY_S / (n_nodes * failures_per_node_day)


def young_interval(save_s: float, mtbf_s: float) -> float:
    """The first-order best interval between saves: the square root of twice the product."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The higher-order best interval; the mean time between failures where saves are slow."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def available_interval(save_s: float, mtbf_s: float, restart_s: float) -> float:
    """The interval from save to save, the save included, that leaves the most training time."""
    return save_s + math.sqrt(2 * (mtbf_s + restart_s) * save_s + save_s**2)


def effective_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """The share of all time that is training and not lost: between 0 and 1.

    Exact for independent failures (exponentially distributed), which may also come during a
    save or a restart.
    """
    if not interval_s > 0:
        return 0.0
    try:
        cycle = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    except OverflowError:
        return 0.0
    return min(1.0, interval_s / (mtbf_s * cycle))


def first_order_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """The same to first order: correct where failures are rare, and at least 0."""
    lost = save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    return max(0.0, 1 - lost)


class Cadence(str, Enum):
    """The interval between saves, compared with the mean time between failures."""

    SHORT_ENOUGH = "short-enough"
    LONGER_THAN_BEST = "longer-than-best"
    ABOVE_MTBF = "above-mtbf"
    UNKNOWN = "unknown"


def cadence_of(interval_s: float | None, save_s: float | None, mtbf_s: float | None) -> Cadence:
    """Whether the interval is below the mean time between failures, and twice the best one."""
    if interval_s is None or mtbf_s is None:
        return Cadence.UNKNOWN
    if interval_s >= mtbf_s:
        return Cadence.ABOVE_MTBF
    if save_s and interval_s > 2 * daly_interval(save_s, mtbf_s):
        return Cadence.LONGER_THAN_BEST
    return Cadence.SHORT_ENOUGH
