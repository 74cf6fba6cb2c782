"""Any tensors, cut in any way, under any strategy, into any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit import Strategy
from ckptkit.format.encoding import dumps
from ckptkit.model import Box, Grid
from ckptkit.plan.read import batches, reading_of
from ckptkit.storage import MemoryStore
from tests.checkpoint.cuts import parallel, tensors
from tests.checkpoint.reshard.toy import assert_packs_fit_ranks
from tests.checkpoint.saving import Tensor, assert_holds, save
from tests.old_checkpoints import write_v1


@st.composite
def _states(draw: st.DrawFn, strategy: Strategy, to: Strategy) -> dict[str, Tensor]:
    # A stage has a layer at least.
    stages = math.prod(axis.size for axis in to.mesh.axes if axis.kind == "pp")
    count = draw(st.integers(stages, stages + 3))
    return {f"model/layers.{n}.w": draw(tensors(strategy)) for n in range(count)}


@st.composite
def _rules(draw: st.DrawFn, state: dict[str, Tensor]) -> dict[str, Any]:
    rules = []
    for name, tensor in state.items():
        cuts = [f"shard({dim})" for dim in range(tensor.whole.ndim)]
        chosen = {kind: draw(st.sampled_from(["replicate", *cuts])) for kind in ("tp", "ep")}
        rules.append({"match": name.removeprefix("model/"), **chosen})
    pipeline = {"layers": r"layers\.(\d+)", "split": "balanced"}
    return {"rules": rules, "pipeline": pipeline, "default": "replicate"}


@given(st.data())
def test_whatever_is_resharded_is_what_it_was(data: st.DataObject) -> None:
    source, to = data.draw(parallel()), data.draw(parallel())
    state = data.draw(_states(source, to))
    rules = data.draw(_rules(state))
    chunk_bytes = data.draw(st.sampled_from([16, 64, 4 << 20]))
    before, after = MemoryStore(), MemoryStore()
    save(before, state, strategy=source, chunk_bytes=chunk_bytes)
    ckptkit.reshard(before, after, to=to, rules=rules, chunk_bytes=64)
    with ckptkit.open(after) as checkpoint:
        assert checkpoint.strategy == to
        assert_holds(checkpoint, state)
        assert_packs_fit_ranks(checkpoint)
    assert not ckptkit.verify(after)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_batches_cover_everything_in_order_and_stay_below_their_limit(
    sizes: list[int], limit: int
) -> None:
    found = batches(np.array(sizes, dtype=np.int64), limit)
    assert [i for first, last in found for i in range(first, last)] == list(range(len(sizes)))
    assert all(last - first == 1 or sum(sizes[first:last]) <= limit for first, last in found)


@given(st.data())
def test_what_is_read_is_counted_as_a_loop_over_chunks_counts_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    grids = [
        Grid.regular(shape, tuple(data.draw(st.integers(1, n + 1)) for n in shape))
        for _ in range(2)
    ]
    limit = data.draw(st.integers(1, 400))
    source, target = grids
    whole = Box.whole(shape)
    found = reading_of(source, target, (whole,), (2, 4), limit)
    size = target.chunk_elements * 4
    per = max(1, limit // size)
    reads: set[tuple[int, int]] = set()
    for number in range(target.chunk_count):
        box = target.box(target.index(number))
        for other in range(source.chunk_count):
            if source.box(source.index(other)).intersect(box) is not None:
                reads.add((number if source == target else number // per, other))
    assert found.requests == len(reads)
    assert found.nbytes == len(reads) * source.chunk_elements * 2


def test_a_checkpoint_of_version_1_is_resharded() -> None:
    after = MemoryStore()
    rules = {"rules": [], "default": "replicate", "pipeline": {"layers": r"(\d+)"}}
    ckptkit.reshard(write_v1.FOLDER, after, to="fsdp:3", rules=rules)
    with ckptkit.open(write_v1.FOLDER) as old, ckptkit.open(after) as new:
        assert set(new.arrays) == set(old.arrays)
        for name, array in old.arrays.items():
            assert new.read(name).tobytes() == array.read().tobytes()
        assert dumps(dict(new.objects)) == dumps(dict(old.objects))
    assert not ckptkit.verify(after)
