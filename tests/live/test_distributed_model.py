"""A model's state: each rank's part of it, or all of it on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim import SGD

import ckptkit
from ckptkit.errors import CkptkitError, UnsupportedTypeError
from ckptkit.live import (
    Checkpointer,
    DistributedModel,
    ShardedOptimizerState,
    StateMismatchError,
    load,
    save_distributed,
)
from tests.live.network import network
from tests.live.pool import Pool
from tests.live.strategies import EACH_KIND, LAYOUTS, Job, adamw, build, pp_experts

State = dict[str, Any]
CUT = "layers.0.up.weight"


def whole_state() -> State:
    """All of the model, buffers too."""
    torch.manual_seed(1)
    state: State = network(1).state_dict()
    for name in ("layers.0.seen", "layers.1.seen"):
        state[name] = torch.randn_like(state[name])
    return state


def same(one: State | None, other: State) -> bool:
    return (
        one is not None
        and one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one)
        and all(one[name].dtype == other[name].dtype for name in one)
    )


def is_first() -> bool:
    return dist.get_rank() == 0


def refusal(call: Callable[[], object]) -> str:
    """What a call says that fails; the rank can then go on."""
    with pytest.raises(CkptkitError) as caught:
        call()
    return str(caught.value)


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor outside of autograd, and as the DTensor that DDP has made it of."""
    spec: Any = getattr(tensor, "_st_info", None)
    if spec is None:
        return tensor.detach()
    return DTensor.from_local(
        tensor.detach(), spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
    )


def as_torch_has_it(job: Job) -> State:
    """The whole of this rank's modules, gathered by torch's own means."""
    found = {}
    for module in job.modules:
        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            with FullyShardedDataParallel.summon_full_params(module, writeback=False):
                items = [*module.named_parameters(), *module.named_buffers()]
                values = {name: value.detach().clone() for name, value in items}
        else:
            values = {n: plainly(t) for n, t in module.state_dict(keep_vars=True).items()}
        for name, value in values.items():
            plain = name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")
            found[plain] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def load_whole(layout: str) -> tuple[str, int, int, list[str]]:
    job = build(layout)
    model = DistributedModel(job.model)
    whole = whole_state()
    model.load_full_state_dict(whole if is_first() else None)
    mine = as_torch_has_it(job)
    assert same(mine, {name: whole[name] for name in mine})
    full = model.full_state_dict()
    assert same(full, whole) if is_first() else full is None
    return str(model.strategy), model.world_size, model.rank, sorted(mine)


@pytest.mark.parametrize("layout", EACH_KIND)
def test_rank_0_hands_out_the_whole_model_and_gets_it_back(gloo: Pool, layout: str) -> None:
    ranks = LAYOUTS[layout].ranks
    names: set[str] = set()
    for rank, (strategy, size, number, mine) in enumerate(gloo.run(ranks, load_whole, layout)):
        assert (size, number) == (ranks, rank)
        # Only the optimizer knows of ZeRO-1.
        assert strategy == LAYOUTS[layout].written.replace("zero1", "ddp")
        names |= set(mine)
    assert names == whole_state().keys()


def move_locally(layout: str) -> None:
    model, other = (DistributedModel(build(layout, seed=seed).model) for seed in (0, 5))
    model.load_full_state_dict(whole_state())
    local = {name: value.clone() for name, value in model.local_state_dict().items()}
    other.load_local_state_dict(local)
    full = other.full_state_dict()
    assert same(full, whole_state()) if is_first() else full is None


@pytest.mark.parametrize(
    "layout",
    ["plain", "ddp:2", "fsdp1:3", "fsdp2:4", "tp:3", "fsdp:2,tp:2", "pp:2, two stages each"],
)
def test_what_a_rank_holds_loads_into_the_same_rank(gloo: Pool, layout: str) -> None:
    gloo.run(LAYOUTS[layout].ranks, move_locally, layout)


def local_shapes(layout: str, name: str) -> tuple[int, ...] | None:
    state = DistributedModel(build(layout).model).local_state_dict()
    return tuple(state[name].shape) if name in state else None


def test_a_rank_holds_its_own_part_only(gloo: Pool) -> None:
    assert gloo.run(3, local_shapes, "fsdp2:3", "embed.weight") == [(5, 6), (5, 6), (3, 6)]
    assert gloo.run(2, local_shapes, "tp:2", "layers.0.down.weight") == [(6, 6)] * 2
    assert gloo.run(2, local_shapes, "ddp:2", CUT) == [(12, 6)] * 2
    assert gloo.run(2, local_shapes, "pp:2", CUT) == [(12, 6), None]


def write_through() -> None:
    job = build("fsdp2:2")
    model = DistributedModel(job.model)
    model.local_state_dict()[CUT].fill_(7)
    assert as_torch_has_it(job)[CUT].eq(7).all()


def test_the_local_state_is_the_memory_of_the_model(gloo: Pool) -> None:
    gloo.run(2, write_through)


