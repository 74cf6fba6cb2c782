from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import FormatError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import Alias
from ckptkit.format.manifest import Manifest, PackInfo, pack_name
from tests.format import samples
from tests.format.samples import ABSENT, edited, extension, plain, sealed

WHERE = "run/step-0000001000/manifest.msgpack"
GOOD = plain(samples.manifest().to_bytes())
ARRAY = extension(3, ["int8", [2], b"ab"])
HUGE = msgpack.ExtType(2, b"\1" * 3000)


def read(document: dict[Any, Any]) -> Manifest:
    return Manifest.from_bytes(sealed(document), WHERE)


def refuse(document: dict[Any, Any], where: str = "", problem: str = ".") -> None:
    with pytest.raises(FormatError, match=problem) as error:
        read(document)
    assert error.value.where.startswith(WHERE)
    assert error.value.where.endswith(where)
    assert len(str(error.value)) < 1500


def changed(name: str, row: int, value: int) -> dict[Any, Any]:
    kind = "<u8" if name in ("offset", "length") else "<u4"
    values = np.frombuffer(GOOD["chunks"][name], kind).copy()
    values[row] = value
    return edited(GOOD, f"chunks.{name}", values.tobytes())


def test_a_manifest_comes_back_as_it_was_written() -> None:
    manifest = samples.manifest()
    data = manifest.to_bytes()
    found = Manifest.from_bytes(data, WHERE)
    assert found.save == manifest.save
    assert found.packs == manifest.packs
    assert found.arrays == manifest.arrays
    assert found.aliases == manifest.aliases
    assert found.objects == manifest.objects
    for name in ("starts", "pack", "offset", "length", "crc32"):
        assert np.array_equal(getattr(found, name), getattr(manifest, name)), name
    assert found.to_bytes() == data


def test_the_keys_stand_in_the_order_of_the_format() -> None:
    assert list(GOOD) == [
        *("format", "version", "save_id", "step", "time", "writer", "world_size", "strategy"),
        *("details", "packs", "placements", "arrays", "chunks", "objects"),
    ]
    assert list(GOOD["chunks"]) == ["count", "pack", "offset", "length", "crc32"]
    assert [entry["name"] for entry in GOOD["arrays"]] == sorted(
        ["model/a", "model/b", "model/c", "optimizer/a/step"]
    )


@pytest.mark.parametrize("key", [key for key in GOOD if key not in ("format", "version")])
def test_every_field_is_needed_and_none_may_be_of_another_type(key: str) -> None:
    refuse(edited(GOOD, key, ABSENT), key, "missing")
    for value in (None, True, -1, 2**64 - 1, 1.5, "x", b"x", [None], {"x": 0}, ARRAY, HUGE):
        if key == "writer" and value == "x":
            continue
        if (key, value) in (("time", 1.5), ("time", -1), ("details", {"x": 0})):
            continue
        if key == "time" and value == 2**64 - 1:
            continue
        refuse(edited(GOOD, key, value), "")


@pytest.mark.parametrize(
    "path",
    ["", "strategy", "strategy.axes.0", "packs.0", "arrays.0", "arrays.2", "chunks", "objects.0"],
)
@pytest.mark.parametrize("key", ["surprise", 5, "", extension(2, 1)], ids=str)
def test_a_field_that_this_version_does_not_have_is_refused(path: str, key: Any) -> None:
    document = copy.deepcopy(GOOD)
    place: Any = document
    for step in path.split(".") if path else []:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[key] = 0
    refuse(document)


