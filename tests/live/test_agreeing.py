"""All ranks of a load or a save end alike: with the same type of error, and the same report."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import ckptkit
from ckptkit.errors import CkptkitError, PeerError
from ckptkit.live import PerDataRank, PerRank, load, save
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


def save_cut_by_hand(location: str) -> list[str]:
    """A layer of which each rank has rows of its own, once without the rule that says so."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model = nn.Linear(2, 3)
    nn.init.constant_(model.weight, float(dist.get_rank()))
    nn.init.ones_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    messages = []
    for step, rules in enumerate((None, {"*weight": {"tp": "shard(0)"}}), start=1):
        try:
            save(location, step=step, model=model, optimizer=optimizer, mesh=mesh, rules=rules)
        except PeerError as error:
            messages.append(str(error))
    return messages


def test_a_rule_that_was_forgotten_loses_nothing(gloo: Pool, tmp_path: Path) -> None:
    found = gloo.run(3, save_cut_by_hand, str(tmp_path))
    assert found == [found[0]] * 3
    (weight,) = found[0]
    assert weight.startswith("model/weight: the values of rank 1, 2 are not those of the first")
    assert "rules=" in weight
    with ckptkit.open(tmp_path) as step:
        assert step.step == 2
        assert step.read("model/weight").shape == (9, 2)


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


class Told(nn.Module):
    """Says something of its own beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for parameter in self.parameters():
            nn.init.ones_(parameter)
        self.said = 0

    def get_extra_state(self) -> dict[str, int]:
        """A plain value."""
        return {"said": self.said}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take it back."""
        self.said = state["said"]


PLAIN = {
    "lr": "optimizer/param_groups/0/lr",
    "tensor lr": "optimizer/param_groups/0/lr",
    "own option": "optimizer/param_groups",
    "plain state": "optimizer/state",
    "own state": "optimizer/state",
    "extra state": "model/_extra_state",
}


def save_what_differs_plainly(location: str, what: str, differing: list[str]) -> str:
    rank, model = dist.get_rank(), Told()
    lr: Any = torch.tensor(0.5 + rank) if what == "tensor lr" else 0.5
    optimizer = SGD(model.parameters(), lr=lr)
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    if what == "own option" and rank:
        optimizer.param_groups[0]["warmed_up"] = True
    if what == "plain state":
        optimizer.state[model.layer.bias]["seen"] = rank
    if what == "own state" and rank:
        optimizer.state[model.layer.bias]["seen"] = 0
    if what == "extra state":
        model.said = rank
    try:
        save(location, step=1, model=model, optimizer=optimizer, differing=differing, timeout=30)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", PLAIN)
def test_plain_values_that_differ_are_refused_by_name(
    gloo: Pool, tmp_path: Path, what: str
) -> None:
    name = PLAIN[what]
    differ = "the values of rank 1 are not those of the first"
    first, second = gloo.run(2, save_what_differs_plainly, str(tmp_path), what, [])
    assert second.startswith(f"{name}: {differ}")
    assert first.startswith(f"{name}: there is no new step, because of rank 1: PeerError: {differ}")
    assert gloo.run(2, save_what_differs_plainly, str(tmp_path), what, [name]) == ["", ""]


def save_lbfgs(location: str) -> list[int]:
    """Its last loss is each rank's own, and averaged gradients keep its parameters alike."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    data = torch.arange(6.0).reshape(2, 3) * (1 + dist.get_rank())

    def loss() -> float:
        optimizer.zero_grad()
        found = model(data).square().mean()
        found.backward()
        return float(found)

    optimizer.step(loss)
    save(location, step=1, model=model, optimizer=optimizer, timeout=30)
    return ckptkit.Run(location).steps()


def test_what_an_optimizer_measures_may_be_each_ranks_own(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, save_lbfgs, str(tmp_path)) == [[1]] * 2


def save_beside_fsdp1(location: str, strategy: str) -> str:
    """Parameters that FSDP1 was told to leave alone, with values of each rank's own."""
    left = nn.Linear(600, 2048)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "left": left})
    wrapped = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy[strategy],
        ignored_modules=[left],
    )
    nn.init.constant_(left.weight, float(dist.get_rank()))
    try:
        save(location, step=1, model=wrapped, timeout=30, chunk_bytes=1 << 20)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_what_fsdp1_leaves_alone_is_never_a_mixture_of_ranks(
    gloo: Pool, tmp_path: Path, strategy: str
) -> None:
    found = gloo.run(2, save_beside_fsdp1, str(tmp_path), strategy)
    assert found == [found[0]] * 2
    if strategy == "NO_SHARD":  # a plain copy of each rank: the first one's is saved
        assert found[0] == ""
        with ckptkit.open(tmp_path) as step:
            assert set(step.read("model/left.weight").reshape(-1).tolist()) == {0.0}
    else:
        assert found[0].startswith("model/left.weight: the values of rank 1 are not those")


def save_marks_of_two_kinds(location: str) -> list[str]:
    said = []
    mine = PerRank(1) if dist.get_rank() else PerDataRank(1)
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    both: list[dict[str, Any]] = [{"extra": {"x": mine}}, {"state": {"x": type(mine)({"y": 1})}}]
    for given in both:
        with pytest.raises(PeerError) as caught:
            save(location, step=1, model=layer, timeout=30, **given)
        said.append(str(caught.value))
    return said


def test_a_value_is_of_each_rank_or_of_each_share_of_the_data(gloo: Pool, tmp_path: Path) -> None:
    for said in gloo.run(2, save_marks_of_two_kinds, str(tmp_path)):
        assert all("rank 0 has a value of its share of the data, and rank 1" in it for it in said)


def save_tied_on_one_rank(location: str) -> str:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    if dist.get_rank():
        model["b"].weight = model["a"].weight
    with pytest.raises(PeerError) as caught:
        save(location, step=1, model=model, timeout=30)
    return str(caught.value)


def test_weights_that_only_some_ranks_tie_are_named(gloo: Pool, tmp_path: Path) -> None:
    heard = r"(there is no new step, because of rank [01]: PeerError: )?"
    tied = "on some ranks this is a second name of model/a.weight"
    for said in gloo.run(2, save_tied_on_one_rank, str(tmp_path)):
        assert re.match(f"model/b.weight: {heard}{tied}", said), said
