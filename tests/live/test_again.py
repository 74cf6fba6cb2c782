"""A later save uses again what the last one found out of the tensors, and only where it holds:
whatever has changed between the two, the step is the one that a job saves which just began.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptkit
from ckptkit.checkpoint.write.writer import Writer
from ckptkit.live import Checkpointer
from ckptkit.live.state.parts import HandCuts
from tests.live.pool import Pool


class Net(nn.Module):
    """Layers that are alike, a buffer, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.said = {"epoch": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.said)

    def set_extra_state(self, state: Any) -> None:
        self.said = state


class Job:
    """A model and its optimizer, and more that is saved with them."""

    def __init__(self, spread: Callable[[nn.Module], object] | None = None) -> None:
        torch.manual_seed(0)
        self.net = Net()
        if spread is not None:
            spread(self.net)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters())
        self.state: dict[str, Any] = {"ema": {"a": torch.ones(4), "b": torch.zeros(4)}}
        self.extra: dict[str, Any] = {"n": 0}
        self.model: Any = self.net
        self.step()

    def step(self) -> None:
        """Give every tensor other values."""
        for parameter in self.net.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            self.net.state_dict(keep_vars=True).get("mean", torch.zeros(8)).add_(1)
        self.state["ema"]["a"] += 1
        self.extra["n"] += 1

    def save(self, checkpointer: Checkpointer, step: int) -> dict[str, Any]:
        """All that the step says, and how often an array was added to it one by one."""
        added, add = [], Writer.add_alike
        Writer.add_alike = lambda *args, **keywords: (added.append(1), add(*args, **keywords))  # type: ignore[method-assign, assignment, func-returns-value]
        try:
            checkpointer.save(
                step,
                model=self.model,
                optimizer=self.optimizer,
                state=self.state,
                extra=self.extra,
            )
        finally:
            Writer.add_alike = add  # type: ignore[method-assign]
        with ckptkit.open(f"{checkpointer.location}/step-{step:010d}") as opened:
            arrays = {
                name: (array.info, opened.read(name).tobytes())
                for name, array in opened.arrays.items()
            }
            table = opened.manifest
            layout = [
                table.aliases,
                table.offset.tolist(),
                table.crc32.tolist(),
                table.pack.tolist(),
            ]
            objects = {item.name: (item.semantics, item.value) for item in table.objects}
            return {
                "said": [opened.strategy, arrays, layout, objects],
                "is_again": not added,
            }


Change: TypeAlias = Callable[[Job], object]


def saved_again(job: Job, change: Change, place: str) -> list[bool]:
    """Whether the second save, that after the change and the one after that used what the one
    before had found out; each is compared with a first save of the same.
    """
    found = []
    with Checkpointer(f"{place}/later") as later:
        job.save(later, 0)
        for step in range(1, 4):
            if step < 3:
                job.step()
            if step == 2:
                change(job)  # after which an optimizer may not be able to make a step
            mine = job.save(later, step)
            with Checkpointer(f"{place}/first-{step}") as first:
                assert job.save(first, step)["said"] == mine["said"]
            found.append(mine["is_again"])
    assert not ckptkit.verify(f"{place}/later")
    return found


def _optimizer_of(job: Job, **options: Any) -> None:
    job.optimizer = torch.optim.AdamW(job.net.parameters(), **options)
    job.step()


def _replaced(job: Job) -> None:
    job.net.first.weight = nn.Parameter(torch.rand(8, 8))
    _optimizer_of(job)


def _resized(job: Job) -> None:
    job.net.second = nn.Linear(8, 6)
    _optimizer_of(job)


def _resized_in_place(job: Job) -> None:
    job.net.second.weight.data = torch.rand(4, 8)
    _optimizer_of(job)


def _transposed(job: Job) -> None:
    job.net.first.weight.data = torch.rand(16, 4)
    _optimizer_of(job)


def _cast(job: Job) -> None:
    job.net.first.to(torch.bfloat16)
    _optimizer_of(job)


