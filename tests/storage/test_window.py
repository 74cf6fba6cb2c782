"""The window of an upload: any order, bounded memory, no deadlock, and no memory used too early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from ckptkit.storage.base.buffers import default_pool
from ckptkit.storage.base.store import piece_size
from ckptkit.storage.objects import upload as window_module
from ckptkit.storage.objects.upload import Stopped, UploadWindow, pieces_of

PIECE = 1000

Engine = Callable[[UploadWindow, list[bytes]], threading.Thread]


def drained(window: UploadWindow, found: list[bytes]) -> threading.Thread:
    """Takes all blocks, as an engine does: it lets go of each before it waits for the next."""

    def take() -> None:
        blocks: Iterator[memoryview] = window.blocks()
        while (block := next(blocks, None)) is not None:
            found.append(bytes(block))
            del block

    return begun(take)


def gathered(window: UploadWindow, found: list[bytes]) -> threading.Thread:
    """Takes all blocks, and holds them until a piece of the object is complete."""

    def take() -> None:
        held: list[memoryview] = []
        for block in window.blocks():
            found.append(bytes(block))
            held.append(block)
            end, kept = sum(map(len, found)), sum(map(len, held))
            del block
            while held and end - kept + len(held[0]) <= end // PIECE * PIECE:
                kept -= len(held.pop(0))

    return begun(take)


def begun(take: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive(), "deadlock"


def fill(window: UploadWindow, number: int, data: bytes) -> None:
    """Put a part in place, if it can be."""
    blocks = window.blocks_of(number)
    if len(blocks) != 1:
        window.write(number, memoryview(data))
        return
    with window.filling(blocks[0]) as memory:
        memory[:] = data


@pytest.mark.parametrize("engine", [drained, gathered])
@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_parts_come_out_in_order_whatever_order_they_come_in(order: str, engine: Engine) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(rng.choice([0, 1, 300, 999, 1000, 1001, 2500])) for _ in range(60)]
    window = UploadWindow([len(part) for part in parts], PIECE, 3 * PIECE)
    numbers = list(range(60))
    if order == "backwards":
        numbers.reverse()
    elif order == "shuffled":
        rng.shuffle(numbers)
    found: list[bytes] = []
    thread = engine(window, found)
    for number in numbers:
        fill(window, number, parts[number])
    window.seal()
    ended(thread)
    assert b"".join(found) == b"".join(parts)
    assert window.is_empty
    assert max(map(len, found)) <= PIECE
    window.close()


@pytest.mark.parametrize("engine", [drained, gathered])
@pytest.mark.parametrize("longest", [20, 1000, 2500])
def test_many_threads_never_wait_for_each_other_for_ever(engine: Engine, longest: int) -> None:
    rng = random.Random(2)
    parts = [rng.randbytes(rng.randrange(1, longest)) for _ in range(300)]
    window = UploadWindow([len(part) for part in parts], PIECE, 2 * PIECE)
    found: list[bytes] = []
    thread = engine(window, found)
    with ThreadPoolExecutor(8) as threads:
        numbers = rng.sample(range(300), 300)
        list(threads.map(lambda number: fill(window, number, parts[number]), numbers))
    window.seal()
    ended(thread)
    assert b"".join(found) == b"".join(parts)


def test_a_part_that_cannot_be_filled_gives_its_memory_back() -> None:
    window = UploadWindow([PIECE] * 3, PIECE, 2 * PIECE)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="unreadable"), window.filling(0):
            raise RuntimeError("unreadable")
    fill(window, 0, b"a" * PIECE)
    assert bytes(next(window.blocks())) == b"a" * PIECE


def test_a_writer_waits_while_the_engine_holds_all_the_memory() -> None:
    window = UploadWindow([PIECE] * 4, PIECE, 2 * PIECE)
    blocks = window.blocks()
    fill(window, 0, b"a" * PIECE)
    fill(window, 1, b"b" * PIECE)
    first, second = next(blocks), next(blocks)
    writer = threading.Thread(target=fill, args=(window, 2, b"c" * PIECE), daemon=True)
    writer.start()
    time.sleep(0.1)
    assert writer.is_alive()
    view = first[:10]
    del first
    time.sleep(0.05)
    assert writer.is_alive(), "a slice of the block is still in use"
    assert bytes(view) == b"a" * 10
    del view
    ended(writer)
    assert bytes(second) == b"b" * PIECE
    assert bytes(next(blocks)) == b"c" * PIECE


def test_no_memory_beyond_the_limit_while_the_next_part_is_put_together() -> None:
    window = UploadWindow([2 * PIECE, *[PIECE] * 4], PIECE, 2 * PIECE)
    with window.coming():
        fill(window, 1, b"b" * PIECE)
        fill(window, 2, b"c" * PIECE)
        writer = threading.Thread(target=fill, args=(window, 3, b"d" * PIECE), daemon=True)
        writer.start()
        time.sleep(0.1)
        assert writer.is_alive(), "the first part comes without it"
    ended(writer)


def test_the_next_part_waits_for_nobody_who_may_wait_for_it() -> None:
    window = UploadWindow([PIECE] * 4, PIECE, 2 * PIECE)
    first_is_there = threading.Event()

    def fill_later(number: int) -> None:
        # As a checksum does, which stands behind what it is of.
        with window.filling(number) as memory:
            assert first_is_there.wait(30)
            memory[:] = b"x" * PIECE

    later = [begun(partial(fill_later, number)) for number in (1, 2)]
    time.sleep(0.1)
    ended(begun(lambda: fill(window, 0, b"a" * PIECE)))
    first_is_there.set()
    for thread in later:
        ended(thread)


def test_without_memory_for_one_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    window = UploadWindow([PIECE] * 5, PIECE, 2 * PIECE)
    fill(window, 1, b"b" * PIECE)
    fill(window, 2, b"c" * PIECE)
    in_hand = window.coming()
    in_hand.__enter__()
    outcomes: list[str] = []
    refused = threading.local()

    def first() -> None:
        refused.is_here = True
        with pytest.raises(MemoryError):
            fill(window, 0, b"a" * PIECE)
        outcomes.append("first")

    take = default_pool().take

    def refuse(size: int) -> object:
        if hasattr(refused, "is_here"):
            raise MemoryError
        return take(size)

    monkeypatch.setattr(window_module, "default_pool", lambda: SimpleNamespace(take=refuse))
    waiting = [begun(first), begun(lambda: fill(window, 3, b"d" * PIECE))]
    time.sleep(0.1)
    in_hand.__exit__(None, None, None)
    for thread in waiting:
        ended(thread)
    assert outcomes == ["first"]


def test_an_engine_that_waits_for_the_rest_of_a_piece_is_not_waited_for() -> None:
    window = UploadWindow([400] * 10, PIECE, 2 * PIECE)
    blocks = window.blocks()
    for number in range(5):
        fill(window, number, b"a" * 400)
    held = [next(blocks) for _ in range(2)]
    assert window.under_way == (2, 0)
    held.append(next(blocks))
    assert window.under_way == (3, 2)


def test_the_last_block_stays_until_it_is_sealed() -> None:
    window = UploadWindow([PIECE, PIECE], PIECE, 2 * PIECE)
    found: list[bytes] = []
    thread = drained(window, found)
    fill(window, 0, bytes(PIECE))
    fill(window, 1, bytes(PIECE))
    time.sleep(0.1)
    assert len(found) == 1
    window.seal()
    ended(thread)
    assert len(found) == 2


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 5000])
def test_blocks_are_cut_into_pieces(size: int) -> None:
    rng = random.Random(3)
    blocks = [rng.randbytes(rng.choice([1, 99, 100, 101, 350])) for _ in range(20)]
    pieces = list(pieces_of(map(memoryview, blocks), size))
    assert b"".join(pieces) == b"".join(blocks)
    assert {len(piece) for piece in pieces[:-1]} <= {size}
    assert 0 < len(pieces[-1]) <= size


def test_stopping_ends_the_wait_of_everybody() -> None:
    window = UploadWindow([PIECE] * 4, PIECE, 2 * PIECE)
    for number in range(2):
        fill(window, number, bytes(PIECE))
    blocks = window.blocks()
    held = [next(blocks), next(blocks)]
    outcomes: list[str] = []

    def note(name: str, do: object) -> None:
        try:
            do()  # type: ignore[operator]
        except Stopped:
            outcomes.append(name)

    waiting = [
        threading.Thread(target=note, args=("reader", lambda: next(blocks))),
        threading.Thread(target=note, args=("writer", lambda: fill(window, 2, bytes(PIECE)))),
    ]
    for thread in waiting:
        thread.start()
    window.stop()
    for thread in waiting:
        ended(thread)
    assert sorted(outcomes) == ["reader", "writer"]
    assert len(held) == 2


@pytest.mark.parametrize("total", [0, 1, 16 << 20, 10**9, 10**12, 5 << 40])
def test_pieces_grow_so_that_servers_take_their_number(total: int) -> None:
    size = piece_size(total, 16 << 20)
    assert size >= 16 << 20
    assert -(-total // size) < 10_000
    assert size <= 5 << 30, "S3 takes no larger parts"
    if total <= 10**11:
        assert size == 16 << 20
