"""Ranks that share one GPU, over gloo.

`make test-gpu` runs it, and says to jobs of ranks where they are to train. Not all jobs can: with
torch 2.11, what DTensor asks of gloo for tensors on a GPU ended the process: `full_tensor`, and so
tensor parallelism.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptkit.live import Checkpointer
from tests.live.network import DEVICE
from tests.live.pool import Died, Pool
from tests.live.strategies import build

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="make test-gpu runs it, with a GPU")


def train(layout: str, location: str, dies_after: int) -> list[str]:
    """The losses of the steps that are left, each of which is saved in the background."""
    job, found = build(layout, seed=5), []
    with Checkpointer(location, timeout=30, asynchronous=True, differing=["*seen"]) as checkpointer:
        restored = checkpointer.restore(model=job.model, optimizer=job.optimizer)
        for step in range(0 if restored is None else restored.step, 8):
            found += [loss.hex() for loss in job.train([step])]
            checkpointer.save(step + 1, model=job.model, optimizer=job.optimizer)
            if step == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return found


@pytest.mark.parametrize("layout", ["fsdp2:2", "ddp:2"])
def test_a_job_that_was_killed_goes_on_with_the_same_losses(
    gloo: Pool, tmp_path: Path, layout: str
) -> None:
    whole = gloo.run(2, train, layout, str(tmp_path / "whole"), -1)
    died = gloo.run(2, train, layout, str(tmp_path / "killed"), 4, may_die=(0, 1))
    assert all(isinstance(each, Died) for each in died)
    rest = gloo.run(2, train, layout, str(tmp_path / "killed"), -1)
    assert 3 <= len(rest[0]) < 8
    assert rest == [losses[-len(rest[0]) :] for losses in whole]
