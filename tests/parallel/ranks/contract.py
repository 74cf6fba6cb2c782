"""What every communicator does, whatever carries its messages: each check runs on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from ckptkit.errors import LayoutError, PeerError, UnsupportedTypeError, UsageError
from ckptkit.parallel.ranks.communicator import Communicator

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (2, 0, 3), (3, 4), (2, 3, 2))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly, different on each rank."""
    count = torch.Size(shape).numel()
    plain = (torch.arange(count) + 3 * rank) % 7
    if dtype.is_complex:
        return torch.complex(plain.double(), plain.double() + 1).to(dtype).reshape(shape)
    return plain.to(dtype).reshape(shape)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of one dtype, shape and content, bit by bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = [it.contiguous().reshape(-1).view(torch.uint8) for it in (found.cpu(), expected.cpu())]
    assert torch.equal(*bits)


def ranks(comm: Communicator) -> range:
    """All of them."""
    return range(comm.world_size)


def total(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, op: str) -> torch.Tensor:
    """What a reduction of `values` comes to, worked out in numbers that lose nothing."""
    exact = torch.complex128 if dtype.is_complex else torch.float64
    whole = torch.stack([values(rank, shape, dtype).to(exact) for rank in ranks(comm)])
    if op == "sum":
        found = whole.sum(0)
    elif op == "mean":
        found = whole.mean(0)
    else:
        found = whole.amax(0) if op == "max" else whole.amin(0)
    return found.to(dtype)


