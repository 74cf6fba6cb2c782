"""The window of an upload: any order, bounded memory, no deadlock, and no memory used too early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.storage.objects.sink import piece_size
from ckptkit.storage.objects.window import Stopped, Window

PIECE = 1000


def drained(window: Window, found: list[bytes]) -> threading.Thread:
    """Takes all pieces, as an engine does: it lets go of each before it waits for the next."""

    def take() -> None:
        pieces: Iterator[memoryview] = window.pieces()
        while (piece := next(pieces, None)) is not None:
            found.append(bytes(piece))
            del piece

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive(), "deadlock"


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_parts_come_out_in_order_whatever_order_they_come_in(order: str) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(rng.randrange(1, 2500)) for _ in range(40)]
    offsets = [sum(map(len, parts[:number])) for number in range(40)]
    window = Window(sum(map(len, parts)), PIECE, 3)
    numbers = list(range(40))
    if order == "backwards":
        numbers.reverse()
    elif order == "shuffled":
        rng.shuffle(numbers)
    found: list[bytes] = []
    thread = drained(window, found)
    for number in numbers:
        window.write(offsets[number], memoryview(parts[number]))
    window.seal()
    ended(thread)
    assert b"".join(found) == b"".join(parts)
    assert {len(piece) for piece in found[:-1]} == {PIECE}
    assert window.is_empty
    window.close()


def test_many_threads_never_wait_for_each_other_for_ever() -> None:
    rng = random.Random(2)
    parts = [rng.randbytes(rng.randrange(1, 2500)) for _ in range(200)]
    offsets = [sum(map(len, parts[:number])) for number in range(200)]
    window = Window(sum(map(len, parts)), PIECE, 2)
    found: list[bytes] = []
    thread = drained(window, found)
    with ThreadPoolExecutor(8) as threads:
        numbers = rng.sample(range(200), 200)
        list(threads.map(lambda n: window.write(offsets[n], memoryview(parts[n])), numbers))
    window.seal()
    ended(thread)
    assert b"".join(found) == b"".join(parts)


def test_a_writer_waits_while_the_engine_holds_all_the_memory() -> None:
    window = Window(4 * PIECE, PIECE, 2)
    pieces = window.pieces()
    window.write(0, memoryview(b"a" * PIECE))
    window.write(PIECE, memoryview(b"b" * PIECE))
    first, second = next(pieces), next(pieces)
    writer = threading.Thread(
        target=window.write, args=(2 * PIECE, memoryview(b"c" * PIECE)), daemon=True
    )
    writer.start()
    time.sleep(0.1)
    assert writer.is_alive()
    view = first[:10]
    del first
    time.sleep(0.05)
    assert writer.is_alive(), "a slice of the piece is still in use"
    assert bytes(view) == b"a" * 10
    del view
    ended(writer)
    assert bytes(second) == b"b" * PIECE
    assert bytes(next(pieces)) == b"c" * PIECE


def test_the_last_piece_stays_until_it_is_sealed() -> None:
    window = Window(2 * PIECE, PIECE, 2)
    found: list[bytes] = []
    thread = drained(window, found)
    window.write(0, memoryview(bytes(2 * PIECE)))
    time.sleep(0.1)
    assert len(found) == 1
    window.seal()
    ended(thread)
    assert len(found) == 2


def test_stopping_ends_the_wait_of_everybody() -> None:
    window = Window(4 * PIECE, PIECE, 2)
    window.write(0, memoryview(bytes(2 * PIECE)))
    pieces = window.pieces()
    held = [next(pieces), next(pieces)]
    outcomes: list[str] = []

    def note(name: str, do: object) -> None:
        try:
            do()  # type: ignore[operator]
        except Stopped:
            outcomes.append(name)

    waiting = [
        threading.Thread(target=note, args=("reader", lambda: next(pieces))),
        threading.Thread(
            target=note, args=("writer", lambda: window.write(2 * PIECE, memoryview(b"x")))
        ),
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