def test_a_field_with_an_absurd_name_is_refused() -> None:
    refuse(GOOD | {HUGE: 0})
    refuse(GOOD | {"x" * 100_000: 0})


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("save_id", "short", "save id"),
        ("save_id", "../../../etc/x", "save id"),
        ("save_id", "a" * 65, "save id"),
        ("save_id", "-aaaaaaaa", "save id"),
        ("save_id", "aaaaaaaa\n", "save id"),
        ("step", 2**63, "from 0 to"),
        ("step", HUGE, ""),
        ("time", float("nan"), "finite"),
        ("time", float("inf"), "finite"),
        ("time", HUGE, ""),
        ("world_size", 3, "2 ranks"),
        ("world_size", 0, ""),
        ("world_size", 2**24 + 1, "from 0 to"),
        ("strategy.rank_order", "column-major", "row-major"),
        ("strategy.rank_order", ARRAY, ""),
        ("strategy.axes.0.kind", "magic", "kind"),
        ("strategy.axes.0.size", 0, ""),
        ("strategy.axes.0.size", 2**62, ""),
        ("strategy.axes.0.size", 4, "4 ranks"),
        (
            "strategy.axes",
            [{"name": f"a{i}", "kind": "tp", "size": 2} for i in range(40)],
            "32 axes",
        ),
        ("details", {1.5: 0}, "key"),
        ("details", {b"a": 0}, "key"),
        ("details", {"a": msgpack.ExtType(9, b"")}, "unknown type"),
        ("details", {"a": msgpack.Timestamp(1)}, "unknown type"),
        ("packs.0.name", "rank-00001.zip", "rank-00000.zip"),
        ("packs.0.name", "../rank-00000.zip", "rank-00000.zip"),
        ("packs.2.name", "others.zip", "do not fit"),
        ("packs.0.size", -1, ""),
        ("packs.0.size", 2**63, ""),
        ("packs.0.size", 4096.0, ""),
        ("packs.0.record", None, ""),
        ("packs.0.record", [0], "offset and a length"),
        ("packs.0.record", [4096, 1], "outside"),
        ("packs.0.record", [2**62, 2**62], "outside"),
        ("packs.0.record", [-1, 5], ""),
        ("packs.2.record", [0, 5], ""),
        ("packs", [], "do not fit"),
        ("packs", GOOD["packs"][:1], "do not fit"),
        ("packs", [*GOOD["packs"], GOOD["packs"][2]], "do not fit"),
        ("placements.0", [], "list of 1"),
        ("placements.0", [{"kind": "replicate"}] * 2, "list of 1"),
        ("placements.0", "replicate", "list of 1"),
        ("placements.0.0", {"kind": "magic"}, "known kind"),
        ("placements.0.0", {"kind": ARRAY}, "known kind"),
        ("placements.0.0", {"kind": "shard"}, "dim"),
        ("placements.0.0", {"kind": "shard", "dim": -1}, ""),
        ("placements.0.0", {"kind": "shard", "dim": 2**63}, ""),
        ("placements.0.0", {"kind": "shard", "dim": 0, "unit": 0}, ""),
        ("placements.0.0", {"kind": "shard", "dim": 0, "blocks": []}, "block"),
        ("placements.0.0", {"kind": "shard", "dim": 0, "blocks": [2**62, 2**62]}, "block"),
        ("placements.0.0", {"kind": "strided", "dim": 0, "blocks": [4]}, "unknown key"),
        ("placements.0.0", {"kind": "replicate", "dim": 0}, "unknown key"),
        ("arrays.0", [], "not a map"),
        ("arrays.0.name", "model/../a", "format spells"),
        ("arrays.0.name", b"model/a", "text"),
        ("arrays.0.shape", [-4, 6], "from 0 to"),
        ("arrays.0.shape", [4.0, 6], "integer"),
        ("arrays.0.shape", [True, 6], "integer"),
        ("arrays.0.shape", [2**62 + 1, 6], "from 0 to"),
        ("arrays.0.shape", [2**62, 6], r"2\*\*63"),
        ("arrays.0.shape", [2**31, 2**31], r"2\*\*63"),
        ("arrays.0.shape", [1] * 33, "32 dims"),
        ("arrays.0.shape", [4], ""),
        ("arrays.0.shape", [4, 12], "chunks are listed"),
        ("arrays.0.shape", [HUGE], ""),
        ("arrays.0.dtype", "float4", ""),
        ("arrays.0.dtype", "torch.float32", "spells"),
        ("arrays.0.dtype", "<f4", ""),
        ("arrays.0.dtype", "float64", "length"),
        ("arrays.0.grid", None, "grid"),
        ("arrays.0.grid.kind", "hexagonal", "grid"),
        ("arrays.0.grid.kind", ARRAY, "grid"),
        ("arrays.0.grid.chunk_shape", [2], ""),
        ("arrays.0.grid.chunk_shape", [0, 4], ""),
        ("arrays.0.grid.chunk_shape", [-2, 4], ""),
        ("arrays.0.grid.chunk_shape", [2, 2**63], ""),
        ("arrays.0.grid.chunk_shape", [2**62, 2**62], ""),
        ("arrays.0.grid.chunk_shape", [1, 4], "chunks are listed"),
        ("arrays.3.shape", [1, 1], ""),
        ("arrays.1.grid.edges", [[3, 1]], "rise"),
        ("arrays.1.grid.edges", [[0, 3]], "rise"),
        ("arrays.1.grid.edges", [[1, 1]], "rise"),
        ("arrays.1.grid.edges", [[1, 5]], "rise"),
        ("arrays.1.grid.edges", [[1, 3], []], ""),
        ("arrays.1.grid.edges", [1, 3], "integers"),
        ("arrays.1.grid.edges", [[1, 4]], "length"),
        ("arrays.0.role", "weights", "param"),
        ("arrays.0.placements", 2, "from 0 to"),
        ("arrays.0.placements", -1, "from 0 to"),
        ("arrays.3.of", "model/../a", "format spells"),
        ("arrays.2.alias_of", "model/x", "not there"),
        ("arrays.2.alias_of", "model/c", "not there"),
        ("arrays.2.alias_of", "..", "format spells"),
        ("chunks.count", 7, "are not 7"),
        ("chunks.count", 2**32 - 1, "are not"),
        ("chunks.count", 2**32, "from 0 to"),
        ("chunks.count", -1, "from 0 to"),
        ("chunks.pack", b"", "are not 8"),
        ("chunks.offset", GOOD["chunks"]["offset"][:-1], "are not 8"),
        ("chunks.crc32", "text", "bytes"),
        ("chunks.length", [1] * 8, "bytes"),
        ("objects.0.name", 5, ""),
        ("objects.0.name", "zz", "sorted"),
        ("objects.0.name", "rng", "sorted"),
        ("objects.0.semantics", "mean", "replicated"),
        ("objects.0.value", msgpack.ExtType(9, b""), "unknown type"),
        ("objects.1.value", [b"x"], "list of 2"),
        ("objects.1.value", 5, "list of 2"),
        ("objects.2.value", extension(1, [3, 4]), "list of 2"),
        ("objects.2.value", [3], "list of 2"),
        ("objects.2.value", [3, "4"], ""),
        ("objects.2.value", [3, None], ""),
        ("objects.2.value", [3, {}], ""),
    ],
)
def test_a_hostile_field_is_refused_by_its_name(path: str, value: Any, problem: str) -> None:
    refuse(edited(GOOD, path, value), problem=problem or ".")


