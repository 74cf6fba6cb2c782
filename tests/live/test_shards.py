"""The shards of the ranks of a job, and saving without knowing its strategy."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptkit
from ckptkit.errors import CkptkitError, UnsupportedTypeError
from ckptkit.live import (
    Checkpointer,
    DistributedModel,
    LocalShard,
    ShardingMetadata,
    StateMismatchError,
    Sum,
    load_state,
    save_distributed,
)
from ckptkit.model import Box
from tests.live.network import network
from tests.live.pool import Pool
from tests.live.strategies import FEW_KINDS, LAYOUTS, Job, build
from tests.live.test_sharded_optimizer import momentum

CUT = "model/layers.0.up.weight"
MOMENT = "optimizer/layers.0.up.weight/exp_avg"


def kept(shard: LocalShard) -> LocalShard:
    """A shard in memory of its own."""
    tensors = {name: tensor.clone() for name, tensor in shard.tensors.items()}
    values, optimizers = copy.deepcopy((shard.values, shard.optimizers))
    return LocalShard(shard.metadata, tensors, values, optimizers)


def refusal(call: Callable[[], object]) -> str:
    """What a call says that fails; the rank can then go on."""
    with pytest.raises(CkptkitError) as caught:
        call()
    return str(caught.value)


def go_on(layout: str) -> tuple[ShardingMetadata, list[float], list[float]]:
    job, other = build(layout), build(layout, seed=5)
    job.train(range(2))
    model = DistributedModel(job.model, job.optimizer)
    shard = kept(model.local_shard())
    DistributedModel(other.model, other.optimizer).load_local_shard(shard)
    assert str(model.strategy) == shard.metadata.strategy
    losses = job.train(range(2, 4)), other.train(range(2, 4))
    return shard.metadata, *losses


@pytest.mark.parametrize("layout", FEW_KINDS)
def test_a_job_goes_on_from_the_shards_of_its_ranks(gloo: Pool, layout: str) -> None:
    ranks = LAYOUTS[layout].ranks
    held: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, (metadata, one, other) in enumerate(gloo.run(ranks, go_on, layout)):
        assert metadata.strategy == LAYOUTS[layout].written
        assert (metadata.rank, metadata.world_size) == (rank, ranks)
        assert one == other
        for name, each in metadata.tensors.items():
            held.setdefault(name, set()).update(each.boxes)
            assert shapes.setdefault(name, each.shape) == each.shape
    parameters = {f"model/{name}" for name, _ in network(0).named_parameters()}
    assert parameters <= held.keys()
    for name, boxes in held.items():
        assert sum(box.size for box in boxes) == math.prod(shapes[name]), name


def metadata_of(layout: str) -> ShardingMetadata:
    job = build(layout)
    job.train([0])
    return DistributedModel(job.model, job.optimizer).local_shard().metadata


def test_metadata_says_what_a_shard_is_a_part_of(gloo: Pool) -> None:
    first, second = gloo.run(2, metadata_of, "fsdp2:2")
    for name in (CUT, MOMENT):
        assert first.tensors[name].shape == (12, 6)
        assert first.tensors[name].dtype == "float32"
        assert first.tensors[name].placements == {"fsdp": "shard(0)"}
        assert first.tensors[name].boxes == (Box((0, 0), (6, 6)),)
        assert second.tensors[name].boxes == (Box((6, 0), (6, 6)),)
    assert first.details["fsdp"]["zero_stage"] == 3


def test_metadata_names_the_owner_of_the_state_of_zero_1(gloo: Pool) -> None:
    owners = [metadata.tensors.get(MOMENT) for metadata in gloo.run(3, metadata_of, "zero1:3")]
    (owned,) = [each for each in owners if each is not None]
    assert owned.placements == {"zero1": f"owner({owners.index(owned)})"}
    assert owned.boxes == (Box((0, 0), (12, 6)),)


def load_from(layout: str, other: str) -> str:
    """A shard of one job is loaded into another of as many ranks."""
    job, target = build(layout), build(other, seed=5)
    job.train([0])
    shard = kept(DistributedModel(job.model, job.optimizer).local_shard())
    alone = DistributedModel(target.model)
    before = kept(alone.local_shard())
    model = DistributedModel(target.model, target.optimizer)
    said = refusal(lambda: model.load_local_shard(shard))
    after = alone.local_shard()
    assert all(torch.equal(after.tensors[name], t) for name, t in before.tensors.items())
    return said


def test_a_shard_of_another_layout_is_refused(gloo: Pool) -> None:
    one, other = gloo.run(2, load_from, "fsdp2:2", "ddp:2")
    assert one == other
    assert "rank 0: model/embed.weight is (13, 6) at (0, 0) of float32 (13, 6)" in one
    assert "here on rank 0 of ddp:2, in the shard of rank 0 of fsdp:2 it is (7, 6)" in one


def load_swapped() -> str:
    """Rank 1 gets the shard of rank 0, and rank 0 its own."""
    job = build("fsdp2:2")
    model = DistributedModel(job.model)
    shards: list[LocalShard | None] = [None, None]
    dist.all_gather_object(shards, kept(model.local_shard()))
    assert shards[0] is not None
    shard = shards[0]
    return refusal(lambda: model.load_local_shard(shard))


def test_the_shard_of_another_rank_is_refused_on_all(gloo: Pool) -> None:
    one, other = gloo.run(2, load_swapped)
    assert one == other
    assert "rank 1: model/embed.weight is (6, 6) at (7, 0) of float32 (13, 6) here" in one


def load_other_kind(layout: str) -> str:
    job, target = build(layout), build(layout, make=momentum)
    job.train([0])
    shard = DistributedModel(job.model, job.optimizer).local_shard()
    model = DistributedModel(target.model, target.optimizer)
    return refusal(lambda: model.load_local_shard(shard))


@pytest.mark.parametrize("layout", ["plain", "fsdp2:2"])
def test_the_state_of_another_optimizer_is_refused(gloo: Pool, layout: str) -> None:
    for said in gloo.run(LAYOUTS[layout].ranks, load_other_kind, layout):
        assert "the optimizer here is SGD, the shard has the state of AdamW" in said


def load_state_beyond(layout: str) -> str:
    """The optimizer has state that the shard of the same kind lacks for one parameter."""
    job = build(layout)
    job.train([0])
    model = DistributedModel(job.model, job.optimizer)
    shard = model.local_shard()
    tensors = {name: each for name, each in shard.metadata.tensors.items() if name != MOMENT}
    metadata = ShardingMetadata(
        shard.metadata.strategy,
        shard.metadata.rank,
        shard.metadata.world_size,
        shard.metadata.details,
        {**tensors, MOMENT: shard.metadata.tensors[CUT.replace("up", "down")]},
        {},
    )
    wrong = LocalShard(metadata, shard.tensors, shard.values, shard.optimizers)
    return refusal(lambda: model.load_local_shard(wrong))


def test_state_of_another_shape_is_refused(gloo: Pool) -> None:
    (said,) = gloo.run(1, load_state_beyond, "plain")
    assert f"{MOMENT} is (12, 6) at (0, 0) of float32 (12, 6) here" in said


def zero_without_its_optimizer() -> tuple[str, str]:
    job = build("zero1:2")
    whole = DistributedModel(job.model), DistributedModel(job.model, job.optimizer)
    return str(whole[0].strategy), str(whole[1].strategy)


def test_only_the_optimizer_tells_zero_1_from_ddp(gloo: Pool) -> None:
    assert gloo.run(2, zero_without_its_optimizer) == [("ddp:2", "zero1:2")] * 2


def test_one_process_needs_no_process_group() -> None:
    model, other = network(0), network(5)
    shard = DistributedModel(model).local_shard()
    assert (shard.metadata.strategy, shard.optimizers) == ("single", [])
    DistributedModel(other).load_local_shard(shard)
    assert all(torch.equal(other.state_dict()[n], t) for n, t in model.state_dict().items())
    with pytest.raises(StateMismatchError, match="the shard has the state of none"):
        DistributedModel(other, torch.optim.AdamW(other.parameters())).load_local_shard(shard)


def test_data_parallel_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedTypeError, match="use DistributedDataParallel"):
        DistributedModel(model)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UnsupportedTypeError, match="nothing is spread"),
    ):
        save_distributed(checkpointer, model, step=1)
    assert not list(tmp_path.iterdir())


def test_the_wrapper_of_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    engine = type("Engine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(UnsupportedTypeError, match="how deepspeed spreads a model is not known"):
        DistributedModel(engine())


@pytest.mark.parametrize("model", [None, 3, {"w": torch.ones(1)}])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(UnsupportedTypeError, match="not a model"):
        DistributedModel(model)


def save_it(layout: str, location: str) -> str:
    job: Job = build(layout)
    job.train([0])
    with Checkpointer(location, timeout=20, differing=["*seen"]) as checkpointer:
        strategy = save_distributed(
            checkpointer, job.model, job.optimizer, step=7, extra={"tokens": Sum(2)}
        )
    return str(strategy)


@pytest.mark.parametrize("layout", ["plain", "zero1:2", "fsdp2:3", "fsdp:2,tp:2", "pp:2"])
def test_saving_finds_the_strategy_by_itself(gloo: Pool, tmp_path: Path, layout: str) -> None:
    ranks = LAYOUTS[layout].ranks
    assert gloo.run(ranks, save_it, layout, str(tmp_path)) == [LAYOUTS[layout].written] * ranks
    with ckptkit.open(tmp_path) as checkpoint:
        assert str(checkpoint.strategy) == LAYOUTS[layout].written
        assert checkpoint.step == 7
        assert checkpoint.objects["extra/tokens"] == 2 * ranks
    assert load_state(tmp_path, names=[MOMENT], mmap=True)[MOMENT].shape == (12, 6)


def test_a_step_that_was_skipped_has_no_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(0)
    gate = threading.Event()
    with Checkpointer(tmp_path, asynchronous=True, when_busy="skip") as checkpointer:
        finish = checkpointer._write_and_commit
        monkeypatch.setattr(
            checkpointer, "_write_and_commit", lambda *g: (gate.wait(20), finish(*g))[1]
        )
        assert str(save_distributed(checkpointer, model, step=1)) == "single"
        assert save_distributed(checkpointer, model, step=2) is None
        gate.set()
    assert checkpointer.run.steps() == [1]