def _cast_to_as_many_bytes(job: Job) -> None:
    job.state["ema"]["b"] = torch.arange(4, dtype=torch.int32)


def _renamed(job: Job) -> None:
    job.net.third = job.net.second
    del job.net.second


def _exchanged(job: Job) -> None:
    """Two that are alike in everything but their names."""
    job.net.first, job.net.second = job.net.second, job.net.first


def _tied(job: Job) -> None:
    job.net.second.weight = job.net.first.weight
    _optimizer_of(job)


def _tied_otherwise(job: Job) -> None:
    job.net.third = nn.Linear(8, 8)
    job.net.third.weight = job.net.first.weight
    _optimizer_of(job)


def _state_added(job: Job) -> None:
    job.optimizer.state[job.net.first.weight]["more"] = torch.ones(3)


def _state_removed(job: Job) -> None:
    del job.optimizer.state[job.net.first.weight]["exp_avg_sq"]


def _state_of_another_shape(job: Job) -> None:
    job.optimizer.state[job.net.first.bias]["exp_avg"] = torch.ones(2, 4)


def _state_in_another_order(job: Job) -> None:
    state = job.optimizer.state[job.net.first.weight]
    state["exp_avg"] = state.pop("exp_avg")


def _state_that_is_no_tensor(job: Job) -> None:
    state = job.optimizer.state[job.net.first.weight]
    state["step"] = int(state["step"])


def _in_several_groups(job: Job) -> None:
    net = job.net
    groups: list[dict[str, Any]] = [
        {"params": net.second.parameters(), "lr": 0.5},
        {"params": net.first.parameters()},
    ]
    job.optimizer = torch.optim.AdamW(groups)
    job.step()


def _another_optimizer(job: Job) -> None:
    job.optimizer = torch.optim.SGD(job.net.parameters(), lr=0.1, momentum=0.9)
    job.step()


def _made_a_parameter(job: Job) -> None:
    del job.net.mean
    job.net.register_parameter("mean", nn.Parameter(torch.ones(8), requires_grad=False))


