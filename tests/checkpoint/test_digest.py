"""One state has one digest, whoever wrote it; the definition is written down a second time here."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit import PerRank, Split, Sum, Writer
from ckptkit.checkpoint.run.verify import object_digest
from ckptkit.errors import CorruptionError
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import DType
from ckptkit.storage import MemoryStore
from tests.checkpoint import cuts
from tests.checkpoint.saving import Tensor, Values, flipped, random_values, save
from tests.checkpoint.sharded import STRATEGIES, awkward_state, saved

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def hashed(*parts: bytes) -> str:
    return xxhash.xxh3_128(b"".join(parts)).hexdigest()


def of_array(values: Values) -> str:
    heading = b"ckptkit-array-1\0" + DType.of(values.dtype).name.encode() + b"\0"
    extents = b"".join(n.to_bytes(8, "little") for n in (values.ndim, *values.shape))
    return hashed(heading, extents, values.tobytes(order="C"))


def of_step(arrays: dict[str, str], objects: dict[str, str]) -> str:
    parts = [b"ckptkit-step-1\0"]
    for kind, digests in (("a", arrays), ("o", objects)):
        for name, text in sorted(digests.items()):
            parts += [kind.encode(), bytes.fromhex(text), struct.pack("<Q", len(name.encode()))]
            parts.append(name.encode())
    return hashed(*parts)


def objects(writer: Writer) -> None:
    rank, size = writer.rank, writer.strategy.world_size
    share = range(24 * rank // size, 24 * (rank + 1) // size)
    writer.add_object("note", {"b": [1, (2.5, None)], "a": True, 3: b"x"})
    writer.add_object("tokens", Sum(240 // size))
    writer.add_object("items", Split(list(share)))
    writer.add_object("counts", Sum(np.full(2, 240 // size, "int32")))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk_bytes", [48, 4 * MIB])
def test_the_digest_is_that_of_the_definition_under_every_strategy(
    strategy: str, chunk_bytes: int
) -> None:
    state = awkward_state()
    tied = {"model/again": "model/float32"}
    store = saved(state, strategy, objects=objects, tied=tied, chunk_bytes=chunk_bytes)
    found = ckptkit.digest(store)
    arrays = {name: of_array(tensor.whole) for name, tensor in state.items()}
    arrays["model/again"] = arrays["model/float32"]
    assert found.arrays == arrays
    counts = msgpack.packb(["int64", [2], np.full(2, 240).tobytes()])
    note = {3: b"x", "a": True, "b": [1, msgpack.ExtType(1, msgpack.packb([2.5, None]))]}
    assert found.objects == {
        "note": hashed(b"ckptkit-object-1\0replicated\0", msgpack.packb(note)),
        "tokens": hashed(b"ckptkit-object-1\0sum\0", msgpack.packb(240)),
        "items": hashed(b"ckptkit-object-1\0split\0", msgpack.packb(list(range(24)))),
        "counts": hashed(b"ckptkit-object-1\0sum\0", msgpack.packb(msgpack.ExtType(3, counts))),
    }
    assert found.step == of_step(found.arrays, found.objects)


@given(st.data())
def test_any_tensor_cut_in_any_way_has_the_digest_of_its_values(data: st.DataObject) -> None:
    strategy = data.draw(cuts.parallel())
    tensor = data.draw(cuts.tensors(strategy))
    store = MemoryStore()
    chunk_bytes = data.draw(st.sampled_from([1, 16, 100, 1 << 20]))
    save(store, {"w": tensor}, strategy=strategy, chunk_bytes=chunk_bytes)
    assert ckptkit.digest(store).arrays == {"w": of_array(tensor.whole)}


def test_what_is_not_the_state_is_no_part_of_it() -> None:
    state = awkward_state()
    first = saved(state, step=1, details={"precision": "bf16"})
    second = saved(state, "fsdp:8", step=2)
    assert ckptkit.digest(first) == ckptkit.digest(second)


def test_every_difference_of_the_state_is_another_digest() -> None:
    zeros = np.zeros((2, 3), "float32")
    nan = np.full((2, 3), np.nan, "float32")
    other_nan = (nan.view("u4") + 1).view("float32")
    variants: list[tuple[str, Values]] = [
        ("w", zeros),
        ("v", zeros),
        ("w", -zeros),
        ("w", zeros.reshape(3, 2)),
        ("w", zeros.reshape(1, 2, 3)),
        ("w", zeros.view("int32")),
        ("w", nan),
        ("w", other_nan),
        ("w", zeros[:0]),
        ("w", zeros[:0].view("int32")),
    ]
    stores = [saved({f"model/{name}": Tensor(values)}) for name, values in variants]
    assert len({ckptkit.digest(store).step for store in stores}) == len(variants)


def test_objects_that_differ_have_other_digests_and_the_order_of_keys_is_none() -> None:
    def of(value: Any, semantics: str = "replicated", ranks: int | None = None) -> str:
        return object_digest(ObjectInfo("x", semantics, value, ranks))

    different = [1, 1.0, True, "1", b"1", [1], (1,), {"1": 1}, {1: 1}, None, np.int8(1), np.ones(1)]
    assert len({of(value) for value in different}) == len(different)
    assert of({"a": 1, "b": {2: 3, 1: 4}}) == of({"b": {1: 4, 2: 3}, "a": 1})
    assert of([1, 2], "per_rank") == of([1, 2], "per_rank", 2) != of([1, 2])
    assert of([1, 2], "sum") == of([3, 0], "sum") != of([3, 0], "split")
    # The same in every version of Python: not what `sum` makes of it.
    assert of([0.1] * 10, "sum") == of([0.9999999999999999, 0.0], "sum")
    whole = np.array(3)
    assert of([np.array(1), np.array(2)], "sum") == of([whole, np.zeros_like(whole)], "sum")
    assert of([-0.0], "sum") == of([-0.0, 0.0], "sum")


def test_checks_of_what_ranks_hold_alike_are_no_part_of_it() -> None:
    def alike(writer: Writer) -> None:
        writer.add_object("alike/model/w", 7)

    state = {"model/w": Tensor(random_values((3,)))}
    assert ckptkit.digest(saved(state, objects=alike)) == ckptkit.digest(saved(state))
    other = {"model/v": Tensor(random_values((3,)))}
    assert ckptkit.digest(saved(other, objects=alike)).objects.keys() == {"alike/model/w"}


def test_values_of_ranks_count_by_rank() -> None:
    def fill(writer: Writer) -> None:
        writer.add_object("rng", PerRank(writer.rank))

    expected = hashed(b"ckptkit-object-1\0per_rank\0", msgpack.packb([0, 1, 2, 3]))
    assert ckptkit.digest(saved({}, "tp:4", objects=fill)).objects == {"rng": expected}


@pytest.mark.parametrize("chunk_bytes", [1 << 40, 4096])
def test_a_flipped_bit_is_named_and_has_no_digest(chunk_bytes: int) -> None:
    values = random_values((1 << 12, 1 << 11))
    store = saved({"model/w": Tensor(values)}, chunk_bytes=chunk_bytes)
    damaged = flipped(store, values[-1, -512:].tobytes())
    for memory in ("16MiB", "256MiB"):
        with pytest.raises(CorruptionError, match=r"chunk model/w/c/.* has the checksum"):
            ckptkit.digest(damaged, memory=memory)


def test_progress_is_every_byte_once_and_tied_arrays_are_read_once() -> None:
    done: list[int] = []
    state = {"model/w": Tensor(random_values((64, 64))), "model/v": Tensor(random_values((7,)))}
    ckptkit.digest(saved(state, tied={"model/tied": "model/w"}), progress=done.append)
    assert sum(done) == 64 * 64 * 4 + 7 * 4


def test_a_recorded_digest_is_compared() -> None:
    state = awkward_state()
    found = ckptkit.digest(saved(state))
    for recorded, wrong in (
        ({"algorithm": "xxh3-128", "step": found.step}, 0),
        ({"algorithm": "xxh3-128", "step": "0" * 32}, 1),
        ({"algorithm": "xxh3-128"}, 1),
        ({"algorithm": "another", "step": "0" * 32}, 0),
        ("nonsense", 0),
    ):
        with ckptkit.open(saved(state, details={"digest": recorded})) as checkpoint:
            findings = found.findings(checkpoint)
            assert [finding.kind for finding in findings] == ["mismatch"] * wrong


MEASURED = """
import re, sys
from pathlib import Path
import ckptkit

def kilobytes(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

one, many, memory = sys.argv[1:]
with ckptkit.open(one), ckptkit.open(many):
    before = kilobytes("VmRSS")
    same = ckptkit.digest(one, memory=memory) == ckptkit.digest(many, memory=memory)
    same = same and ckptkit.diff(one, many, memory=memory, rtol=1e-9).same
print(same, (kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc to ask")
@pytest.mark.parametrize("memory", [24 * MIB, 96 * MIB])
def test_memory_is_bounded_whatever_the_chunks(tmp_path: Path, memory: int) -> None:
    # One chunk of 128 MiB on one side, rows of chunks above the budget on the other.
    state = {"model/w": Tensor(np.random.default_rng(0).random((1 << 12, 1 << 12)))}
    save(tmp_path / "one", state, chunk_bytes=1 << 40)
    save(tmp_path / "many", state, chunk_bytes=12 * MIB)
    arguments = [str(tmp_path / "one"), str(tmp_path / "many"), str(memory)]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    same, grown = done.stdout.split()
    assert same == "True"
    assert int(grown) <= memory
