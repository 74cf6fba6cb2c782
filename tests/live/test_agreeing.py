"""All ranks of a load or a save end alike: with the same type of error, and the same report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import ckptkit
from ckptkit.errors import CkptkitError, PeerError
from ckptkit.live import PerRank, load, save
from tests.live.pool import Pool

Made = dict[str, Any]


def made(
    *names: str,
    width: int = 2,
    dtype: torch.dtype = torch.float32,
    by: Callable[..., Optimizer] = AdamW,
) -> Made:
    """A model of some layers, and its optimizer."""
    model = nn.ModuleDict({name: nn.Linear(3, width, dtype=dtype) for name in names})
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    return {"model": model, "optimizer": by(model.parameters(), lr=0.1)}


def only_on_rank_1(one: Made, other: Made) -> Made:
    return other if dist.get_rank() == 1 else one


WAYS: dict[str, tuple[Callable[[], Made], str, str]] = {
    "missing": (lambda: made("a", "b", "new"), "missing", "model/new.weight"),
    "unexpected": (lambda: made("a"), "unexpected", "model/b.weight"),
    "shape": (lambda: made("a", "b", width=4), "reshaped", "(2, 3) in the step, (4, 3) here"),
    "optimizer": (lambda: made("a", "b", by=SGD), "AdamW", "SGD"),
    "dtype": (lambda: made("a", "b", dtype=torch.float64), "cast", "float64 here"),
    "missing on a rank": (
        lambda: only_on_rank_1(made("a", "b"), made("a", "b", "new")),
        "missing",
        "model/new.weight (rank 1)",
    ),
    "shape on a rank": (
        lambda: only_on_rank_1(made("a", "b"), made("a", "b", width=4)),
        "reshaped",
        "(4, 3) here (rank 1)",
    ),
}


def load_what_does_not_fit(location: str, way: str) -> list[Any]:
    with pytest.raises(CkptkitError) as caught:
        load(location, **WAYS[way][0](), timeout=20)
    objects = WAYS[way][0]()
    report = load(location, **objects, partial=True, cast=True, timeout=20).report
    return [type(caught.value).__name__, str(caught.value), report]


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    location = str(tmp_path_factory.mktemp("agreeing"))
    gloo.run(2, save_step, location)
    return location


def save_step(location: str) -> None:
    objects = made("a", "b")
    for parameter in objects["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()
    save(location, step=1, **objects)


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_hear_the_same_of_what_does_not_fit(gloo: Pool, saved: str, way: str) -> None:
    first, second = gloo.run(2, load_what_does_not_fit, saved, way)
    assert first[0] == "StateMismatchError"
    assert first == second
    for words in WAYS[way][1:]:
        assert words in first[1]


def load_what_breaks(location: str) -> list[str]:
    kinds = []
    for partial in (False, True):
        with pytest.raises(CkptkitError) as caught:
            load(location, **made("a", "b"), partial=partial, timeout=20)
        kinds.append(type(caught.value).__name__)
    return kinds


def damage(location: Path, *, entirely: bool = False) -> None:
    with ckptkit.open(location) as step:
        manifest = step.manifest
    for number in range(2):
        pack = next(location.rglob(manifest.packs[number].name))
        if entirely:
            pack.unlink()
            continue
        offset = int(manifest.offset[manifest.pack == number][0])
        data = bytearray(pack.read_bytes())
        data[offset] ^= 1
        pack.write_bytes(data)
        break


def test_damage_and_absence_are_the_same_error_on_all_ranks(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(3, save_step, str(tmp_path))
    nowhere = str(tmp_path / "nowhere")
    assert gloo.run(3, load_what_breaks, nowhere) == [["NotFoundError"] * 2] * 3
    damage(tmp_path)
    assert gloo.run(3, load_what_breaks, str(tmp_path)) == [["CorruptionError"] * 2] * 3
    damage(tmp_path, entirely=True)
    kinds = gloo.run(3, load_what_breaks, str(tmp_path))
    assert kinds == [kinds[0]] * 3


class Stubborn:
    """Cannot take over what was saved, each rank in a way of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Some value."""
        return {"x": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Fail."""
        kinds = [ckptkit.errors.StorageError, ckptkit.errors.FormatError]
        if dist.get_rank() < len(kinds):
            raise kinds[dist.get_rank()]("cannot")


def load_what_is_refused(location: str) -> str:
    with pytest.raises(CkptkitError) as caught:
        load(location, state={"mine": Stubborn()}, timeout=20)
    return type(caught.value).__name__


def save_stubborn(location: str) -> list[str]:
    save(location, step=1, state={"mine": Stubborn()})
    kinds = []
    for step, value in ((1, 1), (2, dist.get_rank()), (3, object() if dist.get_rank() else 1)):
        with pytest.raises(CkptkitError) as caught:
            save(location, step=step, extra={"x": value}, timeout=20)
        kinds.append(type(caught.value).__name__)
    return kinds


