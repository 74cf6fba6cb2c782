"""Compressed gradients under a strategy, and what becomes of what was left unsent."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard

from ckptkit.errors import UsageError
from ckptkit.parallel import as_distributed, compression_of
from ckptkit.parallel.strategies import distributed
from tests.live.network import batch, loss_of, network
from tests.live.pool import JobError, Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import OPTIONS, STEPS, reference, spread, train

HALF = STEPS // 2


def save(spec: str, compression: str, location: str) -> list[float]:
    """Train, saving on the way; the losses after that."""
    dist = spread(spec, compression=compression)
    train(dist, range(HALF))
    dist.save(location, HALF, timeout=30, differing=["*seen"])
    assert 0 < dist.compression.bytes_sent < dist.compression.bytes_uncompressed
    return train(dist, range(HALF, STEPS))


def go_on(spec: str, compression: str | None, location: str) -> list[float]:
    """The losses of the same steps under another strategy."""
    dist = spread(spec, seed=9, compression=compression)
    dist.load(location, timeout=30)
    return train(dist, range(HALF, STEPS))


@pytest.mark.parametrize("spec", ["ddp:2", "zero1:2"])
def test_a_resumed_job_still_knows_what_it_has_not_sent(
    gloo: Pool, tmp_path: Path, spec: str
) -> None:
    wanted = gloo.run(2, save, spec, "topk:0.1", str(tmp_path))
    assert gloo.run(2, go_on, spec, "topk:0.1", str(tmp_path)) == wanted


@pytest.mark.parametrize(
    ("spec", "compression"),
    [("fsdp:2", None), ("ddp:3", "topk:0.1"), ("ddp:2", "bf16"), ("pp:2,ddp:2", "int8")],
)
def test_any_other_job_goes_on_too(
    gloo: Pool, tmp_path: Path, spec: str, compression: str | None
) -> None:
    gloo.run(2, save, "ddp:2", "topk:0.2", str(tmp_path))
    losses = gloo.run(ranks_of(spec), go_on, spec, compression, str(tmp_path))[0]
    assert losses == pytest.approx(reference()[0][HALF:], abs=0.3)


def test_a_step_without_residuals_is_loaded_by_a_job_that_compresses(
    gloo: Pool, tmp_path: Path
) -> None:
    gloo.run(2, plain, str(tmp_path))
    losses = gloo.run(2, go_on, "ddp:2", "int8", str(tmp_path))[0]
    assert losses == pytest.approx(reference()[0][HALF:], abs=0.01)


def plain(location: str) -> None:
    """Train and save without compression."""
    dist = spread("fsdp:2")
    train(dist, range(HALF))
    dist.save(location, HALF, timeout=30, differing=["*seen"])


class Counter:
    """Something of the caller's own that is to be kept."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        """How far it has counted."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.count = state["count"]


def with_own_state(location: str) -> int:
    """Save a counter beside what the compression keeps, and load it."""
    dist = spread("ddp:2", compression="topk:0.1")
    train(dist, range(HALF))
    dist.save(location, HALF, state={"counter": Counter(7)}, timeout=30, differing=["*seen"])
    counter = Counter(0)
    dist.load(location, state={"counter": counter}, timeout=30)
    return counter.count


def test_the_caller_may_keep_state_of_its_own(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, with_own_state, str(tmp_path)) == [7, 7]


def frozen_stage(location: str) -> bool:
    """Whether a pipeline that has a stage without anything to send goes on as it did."""
    model = network(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed", "layers.0")))
    options = {**OPTIONS, "compression": "int8", "microbatches": 2, "example": batch(0)[0][:2]}
    dist = as_distributed(model, "pp:2,ddp:2", **options)
    train(dist, range(2))
    dist.save(location, 2, timeout=30, differing=["*seen"])
    losses = train(dist, range(2, 4))
    dist.load(location, timeout=30)
    return train(dist, range(2, 4)) == losses


def test_a_frozen_stage_compresses_nothing(gloo: Pool, tmp_path: Path) -> None:
    assert all(gloo.run(4, frozen_stage, str(tmp_path)))


def unreadable(location: str) -> None:
    """Ask rank 0 for a step that it cannot read, for a reason that nobody foresaw."""
    dist = spread("ddp:2", compression="int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "open_checkpoint", _raises)
        dist.load(location)


def _raises(*_: object, **__: object) -> None:
    raise RuntimeError("out of luck")


def test_what_rank_0_cannot_read_ends_all_ranks(gloo: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        gloo.run(2, unreadable, str(tmp_path))
    assert "RuntimeError: out of luck" in str(caught.value)
    assert "because of rank 0" in str(caught.value)


def cut_and_compressed(spec: str, compression: str) -> tuple[list[float], float]:
    dist = spread(spec, compression=compression)
    losses = train(dist, range(STEPS))
    return losses, dist.compression.bytes_sent / dist.compression.bytes_uncompressed


@pytest.mark.parametrize(
    ("spec", "compression", "share"),
    [
        ("fsdp:2", "fp16", 0.5),
        ("fsdp:2", "int8", 0.35),
        ("zero2:3", "int8", 0.35),
        ("pp:2,fsdp:2", "int8", 0.35),
        ("tp:2,fsdp:2", "bf16", 0.5),
    ],
)
def test_what_is_cut_sends_its_gradients_in_fewer_bytes_too(
    gloo: Pool, spec: str, compression: str, share: float
) -> None:
    for losses, sent in gloo.run(ranks_of(spec), cut_and_compressed, spec, compression):
        assert losses == pytest.approx(reference()[0], abs=0.02)
        assert losses != reference()[0]
        assert 0.2 < sent <= share


def compressed_by_hand() -> str:
    model = network(0)
    fully_shard(model.get_submodule("head"))
    fully_shard(model)
    compression = compression_of("bf16")
    compression.attach(model)
    inputs, targets = batch(0)
    loss_of(model(inputs), targets).backward()
    assert 0 < compression.bytes_sent < compression.bytes_uncompressed
    remembering = compression_of("powersgd:2")
    with pytest.raises(UsageError) as refused:
        remembering.attach(model)
    return str(refused.value)


def test_a_fully_sharded_model_of_ones_own_is_compressed(gloo: Pool) -> None:
    for said in gloo.run(2, compressed_by_hand):
        assert "as large as all gradients" in said