def load_what_does_not_fit(layout: str, change: str) -> tuple[str, ...]:
    job = build(layout)
    model = DistributedModel(job.model)
    before = model.full_state_dict()
    whole = whole_state()
    if change == "missing":
        del whole[CUT]
    elif change == "unexpected":
        whole["nowhere"] = torch.zeros(1)
    elif change == "shape":
        whole[CUT] = whole[CUT].T
    elif change == "dtype":
        whole[CUT] = whole[CUT].double()
    state = None if change == "nothing" else whole
    said = refusal(lambda: model.load_full_state_dict(state))
    assert before is None or same(model.full_state_dict(), before)
    assert before is not None or model.full_state_dict() is None
    return (said,)


@pytest.mark.parametrize("layout", ["plain", "fsdp2:3", "pp:2"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("missing", f"missing: {CUT}"),
        ("unexpected", "unexpected: nowhere"),
        ("shape", f"reshaped: {CUT}: (6, 12), here (12, 6)"),
        ("dtype", f"cast: {CUT}: torch.float64, here torch.float32"),
        ("nothing", "rank 0 has to pass the whole state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(
    gloo: Pool, layout: str, change: str, expected: str
) -> None:
    said = gloo.run(LAYOUTS[layout].ranks, load_what_does_not_fit, layout, change)
    assert expected in said[0][0]
    assert len(set(said)) == 1


def load_wrong_on_rank_1(layout: str) -> str:
    model = DistributedModel(build(layout).model)
    local = {name: value.clone() for name, value in model.local_state_dict().items()}
    before = {name: value.clone() for name, value in local.items()}
    for value in local.values():
        value.add_(1)
    if not is_first():
        local[CUT] = local[CUT][:1]
    said = refusal(lambda: model.load_local_state_dict(local))
    assert same(model.local_state_dict(), before)
    return said


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp1:2", "fsdp2:2"])
def test_a_wrong_part_on_one_rank_is_named_on_all(gloo: Pool, layout: str) -> None:
    one, other = gloo.run(2, load_wrong_on_rank_1, layout)
    assert one == other
    assert "rank 1: the state does not fit\nreshaped: " + CUT in one


def fail_on_rank_1(layout: str, call: str, where: str) -> str:
    job = build(layout)
    model = DistributedModel(job.model, job.optimizer)
    given: dict[str, Any] = {
        "load_local_shard": [model.local_shard()],
        "load_local_state_dict": [model.local_state_dict()],
        "load_full_state_dict": [whole_state()],
    }
    broken = mock.patch(where, side_effect=MemoryError("no memory"))
    with (
        nullcontext() if is_first() else broken,
        pytest.raises((CkptkitError, MemoryError)) as caught,
    ):
        getattr(model, call)(*given.get(call, []))
    assert (model.full_state_dict() is not None) == is_first()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "call", "where"),
    [
        ("ddp:2", "full_state_dict", "shards.take_snapshot"),
        ("fsdp2:2", "load_local_shard", "shards.LocalShard.objection"),
        ("fsdp1:2", "load_local_shard", "wrappers.fsdp1.FSDP1Optimizer.prepare"),
        ("ddp:2", "load_local_state_dict", "shards._objection"),
        ("ddp:2", "load_full_state_dict", "shards._objection"),
    ],
)
def test_an_error_of_one_rank_is_heard_by_the_others(
    gloo: Pool, layout: str, call: str, where: str
) -> None:
    heard, own = gloo.run(2, fail_on_rank_1, layout, call, f"ckptkit.live.{where}")
    assert own == "no memory"
    assert "because of rank 1: MemoryError: no memory" in heard


def of_two_stages() -> None:
    """Both stages have a copy of one tensor, as of an embedding that the head uses too."""
    rank = dist.get_rank()
    parts = {"shared": nn.Linear(2, 2, bias=False), f"own{rank}": nn.Linear(2, 2, bias=False)}
    module = nn.ModuleDict(parts)
    model = DistributedModel(PipelineStage(module, rank, 2, torch.device("cpu")))
    whole = {f"{name}.weight": torch.randn(2, 2) for name in ("shared", "own0", "own1")}
    model.load_full_state_dict(whole)
    dist.broadcast_object_list(box := [whole], src=0)
    for name, part in parts.items():
        assert torch.equal(part.weight, box[0][f"{name}.weight"])
    full = model.full_state_dict()
    assert same(full, whole) if rank == 0 else full is None


def test_two_stages_may_have_a_tensor_of_one_name(gloo: Pool) -> None:
    gloo.run(2, of_two_stages)


def of_stages_of_other_meshes() -> str:
    model = DistributedModel(pp_experts(0, adamw).model)
    local = model.local_state_dict()
    model.load_local_state_dict({name: value.clone() for name, value in local.items()})
    return refusal(model.full_state_dict)


def test_stages_that_are_spread_otherwise_are_not_gathered(gloo: Pool) -> None:
    for said in gloo.run(4, of_stages_of_other_meshes):
        assert (
            "rank 2, 3: its stage is spread over pp:2,ep:2, that of rank 0 over pp:2,ddp:2" in said
        )
        assert "with a Checkpointer" in said


