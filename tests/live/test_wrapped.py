"""Tensors that are made of others, as quantised optimizer state is, are saved as these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_map

import ckptkit
from ckptkit.errors import UnsupportedTypeError
from ckptkit.live import DistributedModel, StateMismatchError, load, load_state, save
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


def go_on_from_a_shard(optimizer: type[EightBit]) -> bool:
    model, stepping = made(optimizer)
    train(model, stepping, 0, 2)
    other, fresh = made(optimizer)
    shard = DistributedModel(model, stepping).local_shard()
    DistributedModel(other, fresh).load_local_shard(shard)
    train(model, stepping, 2, 2)
    train(other, fresh, 2, 2)
    return contents(model, stepping) == contents(other, fresh)


@pytest.mark.parametrize("optimizer", [EightBit, ByRow])
def test_a_shard_has_quantised_state_too(gloo: Pool, optimizer: type[EightBit]) -> None:
    for ranks in (1, 2):
        assert gloo.run(ranks, go_on_from_a_shard, optimizer) == [True] * ranks


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


class Packed(Quantised):
    """Two elements in each code."""

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        rows, columns = parts[0].shape
        return torch.Tensor._make_wrapper_subclass(cls, (rows, 2 * columns), dtype=torch.bfloat16)


FP8 = torch.float8_e4m3fn
INNER: dict[str, Any] = {  # what each rank makes of its rows
    "4 bit": lambda x: Packed((x[:, ::2] * 16 + x[:, 1::2]).byte(), x[:, ::4] / 2, True),
    "fp8 by row": lambda x: Quantised(x.to(FP8), x[:, :1] / 2, True),
    "fp8 by row, flat": lambda x: Quantised(x.to(FP8), x[:, 0] / 2, True),
    "fp8 by tensor": lambda x: Quantised(x.to(FP8), torch.tensor(0.25), True),
    "fp8 by rank": lambda x: Quantised(x.to(FP8), torch.tensor([x.sum()]), True),
    "fp8 by column": lambda x: Quantised(x.to(FP8), torch.arange(8.0)[None], True),
}


def frozen(task: str, location: str, kind: str, rules: Any = None, by_hand: str = "") -> Any:
    """What a frozen parameter holds, saved or loaded; or why that is refused. An axis that cuts
    by hand has no DTensors.
    """
    model: Any = nn.Module()
    rows = 6 if by_hand else 5
    whole = torch.arange(8.0 * rows).reshape(rows, 8).remainder(15)
    weight = _spread(whole if task == "save" else whole + 1, INNER[kind])
    weight = getattr(weight, "_local_tensor", weight) if by_hand else weight
    model.weight = nn.Parameter(weight, requires_grad=False)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(by_hand,)) if by_hand else None
    call = partial(save, step=1) if task == "save" else load
    try:
        call(location, model=model, rules=rules, mesh=mesh, timeout=20)
    except ckptkit.CkptkitError as error:
        return str(error)
    local = getattr(model.weight, "_local_tensor", model.weight)
    return [getattr(local, name).float().tolist() for name in local.parts]


@pytest.mark.parametrize("kind", ["4 bit", "fp8 by row", "fp8 by row, flat"])
def test_parts_with_rows_of_their_own_are_cut_with_them(
    gloo: Pool, tmp_path: Path, kind: str
) -> None:
    saved = [gloo.run(ranks, frozen, "save", str(tmp_path / str(ranks)), kind) for ranks in (1, 2)]
    for of, location in ((saved[0], tmp_path / "1"), (saved[1], tmp_path / "2")):
        for ranks in (1, 2, 3):
            found = gloo.run(ranks, frozen, "load", str(location), kind)
            assert [list(chain(*rows)) for rows in zip(*found, strict=True)] == [
                list(chain(*rows)) for rows in zip(*of, strict=True)
            ]
            assert list(chain(*(rank[0] for rank in found))) == saved[0][0][0]


def test_parts_without_rows_are_as_rules_say_and_the_same_on_all_ranks(
    gloo: Pool, tmp_path: Path
) -> None:
    for kind in ("fp8 by tensor", "fp8 by rank", "fp8 by column"):
        for message in gloo.run(2, frozen, "save", str(tmp_path / "a"), kind):
            assert message.startswith("model/weight%2Fscale: nothing says how")
    same = {"*scale": {"fsdp": "replicate"}}
    for kind in ("fp8 by tensor", "fp8 by column"):
        location = str(tmp_path / kind)
        saved = gloo.run(2, frozen, "save", location, kind, same)
        for ranks in (1, 2, 3):
            found = gloo.run(ranks, frozen, "load", location, kind, same)
            assert list(chain(*(codes for codes, _ in found))) == list(
                chain(*(codes for codes, _ in saved))
            )
            assert [scale for _, scale in found] == [saved[0][1]] * ranks
    for message in gloo.run(2, frozen, "save", str(tmp_path / "a"), "fp8 by rank", same):
        assert "model/weight%2Fscale" in message


def test_what_is_cut_by_hand_is_cut_in_all_parts(gloo: Pool, tmp_path: Path) -> None:
    rules = {"model/weight": {"tp": "shard(0)"}}
    saved = gloo.run(2, frozen, "save", str(tmp_path / "b"), "4 bit", rules, "tp")
    assert gloo.run(2, frozen, "load", str(tmp_path / "b"), "4 bit", rules, "tp") == saved
    found = gloo.run(3, frozen, "load", str(tmp_path / "b"), "4 bit", rules, "tp")
    for mine, theirs in zip(zip(*found, strict=True), zip(*saved, strict=True), strict=True):
        assert list(chain(*mine)) == list(chain(*theirs))


class Choosy(ByRow):
    """Plain state for small parts, as torchao's optimizers keep it."""

    def _zeros(self, parameter: Any, local: torch.Tensor) -> Any:
        if local.shape[0] > 3:
            return super()._zeros(parameter, local)
        return torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local = getattr(parameter, "_local_tensor", parameter)
            self.state[parameter].setdefault("momentum", self._zeros(parameter, local))


