"""Plugins over a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ckptkit.plugins.accelerate import load_state, save_state
from ckptkit.plugins.dcp import Reader, Writer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of one process
]

STAGING = {
    "plain": None,
    "pinned": {"use_async_staging": False},
    "pinned, in the background": {"use_async_staging": True},
}


def state(value: float) -> dict[str, Any]:
    return {
        "weight": torch.full((2048, 2048), value, device="cuda", dtype=torch.bfloat16),
        "moments": {"m": torch.full((2048, 2048), -value, device="cuda"), "step": 7},
    }


def test_dcp_saves_and_loads_tensors_of_a_device(tmp_path: Path) -> None:
    save(state(3.0), storage_writer=Writer(tmp_path, step=1), no_dist=True)
    found = state(0.0)
    load(found, storage_reader=Reader(tmp_path), no_dist=True)
    assert bool((found["weight"] == 3).all())
    assert bool((found["moments"]["m"] == -3).all())


@pytest.mark.parametrize("staging", STAGING)
def test_what_dcp_stages_is_what_was_there(tmp_path: Path, staging: str) -> None:
    options: Any = STAGING[staging]
    for step in (1, 2, 3):
        mine = state(float(step))
        # Torch 2.11's cannot be used again.
        stager = options and DefaultStager(StagingOptions(use_shared_memory=False, **options))
        answer: Any = async_save(
            mine, storage_writer=Writer(tmp_path, step=step), no_dist=True, async_stager=stager
        )
        if hasattr(answer, "staging_completion"):
            answer.staging_completion.result()
            answer = answer.upload_completion
        mine["weight"].fill_(-1)
        mine["moments"]["m"].fill_(-1)
        answer.result()
        if stager is not None:
            stager.close()
    for step in (1, 2, 3):
        found = state(0.0)
        load(found, storage_reader=Reader(tmp_path, step=step), no_dist=True)
        assert bool((found["weight"] == step).all())
        assert bool((found["moments"]["m"] == -step).all())


@contextmanager
def prepared(seed: int) -> Iterator[tuple[Accelerator, Any, Any]]:
    torch.manual_seed(seed)
    accelerator = Accelerator()
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    try:
        yield accelerator, model, optimizer
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = model(inputs.to(accelerator.device)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_an_accelerator_goes_on_to_the_bit(tmp_path: Path) -> None:
    with prepared(0) as (accelerator, model, optimizer):
        assert accelerator.device.type == "cuda"
        train(accelerator, model, optimizer, range(3))
        save_state(accelerator, tmp_path, 3)
        wanted = train(accelerator, model, optimizer, range(3, 6))
    with prepared(1) as (accelerator, model, optimizer):
        load_state(accelerator, tmp_path)
        assert train(accelerator, model, optimizer, range(3, 6)) == wanted
