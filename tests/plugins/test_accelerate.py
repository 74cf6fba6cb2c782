"""An Accelerator keeps its state in a run, and goes on from one."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptkit
from ckptkit import Run
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer
from ckptkit.plugins.accelerate import load_state, save_state
from tests.live.pool import Pool
from tests.plugins import accelerated
from tests.servers.s3_server import Bucket

Train = Callable[..., list[dict[str, Any]]]


def on_rank(location: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return accelerated.train(location, strategy, **options)


def refused_on_rank(location: str, options: dict[str, Any]) -> str:
    return accelerated.refusal(location, **options)


@pytest.fixture
def train(gloo: Pool) -> Train:
    """What each rank has seen of a training."""

    def run(location: object, strategy: str, **options: Any) -> list[dict[str, Any]]:
        kind, ranks = strategy.split(":")
        return gloo.run(int(ranks), on_rank, str(location), kind, options)

    return run


@contextmanager
def one_process() -> Iterator[Accelerator]:
    try:
        yield Accelerator(cpu=True)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def assert_same(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """To the bit, on each rank: the last losses, rates and examples, the model, the optimizer."""
    for mine, theirs in zip(resumed, whole, strict=True):
        for key in ("losses", "rates", "seen"):
            assert mine[key] == theirs[key][-len(mine[key]) :], key
        assert mine["total"] == theirs["total"]
        for key in ("model", "moments"):
            assert pickle.dumps(mine[key]) == pickle.dumps(theirs[key]), key


@pytest.mark.parametrize(
    ("strategy", "stateful", "killed_after"),  # in the middle of the first epoch, and at its end
    [("ddp:2", False, 3), ("ddp:2", True, 4), ("fsdp:2", True, 3), ("fsdp:2", False, 4)],
)
def test_a_training_that_was_killed_goes_on_to_the_bit(
    strategy: str, stateful: bool, killed_after: int, train: Train, tmp_path: Path
) -> None:
    options = {"dropout": 0.2, "stateful": stateful}
    whole = train(tmp_path / "none", strategy, saves=False, **options)
    train(tmp_path, strategy, killed_after=killed_after, **options)
    assert str(ckptkit.open(tmp_path).strategy) == strategy
    resumed = train(tmp_path, strategy, **options)
    assert {len(rank["losses"]) for rank in resumed} == {8 - killed_after}
    assert_same(resumed, whole)


@pytest.mark.parametrize(
    ("before", "after"), [("fsdp:2", "ddp:1"), ("fsdp:2", "ddp:2"), ("ddp:1", "fsdp:2")]
)
def test_it_goes_on_under_another_strategy_and_size(
    before: str, after: str, train: Train, tmp_path: Path
) -> None:
    (whole,) = train(tmp_path / "none", "ddp:1", saves=False)
    train(tmp_path, before, killed_after=3)
    resumed = train(tmp_path, after)
    examples = zip(*(rank["seen"] for rank in resumed), strict=True)
    assert [list(chain(*step)) for step in examples] == whole["seen"][3:]
    for rank in resumed:
        assert rank["losses"] == pytest.approx(whole["losses"][3:], abs=1e-6)
        assert rank["rates"] == whole["rates"][3:]
        assert all(np.allclose(rank["model"][n], v, atol=1e-6) for n, v in whole["model"].items())


def test_loaders_that_know_where_they_are_go_on_with_batches_of_one_size(
    train: Train, gloo: Pool, tmp_path: Path
) -> None:
    (whole,) = train(tmp_path / "none", "ddp:1", saves=False, stateful=True)
    train(tmp_path, "ddp:2", stateful=True, killed_after=3)
    other = {"stateful": True, "batch": 2}
    (said,) = gloo.run(1, refused_on_rank, str(tmp_path), other)
    assert "in the middle of batches of 4 for 2 ranks, and has batches of 2 here" in said
    assert 'skip=["dataloader"]' in said
    (resumed,) = train(tmp_path, "ddp:1", stateful=True)
    assert resumed["seen"] == whole["seen"][3:]


def test_a_run_in_a_bucket_is_saved_in_the_background_and_falls_back(
    train: Train, bucket: Bucket
) -> None:
    location, options = f"{bucket.url}/run", bucket.options
    run = {"storage_options": options, "asynchronous": True, "keep_last": 2}
    whole = train(location, "ddp:1", run=run)
    steps = Run(location, storage_options=options)
    assert steps.steps() == [7, 8]
    store = steps._store
    (pack,) = (each.key for each in store.list("step-0000000008/data"))
    store.put(pack, bytes(store.size(pack)))
    resumed = train(location, "ddp:1", run={**run, "overwrite": True}, how={"fallback": True})
    assert len(resumed[0]["losses"]) == 1
    assert_same(resumed, whole)


def test_several_models_and_what_a_caller_adds_come_back(tmp_path: Path) -> None:
    with one_process() as accelerator:
        models = [accelerator.prepare(nn.Linear(2, 2)) for _ in range(2)]
        adams = [accelerator.prepare(torch.optim.Adam(model.parameters())) for model in models]
        for model, adam in zip(models, adams, strict=True):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            adam.step()
        accelerator.step = 3
        save_state(accelerator, tmp_path, 1, extra={"tokens": 7})
        kept = [model.weight.detach().clone() for model in models]
        for model in models:
            nn.init.zeros_(model.weight)
        accelerator.step = 0
        restored = load_state(accelerator, tmp_path)
        assert restored is not None
        assert (restored.step, restored.extra["tokens"], accelerator.step) == (1, 7, 3)
        assert all(torch.equal(m.weight, k) for m, k in zip(models, kept, strict=True))
        with ckptkit.open(tmp_path) as step:
            assert "model/0.weight" in step.arrays
            assert "optimizer/1.weight/exp_avg" in step.arrays


def test_two_loaders_of_the_same_data_count_for_themselves(tmp_path: Path) -> None:
    with one_process() as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        data = DataLoader(TensorDataset(torch.ones(4, 2)))
        loaders = [accelerator.prepare(DataLoader(data.dataset)) for _ in range(2)]
        for _ in range(3):
            assert len(list(loaders[0])) == 4
        for step, _ in enumerate(loaders[1], 1):
            save_state(accelerator, tmp_path, step)
            with ckptkit.open(tmp_path) as opened:
                epochs = opened.objects["extra/accelerate"]["epochs"]
            assert epochs == [3, int(step == 4)]


def test_a_location_without_a_run_gives_none(tmp_path: Path) -> None:
    with one_process() as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        assert load_state(accelerator, tmp_path / "new") is None
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "train.log").write_text("step 0")
        assert load_state(accelerator, tmp_path / "new") is None


def test_what_accelerate_wrote_itself_is_no_run_that_is_empty(tmp_path: Path) -> None:
    with one_process() as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(str(tmp_path))
        with pytest.raises(UsageError, match="a checkpoint of another kind") as caught:
            load_state(accelerator, tmp_path)
        assert "accelerator.load_state(" in caught.value.hint


def test_a_step_of_another_model_is_refused(tmp_path: Path) -> None:
    with one_process() as accelerator:
        accelerator.prepare(nn.Linear(2, 2))
        save_state(accelerator, tmp_path, 1)
        accelerator.free_memory()
        accelerator.prepare(nn.Linear(2, 3))
        with pytest.raises(ckptkit.live.StateMismatchError, match=r"weight.*\(2, 2\)"):
            load_state(accelerator, tmp_path)


def test_what_would_not_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an Accelerator"):
        save_state(nn.Linear(2, 2), tmp_path, 1)
    with one_process() as accelerator:
        with pytest.raises(UsageError, match="has no model") as caught:
            save_state(accelerator, tmp_path, 1)
        assert "accelerator.prepare(" in caught.value.hint
        accelerator.prepare(nn.Linear(2, 2))
        with pytest.raises(UsageError, match="the plugin's own"):
            save_state(accelerator, tmp_path, 1, extra={"rng": 1})
        accelerator.state.distributed_type = DistributedType.DEEPSPEED
        with pytest.raises(UsageError, match="not another engine"):
            save_state(accelerator, tmp_path, 1)
    assert not Run(tmp_path).steps()


def test_another_release_is_named(tmp_path: Path) -> None:
    with one_process() as accelerator:
        del accelerator._models
        with pytest.raises(
            UsageError, match=r"made for accelerate 1\.15, .*: it has no Accelerator\._models"
        ):
            save_state(accelerator, tmp_path, 1)


def test_schedulers_that_go_as_many_steps_as_there_are_processes_are_told_of(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "ddp:2", split=False, killed_after=3)
    with one_process() as accelerator, caplog.at_level(logging.WARNING, "ckptkit.plugins"):
        accelerated.prepared(accelerator)
        accelerator.register_for_checkpointing(accelerated.Average())
        load_state(accelerator, Checkpointer(tmp_path))
    assert "schedulers made 2 steps" in caplog.text
