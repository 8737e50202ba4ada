"""A small training with timm, by the code of its page; run by torchrun, see `job_options`."""

from __future__ import annotations

from job_options import define_torchvision_operators, die, job_options, run_recipe

define_torchvision_operators()
options = job_options()


def at_step(step: int) -> None:
    if step == options.kill_at:
        die()


run_recipe(
    "timm",
    {
        '"auto", "run-7"': f'"auto", {options.root!r}',
        'makedirs("run-7"': f"makedirs({options.root!r}",
        'checkpoint_dir="run-7"': f"checkpoint_dir={options.root!r}",
        "scheduler.step(first)": "scheduler.step(first)"
        + "; [p.data.mul_(3) for p in model.parameters()]" * options.wrong,
        "optimizer.zero_grad()": "at_step(step); optimizer.zero_grad()",
    },
    at_step=at_step,
)
