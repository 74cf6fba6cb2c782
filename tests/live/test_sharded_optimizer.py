"""The state that an optimizer keeps on each rank, whole on rank 0 and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.live import ShardedOptimizerState
from ckptkit.live.state.tensors import as_spread
from tests.live.network import network
from tests.live.pool import Pool
from tests.live.strategies import FEW_KINDS, LAYOUTS, Job, build

NAMES = [name for name, _ in network(0).named_parameters()]
UNEVEN = "layers.0.up.weight"  # 12 rows
EMPTY = "scale"  # one element, so that most ranks have nothing of it

State = dict[str, torch.Tensor]


def momentum(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9, foreach=False)


def stateless(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01, foreach=False)


def amsgrad(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.01, amsgrad=True, foreach=False)


def whole_state(name: str, keys: Sequence[str] = ("exp_avg", "exp_avg_sq")) -> State:
    """Some state of a parameter, the same on every rank that asks."""
    shape = network(0).get_parameter(name).shape
    torch.manual_seed(NAMES.index(name))
    return {"step": torch.tensor(5.0), **{key: torch.randn(shape) for key in keys}}


def same(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def state_of(job: Job) -> ShardedOptimizerState:
    return ShardedOptimizerState(job.model, job.optimizer)


def is_first() -> bool:
    return dist.get_rank() == 0


def refusal(call: Callable[[], object]) -> str:
    """What a call says that fails; the rank can then go on."""
    with pytest.raises(CkptkitError) as caught:
        call()
    return str(caught.value)


def kept_by_torch(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the optimizer has, read without ckptkit: DTensors by their own means."""
    optimizer = getattr(job.optimizer, "optim", job.optimizer)
    for module in job.modules:
        for name, parameter in module.named_parameters():
            state = optimizer.state.get(parameter, {})
            # Around DTensors, DDP has plain parameters, and the optimizer plain state of these.
            state = {k: as_spread(v, parameter) for k, v in state.items()}
            whole = {
                key: value.full_tensor() if isinstance(value, DTensor) else value
                for key, value in state.items()
            }
            yield name.removeprefix("module."), whole


def go_there_and_back(layout: str) -> int:
    job = build(layout)
    state = state_of(job)
    for name in NAMES:
        state.scatter(name, whole_state(name) if is_first() else None)
    found = 0
    for name, kept in kept_by_torch(job):
        if kept and name in NAMES and not layout.startswith("fsdp1"):
            assert same(kept, whole_state(name)), name
            found += 1
    for name in NAMES:
        assert same(state.gather(name), whole_state(name) if is_first() else None), name
    return found


@pytest.mark.parametrize("layout", FEW_KINDS)
def test_rank_0_hands_out_whole_states_and_gets_them_back(gloo: Pool, layout: str) -> None:
    kept = gloo.run(LAYOUTS[layout].ranks, go_there_and_back, layout)
    is_apart = layout.startswith(("pp", "zero1", "fsdp1"))
    assert sum(kept) >= len(NAMES) or layout.startswith("fsdp1")
    assert is_apart or set(kept) == {len(NAMES)}


def train_two(layout: str) -> dict[str, Any]:
    job, replica = build(layout), build("ddp:2")
    job.train(range(2))
    replica.train(range(2))
    state, other = state_of(job), state_of(replica)
    here = {name: (state.gather(name), other.gather(name)) for name in NAMES}
    return here if is_first() else {}


@pytest.mark.parametrize("layout", [x for x in FEW_KINDS if "fsdp1" in str(x.values[0])])
def test_what_fsdp1_has_made_flat_is_what_replicas_keep(gloo: Pool, layout: str) -> None:
    # torch's own full_optim_state_dict cannot be asked: on a CPU it gives exp_avg_sq twice.
    found = gloo.run(LAYOUTS[layout].ranks, train_two, layout)[0]
    for name in NAMES:
        one, other = found[name]
        assert one.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key in one:
            torch.testing.assert_close(one[key], other[key], atol=1e-5, rtol=1e-3)


