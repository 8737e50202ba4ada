"""The arguments that the small jobs of all frameworks take."""

from __future__ import annotations

import argparse


def job_options() -> argparse.Namespace:
    """Where a job saves, how far it trains, how it resumes, and when it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-every", type=int, default=12)
    parser.add_argument("--epoch", type=int, default=12, help="steps in an epoch")
    parser.add_argument("--keep", type=int, help="how many steps the framework keeps")
    parser.add_argument("--kill-at", type=int, default=0, help="SIGKILL on every rank")
    parser.add_argument("--wrong", action="store_true", help="train with other weights than loaded")
    parser.add_argument("--stop", action="store_true", help="end with 30 on a discontinuous loss")
    return parser.parse_args()