def cut_by_hand() -> None:
    """Three fused projections, of which each rank has the half."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = nn.Module()
    module.fused = nn.Parameter(torch.zeros(4, 3))
    rules = {"model/fused": {"tp": "shard(0, blocks=[4,2,2])"}}
    model = DistributedModel(module, mesh=mesh, rules=rules)
    whole = torch.arange(24.0).reshape(8, 3)
    model.load_full_state_dict({"fused": whole})
    rows = [0, 1, 4, 6] if is_first() else [2, 3, 5, 7]
    assert torch.equal(module.fused, whole[rows])
    full = model.full_state_dict()
    assert same(full, {"fused": whole}) if is_first() else full is None
    optimizer = SGD([module.fused], momentum=0.9)
    state = ShardedOptimizerState(module, optimizer, mesh=mesh, rules=rules)
    state.scatter("fused", {"momentum_buffer": whole})
    assert torch.equal(state.get("fused")["momentum_buffer"], whole[rows])


def test_what_rules_say_of_plain_tensors_counts(gloo: Pool) -> None:
    gloo.run(2, cut_by_hand)


def pass_it_on(layout: str, run: str) -> None:
    job, other = build(layout), build(layout, seed=5)
    model, twin = DistributedModel(job.model), DistributedModel(other.model)
    shard = DistributedModel(model, job.optimizer).local_shard()
    DistributedModel(twin, other.optimizer).load_local_shard(shard)
    whole = model.full_state_dict()
    full = DistributedModel(twin).full_state_dict()
    assert full is None if whole is None else same(full, whole)
    with Checkpointer(run) as checkpointer:
        strategy = save_distributed(checkpointer, model, job.optimizer, step=1)
        checkpointer.save(2, model=model, optimizer=job.optimizer)
        job.train([0])
        assert checkpointer.restore(model=model, optimizer=job.optimizer)
    assert str(strategy) == LAYOUTS[layout].written
    load(run, model=model, optimizer=job.optimizer)
    full = model.full_state_dict()
    assert full is None if whole is None else same(full, whole)


@pytest.mark.parametrize("layout", ["plain", "zero1:2", "fsdp1:3", "fsdp:2,tp:2", "pp:2"])
def test_what_takes_a_model_takes_a_distributed_model(
    gloo: Pool, layout: str, tmp_path: Path
) -> None:
    gloo.run(LAYOUTS[layout].ranks, pass_it_on, layout, str(tmp_path))


def save_cut_by_hand(run: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = nn.Module()
    module.fused = nn.Parameter(torch.full((4, 3), float(dist.get_rank())))
    rules = {"model/fused": {"tp": "shard(0, blocks=[4,2,2])"}}
    model = DistributedModel(module, mesh=mesh, rules=rules)
    with Checkpointer(run) as checkpointer:
        assert str(save_distributed(checkpointer, model, step=1)) == "tp:2"
    with torch.no_grad():
        module.fused.zero_()
    load(run, model=model)
    assert module.fused.eq(dist.get_rank()).all()


def test_its_mesh_and_rules_go_with_it(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_cut_by_hand, str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert step["model/fused"][:, 0].tolist() == [0, 0, 1, 1, 0, 1, 0, 1]


class Counted(nn.Module):
    """A module with tied weights, a bfloat16 buffer and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scales", torch.ones(2, dtype=torch.bfloat16))
        self.count = 0

    def get_extra_state(self) -> object:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_one_process_needs_no_process_group() -> None:
    module = Counted()
    module.count = 3
    model = DistributedModel(module)
    assert (str(model.strategy), model.world_size, model.rank) == ("single", 1, 0)
    full = model.full_state_dict()
    assert full is not None
    assert full["first.weight"] is full["second.weight"]
    assert full["first.weight"].data_ptr() != module.first.weight.data_ptr()
    assert full["scales"].dtype == torch.bfloat16
    other = Counted()
    DistributedModel(other).load_full_state_dict(full)
    assert other.count == 3
    assert torch.equal(other.first.weight, module.first.weight)


def test_a_tied_tensor_loads_under_any_of_its_names() -> None:
    module = Counted()
    model = DistributedModel(module)
    local = dict(model.local_state_dict())
    weight = torch.randn(3, 3)
    del local["first.weight"]
    model.load_local_state_dict(local | {"second.weight": weight})
    assert torch.equal(module.first.weight, weight)
    with pytest.raises(StateMismatchError, match=r"missing: first\.weight"):
        model.load_local_state_dict({n: v for n, v in local.items() if n != "second.weight"})


def test_what_is_no_tensor_is_not_loaded_into_one() -> None:
    model = DistributedModel(Counted())
    full = model.full_state_dict()
    assert full is not None
    with pytest.raises(StateMismatchError, match="unexpected: scales, which is a list"):
        model.load_full_state_dict(full | {"scales": [1, 2]})


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="not a model"):
        DistributedModel("model.pt")
