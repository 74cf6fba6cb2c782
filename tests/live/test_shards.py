"""One checkpoint helper for each strategy, and saving without knowing which it is."""

from __future__ import annotations

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
    LocalShard,
    ShardingMetadata,
    StateMismatchError,
    Sum,
    helper_for,
    load_state,
    save_distributed,
)
from ckptkit.live.shards import HELPERS
from ckptkit.model import Box
from tests.live.network import network
from tests.live.pool import Pool
from tests.live.strategies import EACH_KIND, LAYOUTS, Job, build
from tests.live.test_sharded_optimizer import momentum

CUT = "model/layers.0.up.weight"
MOMENT = "optimizer/layers.0.up.weight/exp_avg"

HELPER_OF = {
    "plain": "plain",
    "ddp": "ddp",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "hsdp": "fsdp",
    "zero1": "zero1",
    "zero2": "fsdp",
    "tp": "tp",
    "fsdp": "fsdp",
    "pp": "pp",
}
"""The helper of a layout, by what its name begins with."""


def helper_of(layout: str) -> str:
    # replicas of what tensor parallelism cuts
    if layout in ("ddp:2,tp:2", "ddp:2 around tp:2", "replicate:2 of tp:2"):
        return "tp"
    return HELPER_OF[layout.partition(":")[0]]


def kept(shard: LocalShard) -> LocalShard:
    """A shard in memory of its own."""
    tensors = {name: tensor.clone() for name, tensor in shard.tensors.items()}
    return LocalShard(shard.metadata, tensors, shard.values, shard.optimizers)


def refusal(call: Callable[[], object]) -> str:
    """What a call says that fails; the rank can then go on."""
    with pytest.raises(CkptkitError) as caught:
        call()
    return str(caught.value)


def go_on(layout: str) -> tuple[str, ShardingMetadata, list[float], list[float]]:
    job, other = build(layout), build(layout, seed=5)
    job.train(range(2))
    helper = helper_for(job.model, job.optimizer)
    shard = kept(helper.collect_local_shard(job.model, job.optimizer))
    helper.load_local_shard(other.model, shard, other.optimizer)
    metadata = helper.sharding_metadata(job.model, job.optimizer)
    assert metadata == shard.metadata
    losses = job.train(range(2, 4)), other.train(range(2, 4))
    return helper.name, metadata, *losses


@pytest.mark.parametrize("layout", EACH_KIND)
def test_a_job_goes_on_from_the_shards_of_its_ranks(gloo: Pool, layout: str) -> None:
    ranks = LAYOUTS[layout].ranks
    held: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, (helper, metadata, one, other) in enumerate(gloo.run(ranks, go_on, layout)):
        assert helper == HELPERS[helper_of(layout)].name
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
    return helper_for(job.model, job.optimizer).sharding_metadata(job.model, job.optimizer)


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
    shard = kept(helper_for(job.model, job.optimizer).collect_local_shard(job.model, job.optimizer))
    helper = helper_for(target.model, target.optimizer)
    before = kept(helper.collect_local_shard(target.model))
    said = refusal(lambda: helper.load_local_shard(target.model, shard, target.optimizer))
    after = helper.collect_local_shard(target.model)
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
    helper = helper_for(job.model)
    shards: list[LocalShard | None] = [None, None]
    dist.all_gather_object(shards, kept(helper.collect_local_shard(job.model)))
    assert shards[0] is not None
    shard = shards[0]
    return refusal(lambda: helper.load_local_shard(job.model, shard))


def test_the_shard_of_another_rank_is_refused_on_all(gloo: Pool) -> None:
    one, other = gloo.run(2, load_swapped)
    assert one == other
    assert "rank 1: model/embed.weight is (6, 6) at (7, 0) of float32 (13, 6) here" in one


def load_other_kind(layout: str) -> str:
    job, target = build(layout), build(layout, make=momentum)
    job.train([0])
    helper = helper_for(job.model)
    shard = helper.collect_local_shard(job.model, job.optimizer)
    return refusal(lambda: helper.load_local_shard(target.model, shard, target.optimizer))


@pytest.mark.parametrize("layout", ["plain", "fsdp2:2"])
def test_the_state_of_another_optimizer_is_refused(gloo: Pool, layout: str) -> None:
    for said in gloo.run(LAYOUTS[layout].ranks, load_other_kind, layout):
        assert "the optimizer here is SGD, the shard has the state of AdamW" in said


def load_state_beyond(layout: str) -> str:
    """The optimizer has state that the shard of the same kind lacks for one parameter."""
    job = build(layout)
    job.train([0])
    helper = helper_for(job.model)
    shard = helper.collect_local_shard(job.model, job.optimizer)
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
    return refusal(lambda: helper.load_local_shard(job.model, wrong, job.optimizer))


def test_state_of_another_shape_is_refused(gloo: Pool) -> None:
    (said,) = gloo.run(1, load_state_beyond, "plain")
    assert f"{MOMENT} is (12, 6) at (0, 0) of float32 (12, 6) here" in said


def of_wrong_helper() -> tuple[str, str, bool, bool]:
    job = build("fsdp2:2")
    return (
        refusal(lambda: HELPERS["ddp"].collect_local_shard(job.model)),
        refusal(lambda: HELPERS["plain"].sharding_metadata(job.model)),
        HELPERS["fsdp"].recognises(job.model),
        HELPERS["ddp"].recognises(job.model),
    )


def test_a_helper_takes_models_of_its_kind_only(gloo: Pool) -> None:
    for by_ddp, by_plain, fsdp, ddp in gloo.run(2, of_wrong_helper):
        not_its_own = "is not for this model (got 'fsdp')"
        assert f"the helper for DistributedDataParallel {not_its_own}" in by_ddp
        assert f"the helper for a model that nothing spreads {not_its_own}" in by_plain
        assert (fsdp, ddp) == (True, False)
    said = refusal(lambda: HELPERS["ddp"].collect_local_shard(network(0)))
    assert "is not for this model (got 'nothing spreads it')" in said


def zero_without_its_optimizer() -> tuple[str, str]:
    job = build("zero1:2")
    return helper_for(job.model).name, helper_for(job.model, job.optimizer).name


def test_only_the_optimizer_tells_zero_1_from_ddp(gloo: Pool) -> None:
    assert (
        gloo.run(2, zero_without_its_optimizer)
        == [(HELPERS["ddp"].name, HELPERS["zero1"].name)] * 2
    )


def test_one_process_needs_no_process_group() -> None:
    model, other = network(0), network(5)
    helper = helper_for(model)
    shard = helper.collect_local_shard(model)
    assert (shard.metadata.strategy, shard.optimizers) == ("single", [])
    helper.load_local_shard(other, shard)
    assert all(torch.equal(other.state_dict()[n], t) for n, t in model.state_dict().items())
    with pytest.raises(StateMismatchError, match="the shard has the state of none"):
        helper.load_local_shard(other, shard, torch.optim.AdamW(other.parameters()))


def test_data_parallel_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedTypeError, match="use DistributedDataParallel"):
        helper_for(model)
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
        helper_for(engine())


@pytest.mark.parametrize("model", [None, 3, {"w": torch.ones(1)}])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(UnsupportedTypeError, match="not a model"):
        helper_for(model)


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
        finish = checkpointer._finish
        monkeypatch.setattr(checkpointer, "_finish", lambda *g: (gate.wait(20), finish(*g))[1])
        assert str(save_distributed(checkpointer, model, step=1)) == "single"
        assert save_distributed(checkpointer, model, step=2) is None
        gate.set()
    assert checkpointer.run.steps() == [1]