def refused_of_choosy(location: str, rows: int, loads: str = "") -> str:
    model, optimizer = made(Choosy, rows=rows)
    train(model, optimizer, 0, 1)
    call = load if loads else partial(save, step=1)
    with pytest.raises(ckptkit.CkptkitError) as caught:
        call(location, model=model, optimizer=optimizer, timeout=20)
    return str(caught.value)


def test_parts_that_are_kept_otherwise_are_refused_by_name(gloo: Pool, tmp_path: Path) -> None:
    model, optimizer = made(Choosy)
    train(model, optimizer, 0, 1)
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    for message in gloo.run(2, refused_of_choosy, str(tmp_path), 6, "loads"):
        assert message.startswith("optimizer/weight/momentum: the Choosy here does not keep")
    # Of seven rows one rank has four, in a tensor made of others, and one three, in a plain one.
    for message in gloo.run(2, refused_of_choosy, str(tmp_path / "a"), 7):
        assert "optimizer/weight/momentum" in message


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


class Trained(Quantised):
    """A parameter that is trained: what reads it takes its values, and what writes it rounds."""

    def __tensor_flatten__(self) -> tuple[Sequence[str], Any]:
        return self.parts, [self.signed]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Of its values torch makes plain tensors; those that it changes are packed again."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return super().__torch_dispatch__(func, types, args, kwargs)
        first = args[0]
        if func is torch.ops.aten.zeros_like.default and first.signed:
            return cls(torch.zeros_like(first.codes), torch.ones_like(first.scale), True)
        found = func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))
        if not func._schema.is_mutable:
            return found
        if isinstance(first, cls):
            first.scale.copy_(found.abs().amax(1, keepdim=True) + 1)
            first.codes.copy_(found / first.scale)
        return first