CHANGES: dict[str, Change] = {
    "a module is another": _resized,
    "a parameter has another shape": _resized_in_place,
    "a parameter has another shape of as many elements": _transposed,
    "parameters are cast": _cast,
    "a tensor is cast to as many bytes": _cast_to_as_many_bytes,
    "a module has another name": _renamed,
    "two modules change places": _exchanged,
    "parameters are tied": _tied,
    "a parameter has a second name": _tied_otherwise,
    "an optimizer keeps more": _state_added,
    "an optimizer keeps less": _state_removed,
    "an optimizer keeps another shape": _state_of_another_shape,
    "an optimizer keeps it in another order": _state_in_another_order,
    "an optimizer keeps a number": _state_that_is_no_tensor,
    "parameters are in several groups": _in_several_groups,
    "the optimizer is another": _another_optimizer,
    "there is another buffer": lambda job: job.net.register_buffer("more", torch.ones(3)),
    "a buffer is a parameter": _made_a_parameter,
    "a buffer is not saved": lambda job: job.net._non_persistent_buffers_set.add("mean"),
    "a nested dictionary has more": lambda job: job.state["ema"].update(c=torch.ones(2)),
    "a nested dictionary has less": lambda job: job.state["ema"].pop("b"),
    "there is another nested dictionary": lambda job: job.state.update(more={"a": torch.ones(4)}),
    "nested tensors change places": lambda job: job.state.update(
        ema=dict(reversed(job.state["ema"].items()))
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_between_two_saves_is_seen(what: str, tmp_path: Path) -> None:
    assert saved_again(Job(), CHANGES[what], str(tmp_path)) == [True, False, True]


def _moved(job: Job) -> None:
    for parameter in job.net.parameters():
        parameter.data = parameter.detach().clone().t().contiguous().t()


UNCHANGED: dict[str, Change] = {
    "nothing": lambda _: None,
    "a parameter, which is another that is alike": _replaced,
    "a learning rate": lambda job: job.optimizer.param_groups[0].update(lr=0.5),
    "plain values": lambda job: job.extra.update(more=[1, 2, {"a": "b"}]),
    "extra state": lambda job: job.net.said.update(epoch=1),
    "the memory of all tensors, and its order": _moved,
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_what_is_no_tensor_and_where_tensors_lie_is_asked_each_time(
    what: str, tmp_path: Path
) -> None:
    assert saved_again(Job(), UNCHANGED[what], str(tmp_path)) == [True, True, True]


def test_a_job_without_tensors_is_saved_again(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.save(step, extra={"n": step})
    with ckptkit.open(tmp_path) as checkpoint:
        assert (checkpoint.step, checkpoint.objects["extra/n"]) == (2, 2)


def test_a_tensor_that_cannot_be_saved_any_more_is_refused_by_its_name(tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(tmp_path) as checkpointer:
        job.save(checkpointer, 0)
        job.state["ema"]["a"] = torch.ones(4, device="meta")
        with pytest.raises(ckptkit.CkptkitError, match="ema/a"):
            checkpointer.save(1, model=job.model, optimizer=job.optimizer, state=job.state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_was_saved_is_not_kept_in_memory(tmp_path: Path, asynchronous: bool) -> None:
    net = nn.Linear(8, 8)
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        for step in range(3):
            tensor = torch.ones(3)
            known = weakref.ref(tensor)
            checkpointer.save(step, model=net, state={"more": {"a": tensor}})
            checkpointer.wait()
            del tensor
            gc.collect()
            assert known() is None


class CutByHand:
    """A model whose wrapper knows how it is cut."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, cut: str) -> None:
        self.model = model
        self.mesh = mesh
        self.rules = HandCuts.of({"*first.weight": {"tp": cut}})


def _cut_otherwise(job: Job) -> None:
    job.model = CutByHand(job.net, job.model.mesh, "shard(1)")


def _spread_otherwise(how: Any, shape: tuple[int, ...], job: Job) -> None:
    """Each rank has as much as before, of something else."""
    mesh = job.state["ema"]["d"].device_mesh
    job.state["ema"]["d"] = distribute_tensor(torch.rand(shape), mesh, [how])


ON_TWO: dict[str, Change] = {
    "rules": _cut_otherwise,
    "copies": partial(_spread_otherwise, Replicate(), (2, 4)),
    "columns": partial(_spread_otherwise, Shard(1), (2, 8)),
    "nothing": lambda _: None,
}


def on_two_ranks(what: str, place: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    job = Job()
    job.model = CutByHand(job.net, mesh, "shard(0)")
    job.state["ema"]["d"] = distribute_tensor(torch.rand(4, 4), mesh, [Shard(0)])
    return saved_again(job, ON_TWO[what], place)


@pytest.mark.parametrize("what", ON_TWO)
def test_another_way_to_be_spread_is_seen(gloo: Pool, what: str, tmp_path: Path) -> None:
    is_again = what == "nothing"
    assert gloo.run(2, on_two_ranks, what, str(tmp_path)) == [[True, is_again, True]] * 2


def fully_sharded(place: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))

    def replaced(job: Job) -> None:
        job.__init__(lambda net: fully_shard(net.first, mesh=mesh))  # type: ignore[misc]

    return saved_again(Job(partial(fully_shard, mesh=mesh)), replaced, place)


def test_a_model_that_is_sharded_otherwise_is_seen(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, fully_sharded, str(tmp_path)) == [[True, False, True]] * 2


def with_an_empty_stage(place: str) -> None:
    rank = dist.get_rank()
    module = nn.ReLU() if rank else nn.Linear(4, 4)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    with Checkpointer(place) as checkpointer:
        for step in range(3):
            checkpointer.save(step, model=stage)


def test_a_stage_without_tensors_is_saved_again(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, with_an_empty_stage, str(tmp_path))
    with ckptkit.open(tmp_path) as checkpoint:
        assert (checkpoint.step, len(checkpoint.arrays)) == (2, 2)
