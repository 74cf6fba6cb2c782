"""Tensors that are made of others, as quantised optimizer state is, are saved as these."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import ckptkit
from ckptkit.errors import UnsupportedTypeError
from ckptkit.live import StateMismatchError, load, load_state, save
from tests.live.pool import Pool

BLOCK = 4


class Quantised(torch.Tensor):
    """Codes and one scale for each row."""

    parts: tuple[str, ...] = ("codes", "scale")
    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        """Only an appearance; the elements are in the parts."""
        return torch.Tensor._make_wrapper_subclass(cls, parts[0].shape, dtype=torch.float32)

    def __init__(self, *parts: Any) -> None:
        for name, part in zip((*self.parts, "signed"), parts, strict=True):
            setattr(self, name, part)

    def __tensor_flatten__(self) -> tuple[Sequence[str], Any]:
        return self.parts, [self.signed, torch.Size(self.shape)]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(parts[name] for name in cls.parts), context[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Detached it has the same parts; nothing else is asked of it."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            same = args[0]
            return type(same)(*(getattr(same, name) for name in (*same.parts, "signed")))
        raise NotImplementedError(str(func))


class OptimState8bit(Quantised):
    """With the name and the parts of torchao's: a scale for each block, and a table."""

    parts = ("codes", "scale", "qmap")


class EightBit(Optimizer):
    """Momentum in eight bits, a tensor of its own kind under `fully_shard` too."""

    kind: type[Quantised] = OptimState8bit

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """All in integers, so that going on is exact."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            local, gradient = (getattr(t, "_local_tensor", t) for t in (parameter, parameter.grad))
            state = self.state[parameter]
            if not state:
                state["momentum"] = self._zeros(parameter, local)
            kept = getattr(state["momentum"], "_local_tensor", state["momentum"])
            kept.codes += (gradient * 4).to(torch.uint8)
            kept.scale += gradient.sum()
            local -= self.param_groups[0]["lr"] * kept.codes * kept.scale.flatten()[0]

    def _zeros(self, parameter: Any, local: torch.Tensor) -> Any:
        codes = torch.zeros(local.shape, dtype=torch.uint8)
        if self.kind is OptimState8bit:
            scale = torch.zeros(local.numel() // BLOCK)
            made: Any = self.kind(codes, scale, torch.arange(16.0), True)
        else:
            made = self.kind(codes, torch.zeros(local.shape[0], 1), True)
        if not isinstance(parameter, DTensor):
            return made
        mesh, cuts = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(made, mesh, cuts, run_check=False, shape=shape, stride=stride)


class ByRow(EightBit):
    """The kind that nobody knows, whose rows are cut as the parameter's."""

    kind = Quantised


def made(optimizer: type[EightBit], *, rows: int = 6) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, rows, bias=False)
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model)
    return model, optimizer(model.parameters())


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (model(torch.full((2, 8), float(step + 1))).sum() / 16).backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: Any) -> list[Any]:
    weight: Any = next(iter(model.parameters()))
    kept = optimizer.state[weight]["momentum"]
    kept = getattr(kept, "_local_tensor", kept)
    local = getattr(weight, "_local_tensor", weight)
    return [local.tolist(), *(getattr(kept, name).tolist() for name in kept.parts)]


def save_and_go_on(location: str, optimizer: type[EightBit]) -> tuple[list[Any], list[Any]]:
    model, stepping = made(optimizer)
    train(model, stepping, 0, 2)
    save(location, step=2, model=model, optimizer=stepping)
    then = contents(model, stepping)
    train(model, stepping, 2, 2)
    return then, contents(model, stepping)


def load_and_go_on(location: str, optimizer: type[EightBit]) -> tuple[list[Any], list[Any]]:
    model, stepping = made(optimizer)
    load(location, model=model, optimizer=stepping)
    then = contents(model, stepping)
    train(model, stepping, 2, 2)
    return then, contents(model, stepping)