@pytest.mark.parametrize("shape", [[1, 1], [0, 1]], ids=str)
def test_a_chunk_shape_whose_bytes_no_integer_holds_is_refused(shape: list[int]) -> None:
    grid = {"kind": "regular", "chunk_shape": [2**62, 2**62]}
    refuse(edited(GOOD, "arrays.3", {**GOOD["arrays"][3], "shape": shape, "grid": grid}))


def test_messages_say_where() -> None:
    refuse(edited(GOOD, "arrays.0.shape", [-1]), "arrays.0.shape.0")
    refuse(edited(GOOD, "arrays.1.grid.edges", [[0]]), "arrays.1.grid")
    refuse(edited(GOOD, "packs.1.size", None), "packs.1.size")
    refuse(edited(GOOD, "strategy.axes.0.size", None), "strategy.axes.0.size")
    refuse(edited(GOOD, "objects.1.semantics", ""), "objects.1.semantics")
    refuse(edited(GOOD, "chunks.pack", b""), "chunks.pack")
    refuse(edited(GOOD, "placements.1.0", {}), "placements.1.0")
    refuse(changed("length", 6, 5), "chunks.length.6")
    refuse(changed("offset", 3, 2**40), "chunks.3")


@pytest.mark.parametrize(
    "names",
    [["b", "a"], ["a", "a"], ["a", "a/b"], ["a", "a-b", "a/b"], ["a", "a/b/c"], ["a.b", "a"]],
    ids=str,
)
def test_names_are_sorted_and_no_array_lies_below_another(names: list[str]) -> None:
    first = GOOD["arrays"][3]
    for alias in (False, True):
        entries = [{**first, "name": name} for name in names]
        if alias:
            entries[-1] = {"name": names[-1], "alias_of": names[0]}
        document = edited(GOOD, "arrays", [{**entry} for entry in entries])
        for entry in document["arrays"]:
            entry.pop("of", None)
        refuse(document)