def a_sum_is_of_all_ranks_in_every_dtype_and_shape(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = values(comm.rank, shape, dtype)
            same(comm.all_reduce(mine), total(comm, shape, dtype, "sum"))
            same(mine, values(comm.rank, shape, dtype))


def a_mean_max_and_min_are_what_torch_would_give(comm: Communicator) -> None:
    for dtype in DTYPES:
        mine = values(comm.rank, (3, 4), dtype)
        if not dtype.is_complex:
            same(comm.all_reduce(mine, "max"), total(comm, (3, 4), dtype, "max"))
            same(comm.all_reduce(mine, "min"), total(comm, (3, 4), dtype, "min"))
        if dtype.is_floating_point or dtype.is_complex:
            same(comm.all_reduce(mine, "mean"), total(comm, (3, 4), dtype, "mean"))


def large_and_negative_numbers_are_reduced_right(comm: Communicator) -> None:
    top = torch.tensor([2**63 + comm.rank, comm.rank, 2**64 - 1 - comm.rank], dtype=torch.uint64)
    size, kind = comm.world_size, torch.uint64
    largest = torch.tensor([2**63 + size - 1, size - 1, 2**64 - 1], dtype=kind)
    same(comm.all_reduce(top, "max"), largest)
    same(comm.all_reduce(top, "min"), torch.tensor([2**63, 0, 2**64 - size], dtype=kind))
    narrow = torch.full((2,), 100, dtype=torch.int8)
    around = torch.tensor([100 * comm.world_size] * 2).to(torch.int8)
    same(comm.all_reduce(narrow), around)
    below = torch.tensor([-1.0 - comm.rank, torch.inf])
    same(comm.all_reduce(below, "min"), torch.tensor([-1.0 * comm.world_size, torch.inf]))


def what_is_no_number_on_one_rank_is_the_max_and_min_of_all(comm: Communicator) -> None:
    for at in ranks(comm):
        for op in ("max", "min"):
            mine = math.nan if comm.rank == at else 1.0
            assert math.isnan(comm.all_reduce(mine, op))
            for dtype in (torch.float64, torch.bfloat16):
                found = comm.all_reduce(torch.tensor([2.0, mine, 3.0], dtype=dtype), op)
                assert found.isnan().tolist() == [False, True, False]


def half_types_are_added_up_without_rounding_in_between(comm: Communicator) -> None:
    tiny = 2.0**-9  # lost, one at a time, next to a bfloat16 of 1
    mine = torch.tensor([1.0 if comm.rank == 0 else tiny], dtype=torch.bfloat16)
    expected = torch.tensor([1.0 + tiny * (comm.world_size - 1)]).to(torch.bfloat16)
    same(comm.all_reduce(mine), expected)


def a_tensor_that_is_not_contiguous_or_needs_a_gradient_is_taken_as_it_reads(
    comm: Communicator,
) -> None:
    whole = torch.arange(24.0).reshape(4, 6) + comm.rank
    for view in (whole.t(), whole[::2, 1::3], whole[1].expand(3, 6), whole.requires_grad_()):
        for rank, found in enumerate(comm.all_gather(view)):
            same(found, view.detach() - comm.rank + rank)
    whole = whole.detach()
    turned = torch.complex(whole, whole).conj()
    assert turned.is_conj()
    same(comm.broadcast(turned), torch.complex(whole - comm.rank, -(whole - comm.rank)))


def a_broadcast_needs_nothing_of_the_others(comm: Communicator) -> None:
    for src in ranks(comm):
        for dtype in DTYPES:
            mine = values(src, (2, 3), dtype) if comm.rank == src else None
            found = comm.broadcast(mine, src)
            same(found, values(src, (2, 3), dtype))
            assert mine is None or found.data_ptr() != mine.data_ptr()
    same(comm.broadcast(torch.empty(0, 4)), torch.empty(0, 4))


def ranks_gather_tensors_of_different_shapes(comm: Communicator) -> None:
    for dtype in DTYPES:
        for rank, found in enumerate(comm.all_gather(values(comm.rank, (comm.rank, 2), dtype))):
            same(found, values(rank, (rank, 2), dtype))
    for dst in ranks(comm):
        gathered = comm.gather(values(comm.rank, (2 - comm.rank % 2,), torch.int16), dst)
        assert (gathered is None) == (comm.rank != dst)
        for rank, found in enumerate(gathered or []):
            same(found, values(rank, (2 - rank % 2,), torch.int16))


def a_scatter_gives_each_rank_its_own_shape(comm: Communicator) -> None:
    for src in ranks(comm):
        parts = [values(rank, (rank, 3), torch.bfloat16) for rank in ranks(comm)]
        found = comm.scatter(parts if comm.rank == src else None, src)
        same(found, parts[comm.rank])
        rows = torch.arange(comm.world_size * 2).reshape(-1, 2)
        same(comm.scatter(rows if comm.rank == src else None, src), rows[comm.rank])


def all_to_all_moves_any_shapes_and_nothing(comm: Communicator) -> None:
    for dtype in DTYPES:
        mine = [values(comm.rank, (comm.rank, to), dtype) for to in ranks(comm)]
        for rank, found in enumerate(comm.all_to_all(mine)):
            same(found, values(rank, (rank, comm.rank), dtype))


def a_reduce_scatter_gives_each_rank_its_own_sum(comm: Communicator) -> None:
    for dtype in DTYPES:
        mine = [values(comm.rank, (to, 2), dtype) for to in ranks(comm)]
        same(comm.reduce_scatter(mine), total(comm, (comm.rank, 2), dtype, "sum"))
    mine = [values(comm.rank, (3,), torch.float32) for _ in ranks(comm)]
    for op in ("mean", "max", "min"):
        same(comm.reduce_scatter(mine, op), total(comm, (3,), torch.float32, op))


def a_reduction_goes_to_one_rank(comm: Communicator) -> None:
    for dst in ranks(comm):
        for dtype in DTYPES:
            mine = values(comm.rank, (2, 3), dtype)
            found = comm.reduce(mine, dst)
            assert (found is None) == (comm.rank != dst)
            if found is not None:
                same(found, total(comm, (2, 3), dtype, "sum"))
            same(mine, values(comm.rank, (2, 3), dtype))
        for op in ("mean", "max", "min"):
            best = comm.reduce(values(comm.rank, (3,), torch.float32), dst, op)
            if best is not None:
                same(best, total(comm, (3,), torch.float32, op))


def plain_numbers_are_reduced_exactly(comm: Communicator) -> None:
    size, rank = comm.world_size, comm.rank
    assert comm.all_reduce(2**62 + rank) == size * 2**62 + sum(ranks(comm))
    assert type(comm.all_reduce(rank)) is int
    assert comm.all_reduce(0.1 * rank) == sum(0.1 * each for each in ranks(comm))
    assert comm.all_reduce(rank, "mean") == (size - 1) / 2
    assert comm.all_reduce(float(-rank), "min") == 1.0 - size
    assert comm.all_reduce(rank == size - 1, "max") is True
    assert comm.all_reduce(rank == size, "max") is False
    assert comm.all_reduce(True) == size


def messages_arrive_in_their_order_by_sender_and_tag(comm: Communicator) -> None:
    if comm.world_size == 1:
        return
    if comm.rank == 0:
        for rank in ranks(comm)[1:]:
            comm.send(values(rank, (2, 3), torch.bfloat16), rank)
            comm.send(torch.empty(0, 2), rank)
            comm.send({"rank": rank, "values": [1, None]}, rank, tag=7)
            same(comm.recv(rank), values(rank, (), torch.bool))
    else:
        same(comm.recv(0), values(comm.rank, (2, 3), torch.bfloat16))
        same(comm.recv(0), torch.empty(0, 2))
        assert comm.recv(0, tag=7) == {"rank": comm.rank, "values": [1, None]}
        comm.send(values(comm.rank, (), torch.bool), 0)


def objects_travel_as_copies(comm: Communicator) -> None:
    mine = {"rank": comm.rank, "text": "é" * 300 * comm.rank}
    found = comm.all_gather(mine)
    assert found == [{"rank": rank, "text": "é" * 300 * rank} for rank in ranks(comm)]
    assert found[comm.rank] is not mine
    last = comm.world_size - 1
    assert comm.broadcast(mine, last)["rank"] == last
    gathered = comm.gather(comm.rank, last)
    assert gathered == (list(ranks(comm)) if comm.rank == last else None)
    letters = [chr(97 + rank) for rank in ranks(comm)] if comm.rank == last else None
    assert comm.scatter(letters, last) == chr(97 + comm.rank)


def only_plain_values_travel(comm: Communicator) -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    values = [None, True, 2**70, 0.5, "é", b"\0", (1, [2]), {3: {"x": when}}]
    assert comm.broadcast(values if comm.rank == 0 else None) == values
    array = comm.broadcast(np.arange(6, dtype=np.int16).reshape(2, 3))
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    last = comm.world_size - 1
    kind: type[Exception] = UnsupportedTypeError if comm.rank == last else PeerError
    for refused, name in (({"a": {1}}, "builtins.set"), ([int], "builtins.type")):
        with pytest.raises(kind, match=f"only plain values travel between ranks: a {name} cannot"):
            comm.all_gather(refused if comm.rank == last else 1)
    if comm.world_size > 1:
        with pytest.raises(PeerError, match=r"ranks differ: rank 0.*: plain value"):
            comm.gather(torch.ones(1) if comm.rank == last else 1)
    comm.barrier()


def a_barrier_lets_all_ranks_go_on(comm: Communicator) -> None:
    for _ in range(3):
        comm.barrier()


def a_subgroup_is_a_communicator_of_its_own(comm: Communicator) -> None:
    chosen = list(ranks(comm))[::2]
    group = comm.subgroup(chosen)
    assert (group is None) == (comm.rank not in chosen)
    if group is not None:
        with group:
            assert (group.rank, group.world_size) == (chosen.index(comm.rank), len(chosen))
            assert group.all_gather(comm.rank) == chosen
            assert group.broadcast(comm.rank, group.world_size - 1) == chosen[-1]
            assert int(group.all_reduce(torch.tensor(comm.rank))) == sum(chosen)
            if group.world_size > 1 and group.rank < 2:
                say, hear = (group.send, group.recv)
                assert (say(5, 1) if group.rank == 0 else hear(0)) in (None, 5)
            inner = group.subgroup([group.world_size - 1])
            assert inner is None or inner.all_gather(1) == [1]
    assert comm.all_gather(comm.rank) == list(ranks(comm))


def ranks_of_different_groups_can_still_form_one(comm: Communicator) -> None:
    mine = comm.subgroup([comm.world_size - 1])
    whole = comm.subgroup(ranks(comm))
    assert whole is not None
    with whole:
        assert whole.all_gather(mine is None)[-1] is False
    if mine is not None:
        mine.close()


def ranks_that_disagree_all_hear_of_it_and_go_on(comm: Communicator) -> None:
    if comm.world_size == 1:
        return
    odd = comm.rank == comm.world_size - 1
    last = comm.world_size - 1
    shapes = rf"shapes of the ranks differ: .*rank {last}: float32\[2\]"
    with pytest.raises(PeerError, match=shapes):
        comm.all_reduce(torch.zeros(2 if odd else 3))
    with pytest.raises(PeerError, match=rf"dtypes of the ranks differ: .*rank {last}: int64"):
        comm.all_reduce(torch.zeros(3, dtype=torch.int64 if odd else torch.float32))
    with pytest.raises(PeerError, match=r"dtypes of the ranks differ: rank 0.*: float32"):
        comm.all_gather(torch.zeros(3, dtype=torch.int64 if odd else torch.float32))
    with pytest.raises(PeerError, match=rf"different calls: .*rank {last}: barrier\(\)"):
        comm.barrier() if odd else comm.all_gather(torch.zeros(3))
    with pytest.raises(PeerError, match=rf"different calls: .*rank {last}: all_reduce\(max\)"):
        comm.all_reduce(torch.zeros(3), "max" if odd else "sum")
    with pytest.raises(PeerError, match="dtypes of the ranks differ"):
        comm.all_reduce(1 if odd else 1.0)
    with pytest.raises(PeerError, match=r"different calls: .*of numbers"):
        comm.all_reduce(1.0 if odd else torch.tensor(1.0))
    assert comm.all_gather(comm.rank) == list(ranks(comm))


def a_rank_that_cannot_make_a_call_tells_the_others(comm: Communicator) -> None:
    last = comm.world_size - 1
    few = [torch.zeros(1)] * (comm.world_size + (comm.rank == last))
    kind: type[Exception] = LayoutError if comm.rank == last else PeerError
    with pytest.raises(kind, match=f"{comm.world_size + 1} tensors are not one for each"):
        comm.all_to_all(few)
    kind = UnsupportedTypeError if comm.rank == last else PeerError
    with pytest.raises(kind, match="is no tensor"):
        comm.all_reduce("three" if comm.rank == last else torch.zeros(1))  # type: ignore[arg-type]
    comm.barrier()


def any_error_of_one_rank_is_told_to_the_others(comm: Communicator) -> None:
    class Broken(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise ValueError("of my own")

    last = comm.world_size - 1
    is_odd = comm.rank == last
    with pytest.raises(ValueError if is_odd else PeerError, match="of my own") as caught:
        comm.all_to_all(Broken() if is_odd else [1] * comm.world_size)
    assert is_odd or f"rank {last} cannot make this call: ValueError: " in str(caught.value)
    with pytest.raises(TypeError if is_odd else PeerError, match=r"int.* is not iterable"):
        comm.scatter(5 if is_odd else None, last)  # type: ignore[arg-type]
    comm.barrier()


def what_cannot_be_is_refused_with_a_reason(comm: Communicator) -> None:
    beyond = comm.world_size
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (UsageError, "no such rank: there are 0 to", lambda: comm.broadcast(torch.ones(1), beyond)),
        (UsageError, "no such rank", lambda: comm.gather(torch.ones(1), -1)),
        (UsageError, "no such rank", lambda: comm.reduce(torch.ones(1), beyond)),
        (UsageError, "no such reduction", lambda: comm.all_reduce(1, "product")),
        (UnsupportedTypeError, "is no tensor", lambda: comm.all_reduce(2**63)),
        (UsageError, "no such rank", lambda: comm.send(torch.ones(1), beyond)),
        (UsageError, "nothing to say to itself", lambda: comm.recv(comm.rank)),
        (UsageError, "no such reduction", lambda: comm.all_reduce(torch.ones(1), "product")),
        (UnsupportedTypeError, "mean of int", lambda: comm.all_reduce(torch.ones(1).int(), "mean")),
        (UnsupportedTypeError, "no order", lambda: comm.all_reduce(torch.ones(1) * 1j, "max")),
        (UnsupportedTypeError, "dense", lambda: comm.all_reduce(torch.ones(2).to_sparse())),
        (UsageError, "no values", lambda: comm.all_reduce(torch.ones(1, device="meta"))),
        (UsageError, "no such rank", lambda: comm.subgroup([beyond])),
        (UsageError, "different ranks", lambda: comm.subgroup([0, 0])),
    ]  # fmt: skip
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    comm.barrier()


CONTRACT = {
    check.__name__: check
    for check in (
        a_sum_is_of_all_ranks_in_every_dtype_and_shape,
        a_mean_max_and_min_are_what_torch_would_give,
        large_and_negative_numbers_are_reduced_right,
        what_is_no_number_on_one_rank_is_the_max_and_min_of_all,
        half_types_are_added_up_without_rounding_in_between,
        a_tensor_that_is_not_contiguous_or_needs_a_gradient_is_taken_as_it_reads,
        a_broadcast_needs_nothing_of_the_others,
        ranks_gather_tensors_of_different_shapes,
        a_scatter_gives_each_rank_its_own_shape,
        all_to_all_moves_any_shapes_and_nothing,
        a_reduce_scatter_gives_each_rank_its_own_sum,
        a_reduction_goes_to_one_rank,
        plain_numbers_are_reduced_exactly,
        messages_arrive_in_their_order_by_sender_and_tag,
        objects_travel_as_copies,
        only_plain_values_travel,
        a_barrier_lets_all_ranks_go_on,
        a_subgroup_is_a_communicator_of_its_own,
        ranks_of_different_groups_can_still_form_one,
        ranks_that_disagree_all_hear_of_it_and_go_on,
        a_rank_that_cannot_make_a_call_tells_the_others,
        any_error_of_one_rank_is_told_to_the_others,
        what_cannot_be_is_refused_with_a_reason,
    )
}
