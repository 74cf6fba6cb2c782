"""Values that are no tensors, on their way to another number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import ckptkit
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import reshard, saved


@pytest.mark.parametrize("to", ["single", "tp:4", "fsdp:8", "pp:2,tp:2,fsdp:2"])
@pytest.mark.parametrize("source", ["single", "fsdp:3", "fsdp:8"])
def test_objects_say_the_same_to_any_number_of_ranks(source: str, to: str) -> None:
    destination = MemoryStore()
    reshard(saved(source), destination, to)
    with ckptkit.open(saved(source)) as before, ckptkit.open(destination) as after:
        assert after.objects == before.objects
        assert after.objects["extra/cursor"] == list(range(12))


def test_sums_of_complex_numbers_go_over() -> None:
    source, destination = MemoryStore(), MemoryStore()
    with ckptkit.Writer(source, step=1) as writer:
        writer.add_object("c", ckptkit.Sum(np.complex64(1 + 2j)))
    ckptkit.reshard(source, destination, to="fsdp:2")
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint.objects["c"] == 1 + 2j
    assert ckptkit.digest(source).step == ckptkit.digest(destination).step


def test_what_a_rank_had_comes_back_when_the_number_of_ranks_does() -> None:
    there, back = MemoryStore(), MemoryStore()
    reshard(saved("fsdp:3"), there, "tp:2")
    with ckptkit.open(there) as checkpoint:
        (rng,) = [o for o in checkpoint.manifest.objects if o.name == "extra/rng"]
        assert (rng.ranks, rng.value) == (3, [b"\0", b"\1", b"\2"])
    reshard(there, back, "fsdp:3")
    with ckptkit.open(back) as checkpoint:
        (rng,) = [o for o in checkpoint.manifest.objects if o.name == "extra/rng"]
        assert (rng.ranks, rng.value) == (None, [b"\0", b"\1", b"\2"])
    assert not ckptkit.verify(there)


def test_the_items_of_a_split_are_shared_out_anew() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:3"), destination, "tp:4")
    with ckptkit.open(destination) as checkpoint:
        (cursor,) = [o for o in checkpoint.manifest.objects if o.name == "extra/cursor"]
        assert cursor.value == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_details_go_over_and_say_where_the_step_is_from() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:3"), destination, "tp:2")
    with ckptkit.open(saved("fsdp:3")) as before, ckptkit.open(destination) as after:
        assert dict(after.details) == {
            "precision": "bf16",
            "resharded": {"from": "fsdp:3", "save_id": before.save_id},
        }
        assert after.time == before.time