def train_on(layout: str) -> tuple[list[float], list[float]]:
    job, other = build(layout), build(layout)
    job.train(range(2))
    other.train(range(2))
    state = state_of(other)
    full = {name: state.gather(name) for name in NAMES}
    state.release()
    assert not any(state.has(name) for name in state.names)
    for name in NAMES:
        state.scatter(name, full[name])
    return job.train(range(2, 4)), other.train(range(2, 4))


@pytest.mark.parametrize(
    "layout",
    [
        *("ddp:2", "fsdp2:3", "zero1:2", "tp:2", "pp:2", "fsdp1:2", "fsdp1:2, flat"),
        *(pytest.param(layout, marks=pytest.mark.long) for layout in ("fsdp:2,tp:2", "fsdp1:3")),
    ],
)
def test_training_goes_on_as_if_the_state_had_never_left(gloo: Pool, layout: str) -> None:
    for one, other in gloo.run(LAYOUTS[layout].ranks, train_on, layout):
        assert one == other


def shapes(layout: str, name: str) -> tuple[int, ...] | None:
    job = build(layout)
    job.train([0])
    state = state_of(job)
    return tuple(state.get(name)["exp_avg"].shape) if state.has(name) else None


def test_each_rank_has_its_own_shard_only(gloo: Pool) -> None:
    assert gloo.run(3, shapes, "fsdp2:3", "embed.weight") == [(5, 6), (5, 6), (3, 6)]
    assert gloo.run(4, shapes, "fsdp2:4", EMPTY) == [(1,), (0,), (0,), (0,)]
    assert gloo.run(2, shapes, "ddp:2", UNEVEN) == [(12, 6)] * 2
    assert sorted(map(str, gloo.run(3, shapes, "zero1:3", UNEVEN))) == ["(12, 6)", "None", "None"]


def write_through() -> bool:
    job = build("fsdp2:2")
    job.train([0])
    state = state_of(job)
    state.get(UNEVEN)["exp_avg"].fill_(7)
    full = state.gather(UNEVEN)
    return full is None or bool(full["exp_avg"].eq(7).all())


def test_what_get_gives_is_the_memory_of_the_optimizer(gloo: Pool) -> None:
    assert gloo.run(2, write_through) == [True, True]


def clone_and_train(layout: str) -> None:
    job = build(layout)
    job.train([0])
    state = state_of(job)
    before = {name: state.gather(name) for name in NAMES}
    assert all(before.values()) == is_first()
    twin = state.clone()
    job.train([1])
    state.release()
    for name in NAMES:
        assert same(twin.gather(name), before[name]), name
        assert state.gather(name) == ({} if is_first() else None)
    twin.release()
    assert not any(twin.has(name) for name in twin.names)


@pytest.mark.parametrize("layout", ["ddp:1", "fsdp2:3", "zero1:2", "fsdp1:2", "fsdp1:2, flat"])
def test_a_clone_stays_as_it_was(gloo: Pool, layout: str) -> None:
    gloo.run(LAYOUTS[layout].ranks, clone_and_train, layout)


def create_everywhere(layout: str) -> list[bool]:
    job = build(layout)
    state = state_of(job)
    kept = [bool(state.create(name)) for name in state.names]
    for name in NAMES:
        full = state.gather(name)
        if full is not None:
            zeros = {key: torch.zeros_like(value) for key, value in whole_state(name).items()}
            assert same(full, zeros), name
    job.train([0])
    return kept


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp2:4", "zero1:3", "fsdp:2,tp:2", "pp:3"])
def test_created_state_is_that_of_an_optimizer_before_its_first_step(
    gloo: Pool, layout: str
) -> None:
    kept = gloo.run(LAYOUTS[layout].ranks, create_everywhere, layout)
    if layout.startswith("zero1"):
        assert [sum(of_ranks) for of_ranks in zip(*kept, strict=True)] == [1] * len(NAMES)
    else:
        assert all(all(each) for each in kept)


