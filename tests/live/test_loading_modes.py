"""What a load does where the step and the objects differ, and that it does nothing where it must
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from ckptkit.checkpoint.read.reader import ReadPlan, Staged
from ckptkit.errors import CkptkitError, NotFoundError, PeerError, StorageError
from ckptkit.live import (
    Checkpointer,
    Restored,
    StateMismatchError,
    fill,
    load,
    load_state,
    save,
)
from ckptkit.live.state import ranks
from ckptkit.storage.base.buffers import PAGE, address_of
from tests.live.pool import Pool

Trained = tuple[nn.Module, AdamW]


def trained(*, sharded: bool = False, seed: int = 0, **layers: nn.Module) -> Trained:
    """A model of some layers after one step."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for layer in layers.values() if sharded else ():
        fully_shard(layer)
    optimizer = AdamW(model.parameters(), lr=0.1 + seed, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + seed)
    optimizer.step()
    return model, optimizer


def saved(*, sharded: bool = False) -> Trained:
    half = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    return trained(
        sharded=sharded, same=nn.Linear(4, 5), old=nn.Linear(2, 2), low=half, wide=nn.Linear(4, 6)
    )


def other(*, sharded: bool = False) -> Trained:
    return trained(
        sharded=sharded,
        seed=1,
        same=nn.Linear(4, 5),
        new=nn.Linear(2, 2),
        low=nn.Linear(3, 3, bias=False),
        wide=nn.Linear(4, 7),
    )


def everything(model: nn.Module, optimizer: AdamW) -> list[Any]:
    """All values of a model and its optimizer."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [[local(tensor).tolist() for tensor in tensors], options]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


DIFFERENCES = [
    "missing: model/new.weight, model/new.bias",
    "unexpected: model/old.bias, model/old.weight, optimizer/old.bias/exp_avg",
    "reshaped: model/wide.weight: (6, 4) in the step, (7, 4) here, model/wide.bias: (6,) in the",
    "cast: model/low.weight: bfloat16 in the step, float32 here",
    "partial=True",
    "cast=True",
]


def refuse(location: str, sharded: bool) -> str:
    """Save, try to load into something else, and return what that said."""
    save(location, step=1, **of(saved(sharded=sharded)))
    model, optimizer = other(sharded=sharded)
    before = everything(model, optimizer)
    messages = []
    for partial, cast in ((False, False), (True, False), (False, True)):
        with pytest.raises(CkptkitError) as caught:
            load(location, model=model, optimizer=optimizer, partial=partial, cast=cast)
        assert everything(model, optimizer) == before
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages[0]


def of(both: Trained) -> dict[str, Any]:
    return {"model": both[0], "optimizer": both[1]}


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, True)])
def test_a_strict_load_names_all_that_differs_and_changes_nothing(
    gloo: Pool, tmp_path: Path, ranks: int, sharded: bool
) -> None:
    first, *others = gloo.run(ranks, refuse, str(tmp_path), sharded)
    assert first.startswith("StateMismatchError")
    for words in DIFFERENCES:
        assert words in first
    assert others == [first] * (ranks - 1)


def load_what_fits(location: str, sharded: bool) -> list[Any]:
    source = saved(sharded=sharded)
    save(location, step=1, **of(source))
    model, optimizer = other(sharded=sharded)
    untouched = other(sharded=sharded)
    report = load(location, model=model, optimizer=optimizer, partial=True, cast=True).report
    assert not report.is_exact
    for name, parameter in model.named_parameters():
        theirs = untouched if name.startswith(("new", "wide")) else source
        expected = theirs[0].get_parameter(name)
        assert local(parameter).tolist() == local(expected).tolist(), name
        for key, value in theirs[1].state[expected].items():
            mine = optimizer.state[parameter][key]
            assert local(mine).tolist() == local(value).tolist(), f"{name} {key}"
            assert mine.dtype == (torch.float32 if key == "step" else parameter.dtype)
    optimizer.step()
    return [report.missing, report.unexpected, report.reshaped, report.cast]


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, True)])
def test_a_partial_load_takes_what_fits_and_says_what_it_left(
    gloo: Pool, tmp_path: Path, ranks: int, sharded: bool
) -> None:
    reports = gloo.run(ranks, load_what_fits, str(tmp_path), sharded)
    missing, unexpected, reshaped, cast = reports[0]
    assert missing == ["model/new.weight", "model/new.bias"]
    keys = ("exp_avg", "exp_avg_sq", "step")
    states = [f"optimizer/old.{kind}/{key}" for kind in ("bias", "weight") for key in keys]
    assert unexpected == ["model/old.bias", "model/old.weight", *states]
    assert [line.split(":")[0] for line in reshaped] == ["model/wide.weight", "model/wide.bias"]
    assert [line.split(":")[0] for line in cast] == ["model/low.weight"]
    assert reports == [reports[0]] * ranks


def test_what_goes_through_memory_is_read_by_several_threads(tmp_path: Path) -> None:
    whole = {f"w{number}": torch.arange(100.0) + number for number in range(9)}
    save(tmp_path, step=1, state={"s": whole})
    found = {name: torch.zeros(100, dtype=torch.bfloat16) for name in whole}
    meeting, stage = Barrier(3), ReadPlan.stage

    def together(self: ReadPlan, run: tuple[int, int], memory: memoryview) -> Iterator[Staged]:
        meeting.wait(20)
        yield from stage(self, run, memory)

    with (
        patch.object(fill, "_RUN_BYTES", 300),
        patch.object(fill, "_BYTES_PER_THREAD", 100),
        patch.object(ranks, "copying_threads", lambda _: 3),
        patch.object(ReadPlan, "stage", together),
    ):
        load(tmp_path, state={"s": found}, cast=True)
    assert all(torch.equal(found[name].float(), each) for name, each in whole.items())


def test_a_fresh_optimizer_of_a_cast_model_keeps_moments_of_its_own_dtype(tmp_path: Path) -> None:
    half = trained(layer=nn.Linear(3, 3).to(torch.bfloat16))
    save(tmp_path, step=1, **of(half))
    model = nn.ModuleDict({"layer": nn.Linear(3, 3)})
    optimizer = AdamW(model.parameters())
    load(tmp_path, model=model, optimizer=optimizer, cast=True)
    moments = optimizer.state[model.get_parameter("layer.weight")]["exp_avg"]
    expected = half[1].state[half[0].get_parameter("layer.weight")]["exp_avg"]
    assert moments.dtype == torch.float32
    assert torch.equal(moments, expected.float())


def tree(fill: float, mesh: Any = None) -> dict[str, Any]:
    """A nested dictionary such as users of torch's checkpoints have."""
    cut = torch.arange(15.0).reshape(5, 3) + fill
    return {
        "plain": torch.full((2, 3), fill),
        "scalar": torch.tensor(fill),
        "nested": {"list": [torch.full((2,), fill), {"inner": torch.full((1,), fill)}, fill]},
        "numbers": (int(fill), "text", None, True),
        "cut": cut if mesh is None else distribute_tensor(cut, mesh, [Shard(0)]),
        "whole": torch.ones(3) if mesh is None else distribute_tensor(cut, mesh, [Replicate()]),
    }