@pytest.mark.parametrize("optimizer", [EightBit, ByRow])
def test_quantised_state_goes_on_bit_for_bit(
    gloo: Pool, tmp_path: Path, optimizer: type[EightBit]
) -> None:
    for ranks in (1, 2):
        location = str(tmp_path / str(ranks))
        saved = gloo.run(ranks, save_and_go_on, location, optimizer)
        assert gloo.run(ranks, load_and_go_on, location, optimizer) == saved
        assert ckptkit.verify(location) == []
        for others in (1, 2, 3):
            found = gloo.run(others, load_and_go_on, location, optimizer)
            assert joined(found) == joined(saved), f"{ranks} to {others}"


def joined(ranks: Sequence[tuple[list[Any], list[Any]]]) -> list[Any]:
    """The parts of all ranks, one behind the other; the table that all have, once."""
    parts = [[rank[0][number] for rank in ranks] for number in range(len(ranks[0][0]))]
    return [list(chain(*pieces)) for pieces in parts[:3]] + [pieces[0] for pieces in parts[3:]]


def test_a_reshard_keeps_parts_together(gloo: Pool, tmp_path: Path) -> None:
    saved = gloo.run(1, save_and_go_on, str(tmp_path / "a"), EightBit)
    ckptkit.reshard(tmp_path / "a", tmp_path / "b", to="fsdp:2")
    assert ckptkit.diff(tmp_path / "a", tmp_path / "b").same
    assert gloo.run(1, load_and_go_on, str(tmp_path / "b"), EightBit) == saved
    found = load_state(tmp_path / "b", nested=True)["optimizer"]["state"]["weight"]
    assert found["momentum"].keys() == {"codes", "scale", "qmap"}


class Unknown(ByRow):
    """One value for all that a rank holds."""

    def _zeros(self, parameter: Any, local: torch.Tensor) -> Any:
        codes = torch.zeros(local.shape, dtype=torch.uint8)
        made = Quantised(codes, torch.zeros(()), True)
        mesh, cuts = parameter.device_mesh, parameter.placements
        return DTensor.from_local(made, mesh, cuts, run_check=False)


def save_unknown(location: str) -> str:
    model, optimizer = made(Unknown)
    train(model, optimizer, 0, 1)
    with pytest.raises(UnsupportedTypeError) as caught:
        save(location, step=1, model=model, optimizer=optimizer, timeout=20)
    return str(caught.value)


def test_a_part_that_is_cut_in_an_unknown_way_is_refused_by_name(
    gloo: Pool, tmp_path: Path
) -> None:
    for message in gloo.run(2, save_unknown, str(tmp_path)):
        assert message.startswith("optimizer/weight/momentum%2Fscale: nothing says how")


def test_parameters_and_trees_may_be_made_of_others(tmp_path: Path) -> None:
    def frozen(*, signed: bool = True) -> Any:
        model: Any = nn.Module()
        parts = torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.ones(2, 1), signed
        model.weight = nn.Parameter(Quantised(*parts), requires_grad=False)
        model.tied = model.weight
        return model

    model = frozen()
    tree = {"x": Quantised(torch.ones(2, dtype=torch.uint8), torch.ones(1), False)}
    save(tmp_path, step=1, model=model, state={"mine": tree})
    again = frozen()
    again.weight.codes.zero_()
    other = {"x": Quantised(torch.zeros(2, dtype=torch.uint8), torch.ones(1), False)}
    kept = other["x"]
    load(tmp_path, model=again, state={"mine": other})
    assert again.weight.codes.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert other["x"] is kept
    assert kept.codes.tolist() == [1, 1]
    nested = load_state(tmp_path, nested=True)
    assert nested["mine"]["x"]["codes"].tolist() == [1, 1]
    assert nested["model"]["weight"]["scale"].tolist() == [[1], [1]]
    with pytest.raises(StateMismatchError, match=r"model/weight: made otherwise"):
        load(tmp_path, model=frozen(signed=False), state={"mine": other})
    with pytest.raises(StateMismatchError, match=r"mine/x: made of several tensors"):
        load(tmp_path, model=again, state={"mine": {}})
    with pytest.raises(StateMismatchError, match="does not fit"):
        load(tmp_path, model=again, state={"mine": {"x": torch.ones(2)}})
    with pytest.raises(UnsupportedTypeError, match=r"own/x|mine/x"):
        save(tmp_path, step=2, state={"mine": ckptkit.PerRank(tree)})
