"""No number in a file is believed before it was compared with the bytes that are there."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import FormatError
from ckptkit.format.manifest import Manifest, Record
from tests.format import samples
from tests.format.samples import edited, extension, plain, sealed

MANIFEST = plain(samples.manifest().to_bytes())
RECORD = plain(samples.record().to_bytes())
REGULAR = {"kind": "regular", "chunk_shape": [1, 1]}
HUGE_SPAN = {"kind": "regular", "chunk_shape": [2**40, 2**40]}

WORLD = {"axes": [{"name": "f", "kind": "fsdp", "size": 2**24}], "rank_order": "row-major"}

EDITS: dict[str, tuple[str, Any]] = {
    "a chunk for each of 2**31 elements": ("arrays.0", {"shape": [2**16, 2**15], "grid": REGULAR}),
    "2**40 chunks": ("arrays.0", {"shape": [2**20, 2**20], "grid": REGULAR}),
    "2**60 chunks": ("arrays.0", {"shape": [2**30, 2**30], "grid": REGULAR}),
    "chunks of 2**82 bytes": ("arrays.0", {"shape": [4, 6], "grid": HUGE_SPAN}),
    "a count of 2**32 - 1": ("chunks", {"count": 2**32 - 1}),
    "a world of 2**24 ranks": ("", {"world_size": 2**24, "strategy": WORLD}),
    "an object of 2**62 bytes": ("objects.0", {"value": extension(3, ["int8", [2**62], b""])}),
    "an object of 2**66 bytes": ("details", {"x": extension(3, ["int8", [2**33, 2**33], b""])}),
    "a shape of 33 dims": ("details", {"x": extension(3, ["int8", [2**62] * 33, b""])}),
}


def absurd(document: dict[Any, Any], name: str) -> bytes:
    path, change = EDITS[name]
    if not path:
        return sealed(document | change)
    place: Any = document
    for key in path.split("."):
        place = place[int(key)] if isinstance(place, list) else place[key]
    return sealed(edited(document, path, {**place, **change}))


@pytest.mark.parametrize("name", EDITS)
def test_absurd_numbers_take_no_memory(name: str) -> None:
    readers = [(Manifest.from_bytes, MANIFEST)]
    if not name.startswith(("a chunk for each", "2**40 chunks", "a world")):  # a part may be small
        readers.append((Record.from_bytes, RECORD))  # type: ignore[arg-type]
    for reader, document in readers:
        data = absurd(document, name)
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                reader(data, "document")
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


CHILD = """
import resource, sys
from ckptkit.errors import FormatError
from ckptkit.format.manifest import Manifest
from tests.format.test_memory import EDITS, MANIFEST, absurd

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for name in EDITS:
    try:
        Manifest.from_bytes(absurd(MANIFEST, name), "document")
    except FormatError:
        continue
    sys.exit(f"{name}: accepted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
def test_absurd_numbers_are_refused_with_hardly_any_memory_left() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_list_of_many_edges_is_no_more_than_what_it_takes_in_the_file() -> None:
    edges = [list(range(1, 200_000))]
    change = {"shape": [200_000], "grid": {"kind": "rectilinear", "edges": edges}}
    data = sealed(edited(MANIFEST, "arrays.1", {**MANIFEST["arrays"][1], **change}))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="chunks are listed"):
            Manifest.from_bytes(data, "m")
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("field", ["arrays", "placements"])
def test_a_list_of_empty_maps_ends_at_the_first(field: str) -> None:
    data = sealed(edited(MANIFEST, field, [{}] * 500_000))
    assert peak_of(data, f"{field}.0") < 6 * len(data)


@pytest.mark.parametrize("field", ["arrays", "placements"])
def test_a_list_of_more_entries_than_the_format_has_is_not_begun(field: str) -> None:
    data = sealed(edited(MANIFEST, field, [None] * (2**24 + 1)))
    assert peak_of(data, field, "more than 16777216 entries") < 6 * len(data)


def test_entries_of_arrays_are_in_memory_one_by_one() -> None:
    entry = {**MANIFEST["arrays"][0], "shape": [0, 1], "grid": REGULAR}
    entries = [{**entry, "name": f"model/layers.{number:05d}.w"} for number in range(10_000)]
    chunks = {**dict.fromkeys(MANIFEST["chunks"], b""), "count": 1}  # the arrays fit, this not
    data = sealed({**MANIFEST, "arrays": entries, "chunks": chunks})
    assert peak_of(data, "chunks.pack") < 9 * len(data)


def peak_of(data: bytes, where: str, problem: str = ".") -> int:
    """How much memory a manifest takes until it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=problem) as refused:
            Manifest.from_bytes(data, "m")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.where.startswith(f"m: {where}")
    return peak
