"""A small training with Lightning Fabric, by the code of its page; run by torchrun.

`--without-scheduler` trusts `fabric.load` with the scheduler, which a sharded load leaves out.
"""

from __future__ import annotations

import sys

from job_options import die, job_options, run_recipe

from ckptctl import CkptctlError

options = job_options()


def at_step(step: int) -> None:
    if step == options.kill_at:
        die()


restored = 'scheduler.load_state_dict(state["scheduler"])'
damaged = "; [p.data.mul_(3) for p in model.parameters()]" * options.wrong
try:
    run_recipe(
        "fabric",
        {
            '"auto", "run-7"': f'"auto", {options.root!r}',
            '"run-7/': f'"{options.root}/',
            '["step"] + 1, 13': f'["step"] + 1, {options.steps + 1}',
            "step % 4": f"step % {options.save_every}",
            "fabric.backward": "at_step(step); fabric.backward",
            restored: ("pass" if options.without_scheduler else restored) + damaged,
        },
        at_step=at_step,
    )
except CkptctlError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