def _values(value: Any) -> Any:
    return value.codes * value.scale if isinstance(value, Trained) else value


def _spread(whole: torch.Tensor, make: Any = torch.clone) -> Any:
    """What is made of this rank's rows of a tensor."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    local, cut = make(whole.chunk(mesh.size())[mesh.get_rank()]), [Shard(0)]
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, cut, run_check=False, shape=shape, stride=stride)


def _held(tensor: Any) -> tuple[str, list[Any]]:
    local = getattr(tensor, "_local_tensor", tensor)
    parts = [getattr(local, n) for n in local.parts] if isinstance(local, Quantised) else [local]
    return type(local).__name__, [part.tolist() for part in parts]


def train_wrapped(task: str, location: str, state: str) -> list[Any]:
    """What a parameter made of others and its AdamW hold: at the save or load, and later."""
    values = torch.arange(40.0).reshape(5, 8)
    model: Any = nn.Module()
    rows = partial(torch.ones_like, memory_format=torch.contiguous_format)
    made = _spread(values, lambda own: Trained(own.clone(), rows(own[:, :1]), state == "Trained"))
    model.weight = nn.Parameter(made)
    optimizer = AdamW(model.parameters(), lr=0.1, foreach=False)

    def go_on() -> list[Any]:
        for step in range(2):
            model.weight.grad = _spread(values * (step - 0.3))
            optimizer.step()
        return held()

    def held() -> list[Any]:
        state = optimizer.state[model.weight]
        return [_held(model.weight), *(_held(state[key]) for key in sorted(state))]

    if task == "load":
        load(location, model=model, optimizer=optimizer)
    else:
        go_on()
        save(location, step=2, model=model, optimizer=optimizer)
    return [held(), go_on()]


@pytest.mark.parametrize("state", ["Tensor", "Trained"])
def test_a_trained_parameter_may_be_made_of_others(gloo: Pool, tmp_path: Path, state: str) -> None:
    saved = [gloo.run(n, train_wrapped, "save", str(tmp_path / str(n)), state) for n in (1, 2)]
    assert [kind for kind, _ in saved[0][0][0]] == ["Trained", state, state, "Tensor"]
    ckptkit.reshard(tmp_path / "1", tmp_path / "b", to="fsdp:2")
    for step, of in (("1", saved[0]), ("2", saved[1]), ("b", saved[0])):
        for ranks in (1, 2, 3):
            found = gloo.run(ranks, train_wrapped, "load", str(tmp_path / step), state)
            assert _whole(found) == _whole(of), f"{step} into {ranks}"


def test_state_that_an_optimizer_here_cannot_make_is_refused_by_name(tmp_path: Path) -> None:
    model: Any = nn.Module()
    model.weight = nn.Parameter(Quantised(torch.ones(2, 3), torch.ones(2, 1), True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Quantised(torch.ones(2, 3), torch.ones(2, 1), True)
    optimizer.state[model.weight]["momentum_buffer"] = kept
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    kept.codes.zero_()
    load(tmp_path, model=model, optimizer=optimizer)
    assert kept.codes.tolist() == [[1] * 3] * 2
    optimizer.state.clear()
    with pytest.raises(UnsupportedTypeError, match="model/weight: the SGD cannot make its state"):
        load(tmp_path, model=model, optimizer=optimizer)
    model.weight = nn.Parameter(Trained(torch.ones(2, 3), torch.ones(2, 1), True))


def _whole(ranks: Sequence[list[Any]]) -> list[Any]:
    """The rows of all ranks, of each part of each tensor, at each time; the steps once."""
    return [
        [
            [list(chain(*rows)) if isinstance(rows[0], list) else rows[0] for rows in parts]
            for parts in (zip(*(rank[1] for rank in tensor), strict=True) for tensor in tensors)
        ]
        for tensors in (zip(*at, strict=True) for at in zip(*ranks, strict=True))
    ]
