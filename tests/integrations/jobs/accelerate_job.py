"""A small training loop with accelerate; run by torchrun with the arguments of `job_options`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from job_options import die, ending, job_options

from ckptctl.integrations.accelerate import Checkpoints, RecordOptions

options = job_options()
set_seed(3)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
data = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
checkpoints = Checkpoints(
    accelerator, options.root, RecordOptions(verdict_after=8, stop=options.stop)
)
with ending(options):
    start = checkpoints.load_state("auto") or 0
    if options.wrong:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    batches = accelerator.skip_first_batches(loader, start)
    for step, batch in zip(range(start + 1, options.steps + 1), batches, strict=False):
        loss = (model(batch) - batch[:, :4].sin()).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step: {step}, loss: {mean:.6f}, lr: {scheduler.get_last_lr()[0]:.3e}")
        checkpoints.log(step, mean, lr=scheduler.get_last_lr()[0])
        if step == options.kill_at:
            die()
        if step % options.save_every == 0:
            checkpoints.save_state(step)
    checkpoints.close()
    accelerator.end_training()