def remove_one() -> list[bool]:
    job = build("fsdp2:2")
    job.train([0])
    state = state_of(job)
    state.remove(UNEVEN)
    state.remove(UNEVEN)
    assert state.get(UNEVEN) == {}
    state.put(UNEVEN, state.get(UNEVEN))
    assert state.gather(UNEVEN) == ({} if is_first() else None)
    return [state.has(name) for name in (UNEVEN, EMPTY)]


def test_a_removed_state_is_gone_and_the_others_are_not(gloo: Pool) -> None:
    assert gloo.run(2, remove_one) == [[False, True]] * 2


def scatter_nothing() -> bool:
    job = build("fsdp2:2")
    job.train([0])
    state = state_of(job)
    state.scatter(UNEVEN, {})
    return state.has(UNEVEN)


def test_an_empty_state_removes_what_there_is(gloo: Pool) -> None:
    assert gloo.run(2, scatter_nothing) == [False, False]


def of_stateless_sgd(layout: str) -> str:
    job = build(layout, make=stateless)
    job.train([0])
    state = state_of(job)
    assert state.create(UNEVEN) == {}
    assert not state.has(UNEVEN)
    assert state.gather(UNEVEN) == ({} if is_first() else None)
    state.scatter(UNEVEN, {})
    full = {"momentum_buffer": torch.zeros(12, 6)}
    return refusal(lambda: state.scatter(UNEVEN, full))


@pytest.mark.parametrize("layout", ["plain", "ddp:2", "fsdp2:2"])
def test_sgd_without_momentum_keeps_nothing_and_takes_nothing(gloo: Pool, layout: str) -> None:
    for said in gloo.run(LAYOUTS[layout].ranks, of_stateless_sgd, layout):
        assert "no state of SGD, which keeps nothing for this parameter" in said
        assert "momentum_buffer" in said


def scatter_of_adamw(trained: bool) -> tuple[str, bool]:
    job = build("fsdp2:2", make=momentum)
    if trained:
        job.train([0])
    state = state_of(job)
    before = state.gather(UNEVEN)
    said = refusal(lambda: state.scatter(UNEVEN, whole_state(UNEVEN)))
    assert same(state.gather(UNEVEN), before)
    return said, state.has(UNEVEN)


@pytest.mark.parametrize("trained", [False, True])
def test_the_state_of_another_kind_is_refused_on_all_ranks(gloo: Pool, trained: bool) -> None:
    for said, has in gloo.run(2, scatter_of_adamw, trained):
        assert "no state of SGD, which keeps momentum_buffer" in said
        assert "rank 0 has exp_avg, exp_avg_sq, step" in said
        assert has == trained


def scatter_wrong(change: str) -> str:
    state = state_of(build("zero1:2"))
    full: dict[str, Any] = dict(whole_state(UNEVEN))
    if change == "shape":
        full["exp_avg"] = full["exp_avg"].T
    elif change == "dtype":
        full["exp_avg"] = full["exp_avg"].bfloat16()
    elif change == "amsgrad":
        full["max_exp_avg_sq"] = full["exp_avg"]
    elif change == "number":
        full["step"] = 5
    said = refusal(lambda: state.scatter(UNEVEN, None if change == "none" else full))
    assert not state.has(UNEVEN)
    assert state.gather(UNEVEN) == ({} if is_first() else None)
    return said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("shape", "exp_avg is torch.float32 (12, 6) here, rank 0 has torch.float32 (6, 12)"),
        ("dtype", "exp_avg is torch.float32 (12, 6) here, rank 0 has torch.bfloat16 (12, 6)"),
        ("number", "step is torch.float32 () here, rank 0 has no tensor"),
        ("amsgrad", "no state of AdamW, which keeps exp_avg, exp_avg_sq, step"),
        ("none", "rank 0 has to pass the whole state"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(gloo: Pool, change: str, expected: str) -> None:
    one, other = gloo.run(2, scatter_wrong, change)
    assert expected in one
    assert one == other


def of_bfloat16(make: Callable[[Sequence[nn.Parameter]], Optimizer], keys: Sequence[str]) -> None:
    model = network(0).bfloat16()
    fully_shard(model)
    state = ShardedOptimizerState(model, make(list(model.parameters())))
    for name in NAMES:
        full = {k: v.bfloat16() for k, v in whole_state(name, keys).items() if k in keys}
        if "exp_avg" in keys:
            full["step"] = torch.tensor(5.0)
        state.scatter(name, full if is_first() else None)
        assert same(state.gather(name), full if is_first() else None), name


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (momentum, ["momentum_buffer"]),
        (amsgrad, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    ],
)
def test_other_dtypes_and_optimizers_go_the_same_way(
    gloo: Pool, make: Callable[[Sequence[nn.Parameter]], Optimizer], keys: list[str]
) -> None:
    gloo.run(3, of_bfloat16, make, keys)


