"""What a training has besides tensors: counters, cursors, schedulers, scalers, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, lr_scheduler

import ckptkit
from ckptkit.errors import PeerError, UnsupportedTypeError, UsageError
from ckptkit.live import (
    Checkpointer,
    Extra,
    PerRank,
    Replicated,
    Split,
    StateMismatchError,
    Sum,
    WorldSizeError,
    load,
    rng_state,
    save,
    set_rng_state,
)
from tests.live.pool import Pool


def save_values(location: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    items = list(range(10 * rank, 10 * rank + rank + 2))
    extra = {
        "note": "x",
        "nested": Replicated({"a": [1, (2, None)], "array": np.arange(3)}),
        "mine": PerRank({"rank": rank}),
        "tokens": Sum(100 + rank),
        "loss": Sum(0.5),
        "counts": Sum(np.array([rank, 1])),
        "items": Split(items),
        "left": Split(5 * ranks),
    }
    with Checkpointer(location, timeout=20) as checkpointer:
        checkpointer.save(1, extra=extra)


def load_values(location: str) -> dict[str, Any]:
    extra = load(location).extra
    found = {name: extra[name] for name in extra if name != "mine"}
    found["counts"], found["nested"]["array"] = found["counts"].tolist(), 0
    found["mine"] = extra.get("mine", "fallback")
    found["total"] = extra.total("tokens")
    found["of ranks"] = extra.of_ranks("mine")
    if len(extra.of_ranks("mine")) != dist.get_world_size():
        with pytest.raises(WorldSizeError, match="a job of 3, this one has"):
            extra["mine"]
    return found


@pytest.fixture(scope="module")
def of_three(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    location = str(tmp_path_factory.mktemp("of-three"))
    gloo.run(3, save_values, location)
    return location


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_values_come_back_to_any_number_of_ranks(gloo: Pool, of_three: str, ranks: int) -> None:
    found = gloo.run(ranks, load_values, of_three)
    for rank in found:
        assert (rank["note"], rank["total"]) == ("x", 303)
        assert rank["nested"] == {"a": [1, (2, None)], "array": 0}
        assert rank["of ranks"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert sum(rank["tokens"] for rank in found) == 303
    assert sum(rank["loss"] for rank in found) == pytest.approx(1.5)
    assert [sum(c) for c in zip(*(rank["counts"] for rank in found), strict=True)] == [3, 3]
    items = [item for rank in found for item in rank["items"]]
    assert items == [0, 1, 10, 11, 12, 20, 21, 22, 23]
    assert sum(rank["left"] for rank in found) == 45
    if ranks == 3:
        assert [rank["mine"] for rank in found] == [{"rank": rank} for rank in range(3)]
        assert [rank["tokens"] for rank in found] == [100, 101, 102]
    else:
        assert [rank["mine"] for rank in found] == ["fallback"] * ranks


def disagree(location: str) -> str:
    with pytest.raises(PeerError if dist.get_rank() else Exception) as caught:
        save(location, step=1, extra={"note": dist.get_rank()}, timeout=20)
    return str(caught.value)


def test_a_value_that_ranks_disagree_about_is_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, disagree, str(tmp_path)):
        assert "note" in message
    assert not ckptkit.Run(tmp_path).steps()


def test_values_that_no_checkpoint_can_hold_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"extra/odd.*x: a _thread\.lock"):
        save(tmp_path, step=1, extra={"odd": {"x": __import__("threading").Lock()}})
    with pytest.raises(UsageError, match=r"extra"):
        save(tmp_path, step=1, state={"extra": {}})
    with pytest.raises(UsageError, match="Sum and Split"):
        save(tmp_path, step=1, state={"mine": Sum(3)})


class Loader:
    """A data loader that knows where it is."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        """With a tensor, as torch's stateful loader has."""
        return {"at": self.at, "generator": torch.full((4,), self.at, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        assert state["generator"].tolist() == [state["at"]] * 4
        self.at = state["at"]


def save_loader(location: str) -> None:
    save(location, step=1, dataloader=Loader(10 + dist.get_rank()))


def load_loader(location: str) -> list[Any]:
    loader = Loader()
    try:
        load(location, dataloader=loader)
    except StateMismatchError as error:
        load(location, dataloader=loader, skip=["dataloader"])
        return [loader.at, str(error)]
    return [loader.at]


def test_a_loader_goes_on_where_its_rank_was(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_loader, str(tmp_path))
    assert gloo.run(2, load_loader, str(tmp_path)) == [[10], [11]]
    for at, message in gloo.run(3, load_loader, str(tmp_path)):
        assert at == 0
        assert "shared out its data between 2, this one does between 3" in message


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_with_its_optimizer(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, SGD, Any]:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: SGD, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler, 3)
    save(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    model, again, resumed = made()
    load(tmp_path, model=model, optimizer=again, scheduler=resumed)
    assert type(resumed.state_dict()) is type(scheduler.state_dict())
    assert plain(resumed.state_dict()) == plain(scheduler.state_dict())
    assert rates(again, resumed, 4) == rates(optimizer, scheduler, 4)


def plain(state: dict[str, Any]) -> str:
    return repr({k: v for k, v in state.items() if "0x" not in repr(v)})


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    save(tmp_path, step=1, scaler=scaler)
    again = torch.amp.GradScaler("cpu")
    load(tmp_path, scaler=again)
    assert again.state_dict() == scaler.state_dict()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]  # noqa: NPY002

    np.random.randn()  # noqa: NPY002 — leaves half a pair behind
    save(tmp_path, step=1, extra={"rng": PerRank(rng_state())})
    expected = draw()
    extra: Extra = load(tmp_path).extra
    set_rng_state(extra.get("rng"))
    assert draw() == expected
    set_rng_state(None)
    with pytest.raises(UsageError):
        set_rng_state({"torch": 1})
