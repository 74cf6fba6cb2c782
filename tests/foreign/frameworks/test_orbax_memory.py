"""Chunks of Orbax are decoded whole, a few at a time, and what they take is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
from ckptkit.checkpoint.workers import share_out
from ckptkit.errors import CkptkitError, FormatError, UsageError
from ckptkit.foreign import contents
from ckptkit.foreign.contents import inflated
from tests.checkpoint.reshard.test_memory import measured
from tests.foreign.contract import read_all, same
from tests.foreign.frameworks.test_orbax import numbers, written


def test_few_chunks_are_kept_and_each_is_read_once_by_those_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_KEPT_BYTES", 100)
    array = numbers(40, 40)
    place = written(tmp_path, {"params.w": array})
    with ckptkit.open(place) as checkpoint:
        assert same(checkpoint["model/w"][...], array)
        opened = next(iter(checkpoint.packs._open.values()))
        assert isinstance(opened, contents.DecodedSource)
        assert opened._kept_bytes <= 100

        def read_some(number: int) -> None:
            at = number * 36 % (opened.size - 70)
            assert opened.fetch(at, 70) == whole[at : at + 70]

        # A chunk in the making is larger than what may be kept: then it is alone.
        whole = opened.fetch(0, opened.size)
        share_out(range(500), read_some, 8)
        assert opened._kept_bytes <= 100
        assert not any(kept.users for kept in opened._kept.values())
        assert checkpoint.packs.kept_bytes == max(100, *(c.making_bytes for c in opened._chunks))
    # In its middle, where no size is told.
    file = place / "params.w" / "3.4"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    with pytest.raises(CkptkitError, match=r"3\.4.*damaged"):
        read_all(place)


def test_memory_counts_the_chunks_that_are_decoded(tmp_path: Path) -> None:
    """One of 64 MiB at a time, and what it was decoded from."""
    leaves = {f"params.w{n}": numbers(4096, 4096, dtype="int32") for n in range(3)}
    place = written(tmp_path / "step", leaves, chunk=4096)
    (length,) = {path.stat().st_size for path in place.glob("*/0.0")}
    least = (64 << 20) + length
    with pytest.raises(UsageError, match=r"(?s)too little memory.*decoded whole"):
        ckptkit.reshard(place, tmp_path / "run", to="fsdp:4", memory=least)
    with pytest.raises(UsageError, match=r"(?s)too little memory.*decoded whole"):
        ckptkit.export(place, tmp_path / "out", to_format="hf", memory=least)
    with pytest.raises(UsageError, match="too little memory"):
        ckptkit.digest(place, memory=least)
    grown = measured(tmp_path, (place, tmp_path / "run"), f"{least + (72 << 20)}", "threads", {})
    assert least < grown <= least + (72 << 20)
    assert ckptkit.diff(tmp_path / "run", place).same


def test_no_memory_is_asked_for_that_only_a_lie_needs() -> None:
    frame = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\0\0"
    with pytest.raises(FormatError, match="damaged"):
        inflated(frame, "here", nbytes=1 << 50)
    # A block that repeats a byte 128 Ki times needs four, and says nothing of all others.
    bomb = bytes.fromhex("28b52ffd0058") + b"\x02\x00\x10\0" * 3000 + b"\x03\0\x10\0"
    with pytest.raises(FormatError, match="damaged"):
        inflated(bomb, "here", most=256 << 20)
    for data in (b"", frame[:4], frame[:5], bytes(20), frame[:4] + b"\xff" * 20):
        with pytest.raises(FormatError, match="damaged"):
            inflated(data, "here", most=100)