def lose_one_rank() -> str:
    job = build("fsdp2:2")
    job.train([0])
    state = state_of(job)
    if dist.get_rank() == 1:
        state.remove(UNEVEN)
    return refusal(lambda: state.gather(UNEVEN))


def test_a_rank_that_has_lost_its_shard_is_named_on_all(gloo: Pool) -> None:
    one, other = gloo.run(2, lose_one_rank)
    assert "rank 1: there is no exp_avg, which other ranks have" in one
    assert one == other


def ask_for_no_parameter(layout: str) -> list[str]:
    state = state_of(build(layout))
    return [
        refusal(lambda: state.gather("nowhere")),
        refusal(lambda: state.scatter("nowhere", {})),
        refusal(lambda: state.get("nowhere")),
    ]


@pytest.mark.parametrize("layout", ["plain", "pp:2"])
def test_a_name_that_no_rank_knows_is_an_error_on_all(gloo: Pool, layout: str) -> None:
    for gather, scatter, get in gloo.run(LAYOUTS[layout].ranks, ask_for_no_parameter, layout):
        assert "nowhere: no rank has a parameter of this name" in gather
        assert gather == scatter
        assert "the optimizer steps no parameter of this name on this rank" in get


def use_flat_parameters() -> None:
    job = build("fsdp1:2, flat")
    state = state_of(job)
    assert sorted(state.names) == sorted(NAMES)
    mine = next(name for name in NAMES if state.create(name))
    assert "there is state already" in refusal(lambda: state.create(mine))
    state.scatter(UNEVEN, whole_state(UNEVEN) if is_first() else None)
    state.get(mine)["exp_avg"].fill_(3)
    assert state.get(mine)["exp_avg"].eq(3).all()
    assert state.has(UNEVEN) == bool(state.get(UNEVEN))
    whole = state.gather(UNEVEN)
    if whole is not None and mine != UNEVEN:
        assert same(whole, whole_state(UNEVEN))
    assert "a part of that of a flat" in refusal(lambda: state.remove(UNEVEN))
    assert "a part of that of a flat" in refusal(lambda: state.scatter(UNEVEN, {}))
    wrong = whole_state(UNEVEN, ["momentum_buffer"])
    assert "no state of AdamW" in refusal(lambda: state.scatter(UNEVEN, wrong))
    state.release()
    assert state.gather(UNEVEN) == ({} if is_first() else None)
    # Their names are gone, and how they are cut with them.
    refused = refusal(lambda: ShardedOptimizerState(job.model.parameters(), job.optimizer))
    assert "does not say how it is cut" in refused


def test_the_parameters_in_a_flat_one_of_fsdp1_have_their_own_names(gloo: Pool) -> None:
    gloo.run(2, use_flat_parameters)


def described(layout: str) -> tuple[str, str, int, int]:
    state = state_of(build(layout))
    return state.kind, str(state.strategy), state.rank, state.shards


