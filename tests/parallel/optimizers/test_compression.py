"""Compressed gradients: they train as whole ones do, and what they leave unsent is never lost."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer
from ckptkit.live.state.ranks import all_gather_single
from ckptkit.model import Strategy
from ckptkit.parallel import compression_of
from ckptkit.parallel.optimizers.methods import PowerSGD
from ckptkit.parallel.strategies.options import StrategyOptions
from tests.live.pool import Pool
from tests.parallel.optimizers.problem import flat, loss_of, loss_unseen, many_buckets, network

SPECS = ["fp16", "bf16", "int8", "topk:0.1", "powersgd:2"]
WITH_RESIDUALS = ["topk:0.1", "powersgd:2"]


class Job:
    """A model whose gradients are compressed, and its optimizer."""

    def __init__(
        self, spec: str, *, buckets: bool = True, seed: int = 0, plain_sgd: bool = False
    ) -> None:
        plain = network(seed)
        self.model = many_buckets(plain) if buckets else DistributedDataParallel(plain)
        self.compression = compression_of(spec) if spec else None
        if self.compression:
            self.compression.attach(self.model)
        rate, momentum = (0.1, 0.0) if plain_sgd else (0.05, 0.9)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum)

    def train(self, steps: range) -> Job:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step, dist.get_rank()).backward()
            self.optimizer.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "state": {"compression": self.compression},
        }


def learn(spec: str) -> tuple[float, int, int]:
    job = Job(spec, plain_sgd=True).train(range(200))
    found = job.compression
    counts = (found.bytes_sent, found.bytes_uncompressed) if found else (0, 0)
    return loss_unseen(job.model), *counts


@pytest.fixture(scope="module")
def uncompressed(gloo: Pool) -> float:
    return gloo.run(2, learn, "")[0][0]


@pytest.mark.parametrize("spec", SPECS)
def test_compressed_gradients_train_as_whole_ones_do(
    gloo: Pool, uncompressed: float, spec: str
) -> None:
    (loss, sent, whole), other = gloo.run(2, learn, spec)
    assert loss == other[0]  # the replicas stay the same
    assert loss < 1.1 * uncompressed
    assert 0 < sent < 0.75 * whole


def train(spec: str, location: str) -> torch.Tensor:
    job = Job(spec).train(range(5))
    with Checkpointer(location, timeout=30) as checkpointer:
        checkpointer.save(5, **job.state)
    return flat(job.train(range(5, 9)).model)


def resume(spec: str, location: str, allocated: bool) -> torch.Tensor:
    job = Job(spec, seed=1)
    if allocated and job.compression:
        job.compression.allocate()
    with Checkpointer(location, timeout=30) as checkpointer:
        assert checkpointer.restore(**job.state)
    return flat(job.train(range(5, 9)).model)


@pytest.mark.parametrize(("spec", "ranks"), [("topk:0.1", 2), *((spec, 4) for spec in SPECS)])
def test_a_resumed_job_goes_on_bit_for_bit(
    gloo: Pool, tmp_path: Path, spec: str, ranks: int
) -> None:
    expected = gloo.run(ranks, train, spec, str(tmp_path))
    for allocated in {False, spec in WITH_RESIDUALS}:
        found = gloo.run(ranks, resume, spec, str(tmp_path), allocated)
        assert all(torch.equal(mine, expected[0]) for mine in found)


def residuals(spec: str, location: str, restore: bool) -> dict[str, torch.Tensor]:
    job = Job(spec)
    with Checkpointer(location, timeout=30) as checkpointer:
        if restore:
            assert checkpointer.restore(**job.state)
        else:
            checkpointer.save(5, **job.train(range(5)).state)
    found = job.compression
    result: dict[str, torch.Tensor] = {k: v.clone() for k, v in found.residuals.items()}  # type: ignore[union-attr]
    job.train(range(5, 7))
    return result


@pytest.mark.parametrize("spec", WITH_RESIDUALS)
def test_what_four_ranks_left_unsent_is_shared_out_among_two(
    gloo: Pool, tmp_path: Path, spec: str
) -> None:
    before = gloo.run(4, residuals, spec, str(tmp_path), False)
    after = gloo.run(2, residuals, spec, str(tmp_path), True)
    assert any(not torch.equal(before[0][name], before[1][name]) for name in before[0])
    for name in before[0]:
        mean = torch.stack([each[name] for each in before]).mean(0)
        for each in after:
            torch.testing.assert_close(each[name], mean, rtol=1e-6, atol=1e-9)


def parameters(spec: str, buckets: bool) -> torch.Tensor:
    return flat(Job(spec, buckets=buckets).train(range(6)).model)


@pytest.mark.parametrize("spec", SPECS)
def test_how_gradients_are_put_into_buckets_makes_no_difference(gloo: Pool, spec: str) -> None:
    one = gloo.run(4, parameters, spec, False)[0]
    several = gloo.run(4, parameters, spec, True)[0]
    assert torch.equal(one, several)


def layer_bytes(spec: str) -> tuple[float, float]:
    """Bytes sent per byte of gradients as the compression says, and as torch is asked to."""
    model = DistributedDataParallel(nn.Linear(1024, 1024, bias=False))
    compression = compression_of(spec, after=0)
    compression.attach(model)
    seen, size = [0.0], dist.get_world_size()
    share = {"all_reduce": 2 * (size - 1) / size, "all_to_all_single": (size - 1) / size}

    def count(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += share.get(name, size - 1.0) * args[0 if name == "all_reduce" else 1].nbytes
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in share:
            patch.setattr(dist, name, partial(count, name, getattr(dist, name)))
        gather = partial(count, "", all_gather_single)
        patch.setattr("ckptkit.parallel.optimizers.compression.all_gather_single", gather)
        model(torch.ones(2, 1024)).sum().backward()
    whole = 2 * (size - 1) / size * 4 * 2**20
    assert compression.bytes_uncompressed == whole
    return compression.bytes_sent / whole, seen[0] / whole


@pytest.mark.parametrize(
    ("spec", "limit", "ranks"),
    [
        ("bf16", 0.5, 4),
        ("int8", 0.27, 2),
        ("int8", 0.27, 4),
        ("powersgd:4", 0.1, 4),
        ("topk:0.01", 0.041, 4),
    ],
)
def test_what_is_said_to_be_sent_is_what_torch_sends(
    gloo: Pool, spec: str, limit: float, ranks: int
) -> None:
    for said, seen in gloo.run(ranks, layer_bytes, spec):
        assert said <= limit
        assert said == pytest.approx(seen, rel=0.01)


def overflow(spec: str) -> bool:
    """A step whose gradients are infinite on one rank, and which the training skips."""
    job = Job(spec).train(range(4))
    assert job.compression
    before = {k: v.clone() for k, v in job.compression.residuals.items()}  # type: ignore[attr-defined]
    job.optimizer.zero_grad()
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    (factor * loss_of(job.model, 4, dist.get_rank())).backward()
    assert all(not p.grad.isfinite().all() for p in job.model.parameters() if p.grad is not None)
    after = job.compression.residuals  # type: ignore[attr-defined]
    kept = [torch.equal(before[name], after[name]) for name in before]
    job.train(range(5, 7))
    return bool(flat(job.model).isfinite().all()) and all(kept)


@pytest.mark.parametrize("spec", WITH_RESIDUALS)
def test_an_overflow_is_seen_and_leaves_nothing_behind(gloo: Pool, spec: str) -> None:
    assert gloo.run(2, overflow, spec) == [True, True]


def with_zero1(spec: str) -> float:
    model = many_buckets(network())
    compression_of(spec).attach(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(200):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
    return loss_unseen(model)


def test_gradients_are_compressed_for_a_sharded_optimizer_too(
    gloo: Pool, uncompressed: float
) -> None:
    losses = gloo.run(2, with_zero1, "int8")
    assert losses[0] == losses[1] < 1.1 * uncompressed


@pytest.mark.parametrize(
    "spec", ["", "int4", "int8:2", "topk", "topk:0", "topk:1.5", "powersgd:0", "powersgd:x"]
)
def test_what_is_no_compression_is_refused_with_those_there_are(spec: str) -> None:
    with pytest.raises(UsageError, match="powersgd:4"):
        compression_of(spec)


@pytest.mark.parametrize("spec", SPECS)
def test_a_pipeline_refuses_what_it_could_not_save(spec: str) -> None:
    strategy = Strategy.parse("pp:2,ddp:2")
    options = StrategyOptions(compression=spec)
    if spec in WITH_RESIDUALS:
        with pytest.raises(UsageError, match="cannot be saved together"):
            options.check(strategy)
    else:
        options.check(strategy)


def test_only_models_of_ddp_send_gradients() -> None:
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        compression_of("int8").attach(network())


class Factor(nn.Module):
    """One matrix of some dtype, whose gradients are sines."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(16, 16, dtype=dtype))

    def forward(self, scale: int) -> torch.Tensor:
        """The sum of the sines times the matrix and the scale."""
        sines = torch.arange(256).sin().view(16, 16).to(self.factor.dtype)
        out: torch.Tensor = (self.factor * sines).sum() * scale
        return out