def fill_in_place(location: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save(location, step=1, state={"mine": tree(3.0, mesh), "more": {"x": 1}})
    state = tree(7.0, mesh)
    tensors = [state["plain"], state["nested"]["list"][0], state["cut"], state["whole"]]
    del state["nested"]["list"][1]["inner"], state["numbers"]
    load(location, state={"mine": state})
    again = [state["plain"], state["nested"]["list"][0], state["cut"], state["whole"]]
    assert all(one is other for one, other in zip(tensors, again, strict=True))
    expected = tree(3.0, mesh)
    assert state["plain"].tolist() == expected["plain"].tolist()
    assert state["scalar"].item() == 3.0
    assert local(state["cut"]).tolist() == local(expected["cut"]).tolist()
    assert local(state["whole"]).tolist() == local(expected["whole"]).tolist()
    assert state["nested"]["list"][1]["inner"].tolist() == [3.0]
    assert state["nested"]["list"][2] == 3.0
    assert state["numbers"] == (3, "text", None, True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_nested_dictionaries_are_filled_in_place(gloo: Pool, tmp_path: Path, ranks: int) -> None:
    gloo.run(ranks, fill_in_place, str(tmp_path))


class Average:
    """Anything with a state, such as an average of weights."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((4,), value)
        self.count = int(value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        """Its values."""
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        self.value, self.count = state["value"], state["count"]
        self.loads += 1


def test_objects_with_a_state_take_it_over(tmp_path: Path) -> None:
    save(tmp_path, step=1, state={"average": Average(5.0), "pair": [Average(1.0), Average(2.0)]})
    average, pair = Average(0.0), [Average(0.0), Average(0.0)]
    load(tmp_path, state={"average": average, "pair": pair})
    assert (average.value.tolist(), average.count, average.loads) == ([5.0] * 4, 5, 1)
    assert [each.count for each in pair] == [1, 2]


def test_a_group_that_the_step_does_not_have_is_missing(tmp_path: Path) -> None:
    save(tmp_path, step=1, state={"a": {"x": torch.ones(1)}})
    with pytest.raises(StateMismatchError, match="missing: b/x, b"):
        load(tmp_path, state={"b": {"x": torch.ones(1)}})
    model = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match=r"missing: model/weight, model/bias"):
        load(tmp_path, model=model)
    restored = load(tmp_path, model=model, optimizer=AdamW(model.parameters()), partial=True)
    assert restored.report.missing == ["model/weight", "model/bias", "optimizer"]


def test_a_step_or_a_run_can_be_loaded(tmp_path: Path) -> None:
    def loaded(read: Callable[[dict[str, Any]], Restored | None]) -> float:
        state = {"x": torch.zeros(1)}
        assert read({"s": state})
        return float(state["x"])

    for step in (1, 2, 3):
        save(tmp_path, step=step, state={"s": {"x": torch.full((1,), float(step))}})
    with Checkpointer(tmp_path) as checkpointer:
        assert loaded(lambda state: checkpointer.restore(state=state)) == 3.0
        assert loaded(lambda state: checkpointer.restore(state=state, step=1)) == 1.0
        assert loaded(lambda state: load(tmp_path, state=state, verify=False)) == 3.0
        assert loaded(lambda state: load(tmp_path / "step-0000000002", state=state)) == 2.0
        with pytest.raises(NotFoundError):
            checkpointer.restore(state={"s": {}}, step=9)
    with pytest.raises(NotFoundError):
        load(tmp_path / "nowhere", state={"s": {}})
    with Checkpointer(tmp_path / "empty") as checkpointer:
        assert checkpointer.restore(state={"s": {}}) is None


def load_nothing(location: str) -> str:
    with pytest.raises((NotFoundError, PeerError)) as caught:
        load(location, state={"s": {}})
    with Checkpointer(location) as checkpointer:
        assert checkpointer.restore(state={"s": {}}) is None
    return str(caught.value)


def test_all_ranks_learn_that_there_is_nothing(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, load_nothing, str(tmp_path / "nowhere"))
    assert "nowhere" in first
    assert "because of rank 0: NotFoundError" in second


def test_tensors_are_read_without_a_job(tmp_path: Path) -> None:
    model = nn.Linear(2, 3).to(torch.bfloat16)
    save(tmp_path, step=1, model=model, state={"s": {"x": torch.arange(3)}})
    found = load_state(tmp_path)
    assert set(found) == {"model/weight", "model/bias", "s/x"}
    assert torch.equal(found["model/weight"], model.weight)
    assert list(load_state(tmp_path, names=["s/x"])) == ["s/x"]
    with pytest.raises(NotFoundError, match="s/y"):
        load_state(tmp_path, names=["s/y"])


def test_what_torch_has_to_copy_goes_through_bounded_memory(tmp_path: Path) -> None:
    saved = {f"{n}": torch.randn(33, 7 * n + 1) for n in range(9)}
    save(tmp_path, step=1, state={"s": saved}, chunk_bytes=500)
    found = {n: torch.zeros(each.shape[::-1], dtype=torch.float64).T for n, each in saved.items()}
    runs, buffers, ends_at = list[int](), set[int](), 0
    stage = ReadPlan.stage

    def counted(self: ReadPlan, run: tuple[int, int], memory: memoryview) -> Iterator[Staged]:
        runs.append(int(self.stop[run[0] : run[1]].max() - self.start[run[0]]))
        buffers.add(address_of(memory))
        if len(runs) == ends_at:
            raise StorageError("the disk is gone")
        yield from stage(self, run, memory)

    with (
        patch.object(fill, "_RUN_BYTES", 3000),
        patch.object(fill, "_BYTES_PER_THREAD", 100),
        patch.object(fill, "_STAGING_BYTES", 2 * (3000 + PAGE)),
        patch.object(ranks, "copying_threads", lambda _: 4),
        patch.object(ReadPlan, "stage", counted),
    ):
        load(tmp_path, state={"s": found}, cast=True)
        assert all(torch.equal(found[n], saved[n].double()) for n in saved)
        assert len(runs) > 5
        assert max(runs) <= 3000
        assert len(buffers) == 2
        for ends_at in (2, 4, len(runs)):  # noqa: B007 — `counted` looks at it
            runs.clear()
            with pytest.raises(StorageError, match="the disk is gone"):
                load(tmp_path, state={"s": found}, cast=True)