@pytest.mark.parametrize(
    ("name", "row", "value", "problem"),
    [
        ("pack", 0, 3, "not listed"),
        ("pack", 0, 2**32 - 1, "not listed"),
        ("offset", 0, 4096, "past the end"),
        ("offset", 0, 4096 - 31, "past the end"),
        ("offset", 0, 2**63, "past the end"),
        ("offset", 0, 2**64 - 1, "past the end"),
        ("offset", 0, 2**64 - 32, "past the end"),
        ("length", 0, 2**64 - 1, "past the end"),
        ("length", 0, 2**64 - 64, "past the end"),
        ("length", 0, 31, "length"),
        ("length", 0, 0, "length"),
        ("offset", 1, 64, "overlap"),
        ("offset", 1, 64 + 31, "overlap"),
        ("offset", 1, 64 - 31, "overlap"),
        ("pack", 0, 1, "overlap"),
    ],
)
def test_chunks_lie_apart_inside_their_packs(name: str, row: int, value: int, problem: str) -> None:
    document = changed(name, row, value)
    if name == "pack" and value == 1:
        offsets = np.frombuffer(document["chunks"]["offset"], "<u8").copy()
        offsets[0] = offsets[2]
        document = edited(document, "chunks.offset", offsets.tobytes())
    refuse(document, problem=problem)


def test_chunks_may_touch_and_end_where_their_pack_ends() -> None:
    assert read(changed("offset", 1, 64 + 32)).offset[1] == 96
    assert read(changed("offset", 0, 4096 - 32)).offset[0] == 4064
    assert read(changed("offset", 1, 64 - 32)).offset[1] == 32


def test_a_step_may_be_empty() -> None:
    nothing = {"count": 0, "pack": b"", "offset": b"", "length": b"", "crc32": b""}
    manifest = read(GOOD | {"arrays": [], "placements": [], "chunks": nothing, "objects": []})
    assert manifest.starts.tolist() == [0]


@given(st.data())
def test_any_field_may_be_anything_without_another_error(data: st.DataObject) -> None:
    document = copy.deepcopy(GOOD)
    place: Any = document
    while True:
        steps = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(steps))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    scalar = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    typed = st.sampled_from([ARRAY, HUGE, extension(1, [1]), msgpack.ExtType(5, b"2026-01-01")])
    tree = st.recursive(
        scalar | typed | st.binary(max_size=64),
        lambda it: st.lists(it, max_size=3) | st.dictionaries(st.text(max_size=3), it, max_size=2),
        max_leaves=5,
    )
    place[key] = data.draw(tree)
    try:
        found = read(document)
    except FormatError:
        return
    assert found.to_bytes()


def test_what_was_built_is_checked_as_what_was_read() -> None:
    good = samples.manifest()
    values = {field.name: getattr(good, field.name) for field in fields(Manifest)}
    for change in (
        {"packs": good.packs[:1]},
        {"packs": (PackInfo("x.zip", 9999, (0, 1)), *good.packs[1:])},
        {"pack": good.pack[:-1]},
        {"length": good.length + np.uint64(1)},
    ):
        with pytest.raises(FormatError):
            Manifest(**(values | change))
    for arrays, aliases in (
        (tuple(reversed(good.arrays)), ()),
        ((good.arrays[0], good.arrays[0], good.arrays[2]), ()),
        (good.arrays, (Alias("model/a/b", "model/a"),)),
        (good.arrays, (Alias("model/a", "model/b"),)),
        (good.arrays, (Alias("model/x", "model/y"),)),
    ):
        with pytest.raises(FormatError):
            ArrayTable.of(arrays, aliases)


def test_packs_are_named_by_rank() -> None:
    assert [pack_name(r) for r in (0, 99_999, 100_000)] == [
        "rank-00000.zip",
        "rank-99999.zip",
        "rank-100000.zip",
    ]