def gradient(spec: str | None, dtype: torch.dtype) -> torch.Tensor:
    """The mean over the ranks of what is twice as large on rank 1."""
    model = DistributedDataParallel(Factor(dtype))
    if spec is not None:
        compression_of(spec, after=0).attach(model)
    (model(1 + dist.get_rank())).backward()
    found: torch.Tensor | None = model.module.factor.grad
    assert found is not None
    return found


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "topk:1.0", "powersgd:8"])
def test_gradients_of_all_lengths_are_compressed(gloo: Pool, spec: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        (found, _), (wanted, _) = (gloo.run(2, gradient, each, dtype) for each in (spec, None))
        assert found.dtype == dtype
        assert torch.allclose(found.double(), wanted.double(), atol=0.03)


def complex_numbers(spec: str) -> None:
    with pytest.raises(UsageError, match=r"factor: gradients of this dtype"):
        compression_of(spec).attach(DistributedDataParallel(Factor(torch.complex64)))


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "topk:1.0", "powersgd:8"])
def test_complex_gradients_are_refused(gloo: Pool, spec: str) -> None:
    gloo.run(2, complex_numbers, spec)


def sparse() -> None:
    with pytest.raises(UsageError, match="sparse gradients cannot be compressed"):
        compression_of("int8").attach(DistributedDataParallel(nn.Embedding(4, 4, sparse=True)))