def test_ranks_that_fail_in_two_ways_agree_on_one(gloo: Pool, tmp_path: Path) -> None:
    kinds = gloo.run(3, save_stubborn, str(tmp_path))
    assert kinds == [["StepExistsError", "PeerError", "UnsupportedTypeError"]] * 3
    found = gloo.run(3, load_what_is_refused, str(tmp_path))
    assert found in (["StorageError"] * 3, ["FormatError"] * 3)


def normed(kind: str) -> nn.Module:
    """A model with statistics of its own data, after a step."""
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    if kind == "fsdp":
        fully_shard(model)
    elif kind.startswith("ddp"):
        model = DistributedDataParallel(model, broadcast_buffers=kind == "ddp")
    model(torch.arange(6.0).reshape(2, 3) * (1 + dist.get_rank()))
    return model


def save_normed(location: str, kind: str) -> str:
    model = normed(kind)
    try:
        save(location, step=1, model=model, timeout=30)
    except PeerError as error:
        save(location, step=1, model=model, differing=["*.running_*"], timeout=30)
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["ddp", "ddp without broadcasts", "fsdp", "plain"])
def test_buffers_that_differ_are_kept_of_the_first_rank_only_where_that_is_said(
    gloo: Pool, tmp_path: Path, kind: str
) -> None:
    found = gloo.run(3, save_normed, str(tmp_path), kind)
    assert found == [found[0]] * 3
    if kind == "ddp":  # DDP itself gives all ranks the first one's before the next step
        assert found[0] == ""
    else:
        assert found[0].startswith("model/1.running_mean: the values of rank 1, 2 are not those")
        assert "and so are 1 more" in found[0]
        assert 'differing=["model/1.running_mean"]' in found[0]
    mean = (torch.arange(6.0).reshape(2, 3).sum(dim=1).mean() * 0.1).item()
    with ckptkit.open(tmp_path) as step:
        saved = torch.from_numpy(step.read("model/1.running_mean"))
        assert saved.numel() == 4
        assert abs(float(saved.mean()) - mean) < 0.5


def save_what_nothing_wraps(location: str) -> list[str]:
    """A model and an optimizer whose ranks were to be kept alike by hand; what is refused."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    messages = []
    for step, value in enumerate((model.weight, None, optimizer), start=1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if isinstance(value, torch.Tensor):
            value.data += dist.get_rank() // 2
        elif value is not None:
            optimizer.state[model.bias]["exp_avg"] += dist.get_rank() // 2
        try:
            save(location, step=step, model=model, optimizer=optimizer, timeout=30)
        except PeerError as error:
            messages.append(str(error))
            with torch.no_grad():
                dist.broadcast(model.weight, 0)
    everything = ["model/*", "optimizer/*"]
    save(location, step=4, model=model, optimizer=optimizer, differing=everything, timeout=30)
    return messages


def test_parameters_that_nothing_keeps_alike_have_to_be_the_same(
    gloo: Pool, tmp_path: Path
) -> None:
    found = gloo.run(3, save_what_nothing_wraps, str(tmp_path))
    assert found == [found[0]] * 3
    weight, state = found[0]
    assert weight.startswith("model/weight: the values of rank 2 are not those of the first rank")
    assert state.startswith("optimizer/bias/exp_avg: the values of rank 2 are not those")
    assert ckptkit.Run(tmp_path).steps() == [2, 4]


def save_trees(location: str) -> list[str]:
    rank, messages = dist.get_rank(), []
    own = {"x": torch.ones(2), "mine": {"y": torch.full((2,), float(rank))}}
    try:
        save(location, step=1, state={"tree": own}, timeout=30)
    except PeerError as error:
        messages.append(str(error))
    save(location, step=1, state={"tree": own}, differing=["mine/*"])
    save(location, step=2, state={"tree": PerRank(own)})
    save(location, step=3, state={"tree": {"x": torch.ones(2)}})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "tp"))
    cut = {"cut": distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])}
    save(location, step=4, state={"tree": cut}, mesh=mesh)
    cut["cut"].to_local()[:] += rank // 2
    try:
        save(location, step=5, state={"tree": cut}, mesh=mesh)
    except PeerError as error:
        messages.append(str(error))
    return messages


def test_tensors_of_a_state_have_to_be_the_same_or_each_ranks_own(
    gloo: Pool, tmp_path: Path
) -> None:
    found = gloo.run(4, save_trees, str(tmp_path))
    assert found == [found[0]] * 4
    whole, cut = found[0]
    assert whole.startswith("tree/mine/y: the values of rank 1, 2, 3 are not those")
    assert "PerRank(…)" in whole
    assert cut.startswith("tree/cut: the values of rank 2, 3 are not those")
    assert ckptkit.Run(tmp_path).steps() == [1, 2, 3, 4]
