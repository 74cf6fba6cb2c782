"""Compressed gradients under a strategy, and what becomes of what was left unsent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import STEPS, reference, spread, train, values

HALF = STEPS // 2


def save(spec: str, compression: str, location: str) -> list[float]:
    """Train, saving on the way; the losses after that."""
    dist = spread(spec, compression=compression)
    train(dist, range(HALF))
    dist.save(location, HALF, timeout=30)
    assert 0 < dist.compression.bytes_sent < dist.compression.bytes_uncompressed
    return train(dist, range(HALF, STEPS))


def go_on(spec: str, compression: str | None, location: str) -> list[float]:
    """The losses of the same steps under another strategy."""
    dist = spread(spec, seed=9, compression=compression)
    dist.load(location, timeout=30)
    losses = train(dist, range(HALF, STEPS))
    assert values(dist)
    return losses


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
    dist.save(location, HALF, timeout=30)