def test_sparse_gradients_are_refused(gloo: Pool) -> None:
    gloo.run(2, sparse)


def twice() -> None:
    compression = compression_of("int8")
    compression.attach(DistributedDataParallel(network()))
    with pytest.raises(UsageError, match="attached already"):
        compression.attach(DistributedDataParallel(network()))
    with pytest.raises(UsageError, match="another compression"):
        compression.load_state_dict(compression_of("fp16").state_dict())


def test_what_cannot_be_attached_or_loaded_is_refused(gloo: Pool) -> None:
    gloo.run(2, twice)


def test_factors_do_not_depend_on_the_default_device() -> None:
    compression, gradient = PowerSGD("powersgd:4", 4, 0), torch.ones(64, 64)
    with torch.device("meta"):
        compression.remember("weight", gradient)
    assert compression._factors["weight"].isfinite().all()


def storages_while_ranks_exchange() -> int:
    """How many there are of the size of a gradient, in the second step."""
    model = DistributedDataParallel(nn.Linear(61, 67, bias=False))
    compression = compression_of("topk:0.1")
    compression.attach(model)
    gather, counts = compression.wire.gather, list[int]()

    def counted(*args: Any) -> Any:
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        same = {found.data_ptr() for found in tensors if found.numel() == 61 * 67}
        counts.append(len(same))
        return gather(*args)

    with patch.object(compression.wire, "gather", counted):
        for _ in range(2):
            model(torch.ones(2, 61)).sum().backward()
    return counts[-1]


def test_top_k_keeps_no_copy_of_a_gradient_while_ranks_exchange(gloo: Pool) -> None:
    # The parameter, the bucket that its gradient is in, the residual, what is left now, the sum.
    assert gloo.run(2, storages_while_ranks_exchange) == [5, 5]