@pytest.mark.parametrize(
    ("layout", "shards"),
    [("plain", 1), ("ddp:2", 1), ("zero1:3", 3), ("hsdp:2x2", 2), ("fsdp1:3", 3), ("tp:2", 2)],
)
def test_it_says_of_what_kind_it_is_and_how_many_shards_there_are(
    gloo: Pool, layout: str, shards: int
) -> None:
    known = LAYOUTS[layout]
    expected = [("AdamW", known.written, rank, shards) for rank in range(known.ranks)]
    assert gloo.run(known.ranks, described, layout) == expected


def of_another_model(layout: str) -> str:
    job, other = build(layout), build(layout, seed=5)
    return refusal(lambda: ShardedOptimizerState(other.model, job.optimizer))


@pytest.mark.parametrize("layout", ["plain", "zero1:2", "fsdp2:2", "fsdp1:2", "fsdp1:2, flat"])
def test_the_optimizer_of_another_model_is_refused(gloo: Pool, layout: str) -> None:
    for said in gloo.run(LAYOUTS[layout].ranks, of_another_model, layout):
        assert "the optimizer has a parameter that is not the model's" in said


def in_groups() -> tuple[int, int, float, bool]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = dist.get_rank() // 2
    mesh = DeviceMesh.from_group(groups[number], "cpu", mesh_dim_names=("fsdp",))
    model = network(number)
    fully_shard(model, mesh=mesh)
    optimizer = momentum(list(model.parameters()))
    state = ShardedOptimizerState(model, optimizer, group=groups[number])
    full = {"momentum_buffer": torch.full((12, 6), float(number))}
    state.scatter(UNEVEN, full if state.rank == 0 else None)
    whole = state.gather(UNEVEN)
    refused = refusal(lambda: ShardedOptimizerState(model, optimizer, group=groups[1 - number]))
    assert "not in the process group" in refused
    found = float(state.get(UNEVEN)["momentum_buffer"].unique())
    return state.rank, state.shards, found, same(whole, full)


def test_a_group_of_ranks_can_be_a_job_of_its_own(gloo: Pool) -> None:
    expected = [(0, 2, 0.0, True), (1, 2, 0.0, False), (0, 2, 1.0, True), (1, 2, 1.0, False)]
    assert gloo.run(4, in_groups) == expected


def every_second_rank() -> str:
    group = dist.new_group([0, 2])
    job = build("ddp:1")
    if dist.get_rank() == 1:
        return ""
    return refusal(lambda: ShardedOptimizerState(job.model.module, job.optimizer, group=group))


def test_a_group_with_gaps_is_refused(gloo: Pool) -> None:
    said = gloo.run(3, every_second_rank)
    assert all("not numbered one after another" in said[rank] for rank in (0, 2))


def test_parameters_need_no_model() -> None:
    weight, bias, other = (nn.Parameter(torch.ones(2, n)) for n in (3, 1, 2))
    optimizer = SGD([weight, bias], momentum=0.9)
    assert ShardedOptimizerState(weight, optimizer).names == ["0"]
    assert ShardedOptimizerState([weight, bias], optimizer).names == ["0", "1"]
    assert ShardedOptimizerState(iter([bias]), optimizer).names == ["0"]
    for named in ({"a.weight": weight}, [("a.weight", weight)], iter([("a.weight", weight)])):
        state = ShardedOptimizerState(named, optimizer)
        state.scatter("a.weight", {"momentum_buffer": torch.full((2, 3), 2.0)})
        assert optimizer.state[weight]["momentum_buffer"].eq(2).all()
        assert same(state.gather("a.weight"), {"momentum_buffer": torch.full((2, 3), 2.0)})
    with pytest.raises(UsageError, match="1: the optimizer does not step this parameter"):
        ShardedOptimizerState([weight, other], optimizer)


def test_dtensors_are_not_whole_states(gloo: Pool) -> None:
    assert "pass whole tensors" in gloo.run(1, scatter_dtensors)[0]


def scatter_dtensors() -> str:
    job = build("fsdp2:1")
    job.train([0])
    state = state_of(job)
    parameter = job.modules[0].get_parameter(UNEVEN)
    return refusal(lambda: state.scatter(UNEVEN, job.optimizer.state[parameter]))
