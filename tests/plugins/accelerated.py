"""Jobs of accelerate that ranks of a pool run: a loop over two epochs of four steps."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from ckptkit.errors import CkptkitError
from ckptkit.live import Checkpointer
from ckptkit.plugins.accelerate import load_state, save_state
from tests.plugins.launched import launched, whole

EPOCHS, STEPS = 2, 4


class Average:
    """Something that a user registers."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def accelerator(strategy: str, **loading: Any) -> Accelerator:
    options: dict[str, Any] = {"cpu": True}
    if strategy == "fsdp":
        options = {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="size_based_wrap",
                min_num_params=1,
                cpu_ram_efficient_loading=False,
            )
        }
    seeded = DataLoaderConfiguration(use_seedable_sampler=True, **loading)
    return Accelerator(dataloader_config=seeded, **options)


def prepared(job: Accelerator, *, dropout: float = 0.0, batch: int = 4) -> tuple[Any, ...]:
    """A model, its optimizer and scheduler, and sixteen examples, each of which is its number."""
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(16.0)[:, None].expand(16, 4))
    share = 1 if job.split_batches else job.num_processes
    loader = DataLoader(data, batch_size=batch // share, shuffle=True)
    return tuple(job.prepare(model, optimizer, StepLR(optimizer, 2), loader))


def train(
    location: str,
    strategy: str,
    *,
    killed_after: int | None = None,
    saves: bool = True,
    stateful: bool = False,
    split: bool = True,
    how: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Go on from the newest step until the end, or until the job is killed."""
    with launched(strategy), Checkpointer(location, **(run or {})) as checkpointer:
        job = accelerator(strategy, split_batches=split, use_stateful_dataloader=stateful)
        model, optimizer, scheduler, loader = prepared(job, **options)
        average = Average()
        job.register_for_checkpointing(average)
        restored = load_state(job, checkpointer, **(how or {})) if saves else None
        step = restored.step if restored else 0
        found: dict[str, Any] = {"losses": [], "rates": [], "seen": []}
        with suppress(StopIteration):
            for epoch in range(step // STEPS, EPOCHS):
                batches = loader
                loader.set_epoch(epoch)
                if step % STEPS and not stateful:
                    batches = job.skip_first_batches(loader, step % STEPS)
                for (rows,) in batches:
                    loss = model(rows / 16).square().mean()
                    job.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    step += 1
                    average.total += step
                    found["losses"].append(job.reduce(loss.detach(), "mean").item())
                    found["rates"].append(scheduler.get_last_lr())
                    found["seen"].append(rows[:, 0].tolist())
                    if saves:
                        save_state(job, checkpointer, step)
                    if step == killed_after:
                        raise StopIteration
        bare = job.unwrap_model(model)
        found["model"] = {name: whole(value) for name, value in bare.named_parameters()}
        states = optimizer.optimizer.state.values()
        found["moments"] = [whole(state["exp_avg"]) for state in states]
        found["total"] = average.total
        return found


def refusal(location: str, **options: Any) -> str:
    """What a training of one rank is refused with."""
    try:
        train(location, "ddp", **options)
    except CkptkitError as error:
        return str(error)
    return "it was not refused"
