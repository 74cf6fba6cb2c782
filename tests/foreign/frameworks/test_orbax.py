from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore

import ckptkit
from ckptkit.errors import CkptkitError, FormatError
from ckptkit.foreign.folder import Folder, read_places
from ckptkit.foreign.readers.tensorstore import read_database
from ckptkit.storage import Location, MemoryStore
from tests.foreign.contract import BitForBit, ForeignContract, Sample, read_all, same
from tests.servers.s3_server import Bucket
from tests.storage.counting import CountingStore


@pytest.fixture(scope="module")
def checkpoints(written_once: Callable[[str], Path]) -> Path:
    return written_once("orbax")


def sample_of(checkpoints: Path, name: str, *parts: str) -> Sample:
    (place,) = {*(checkpoints / name).glob("[0-9]"), checkpoints / name} - {checkpoints / "manager"}
    files = [str(p.relative_to(place)) for part in parts for p in sorted(place.glob(part))[:1]]
    assert len(files) == len(parts)
    with np.load(checkpoints / f"{name}.npz") as file:
        return Sample(place, dict(file), tuple(files))


def objects(place: Path) -> dict[str, Any]:
    with ckptkit.open(place) as checkpoint:
        return {item.name: item.value for item in checkpoint.manifest.objects}


class TestTrained(ForeignContract):
    """A step of a run: all values are inside of the nodes of a database."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, checkpoints: Path) -> Sample:
        return sample_of(checkpoints, "manager", "state/_METADATA", "state/manifest.ocdbt")

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Of such small ones it reads all, for they are metadata; of larger ones none."""
        array = np.random.default_rng(0).standard_normal((600, 600))
        place = written(tmp_path, {"params.w": array}, database={}, chunk=300)
        store = CountingStore(ckptkit.open_store(place))
        with ckptkit.open(store) as checkpoint:
            assert store.bytes_read < 10_000
            assert same(checkpoint["model/w"][:10, :10], array[:10, :10])
        assert store.bytes_read < array.nbytes / 3

    def test_strategy_step_and_optimizer_are_told(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.written_by == "data=fsdp:2,model=tp:2"
            assert checkpoint.step == 7
            assert checkpoint["model/scale"].part(3).boxes[0].offset == (6, 0)
            assert checkpoint["optimizer/layers.1.kernel/mu"].info.of == "model/layers.1.kernel"
            assert checkpoint.foreign is not None
            theirs = checkpoint.foreign.theirs
            assert theirs["optimizer/scale/nu"] == "opt_state.1.0.nu.scale"
        assert objects(sample.place) == {"extra/step": 7, "extra/about": {"loss": 3.5}}

    def test_the_newest_step_of_a_run_and_an_item_alone_are_read(
        self, sample: Sample, tmp_path: Path
    ) -> None:
        for step in ("9", "12", "13.orbax-checkpoint-tmp"):
            shutil.copytree(sample.place, tmp_path / step)
        with ckptkit.open(tmp_path) as checkpoint:
            assert checkpoint.step == 7  # as the state itself says
            assert str(checkpoint.location).endswith("/12")
        with ckptkit.open(sample.place / "state") as checkpoint:
            assert set(checkpoint.arrays) == set(sample.arrays)


class TestFiles(ForeignContract):
    """Zarr 3 in files, several compressed chunks in each."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, checkpoints: Path) -> Sample:
        parts = ("_METADATA", "params.embed.embedding/c/*/0", "table/zarr.json", "table/c/*/0")
        return sample_of(checkpoints, "files", *parts)

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """It reads the index of each shard, which is as large as the shards here are."""

    def test_values_of_all_sorts_are_kept(self, sample: Sample) -> None:
        values = {"extra/nested.text": "a/b", "extra/nested.rate": 0.25, "extra/count": 4}
        assert objects(sample.place) == values
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.details["random_keys"] == {"other/key": "threefry2x32"}
            assert checkpoint["other/eight"].info.dtype.name == "float8_e4m3fn"
            assert checkpoint["model/layers.0.bias"].info.dtype.name == "bfloat16"
            assert checkpoint.written_by == "replica=ddp:2,fsdp:2"


@pytest.mark.parametrize("name", ["files2", "database3"])
def test_zarr_2_in_files_and_zarr_3_in_a_database_are_the_same(
    name: str, checkpoints: Path
) -> None:
    sample = sample_of(checkpoints, name)
    with ckptkit.open(sample.place) as checkpoint:
        assert set(checkpoint.arrays) == set(sample.arrays)
        for array, wanted in sample.arrays.items():
            assert same(checkpoint[array][...], wanted), array
    assert ckptkit.diff(sample.place, checkpoints / "files").same


class TestProcesses(BitForBit):
    """Each of two processes wrote a database."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, checkpoints: Path) -> Sample:
        return sample_of(checkpoints, "processes", "_METADATA")

    def test_a_save_that_was_not_finished_is_named(self, sample: Sample, tmp_path: Path) -> None:
        place = tmp_path / "place"
        shutil.copytree(sample.place, place)
        (place / "manifest.ocdbt").unlink()
        with pytest.raises(FormatError, match="database of all processes is missing"):
            ckptkit.open(place)
        (place / "_METADATA").unlink()
        with pytest.raises(FormatError, match="no item with a tree of arrays"):
            ckptkit.open(place)
        place.rename(tmp_path / "7.orbax-checkpoint-tmp")
        with pytest.raises(FormatError, match="not finished"):
            ckptkit.open(tmp_path / "7.orbax-checkpoint-tmp")


def test_a_tree_without_params_is_a_model(checkpoints: Path) -> None:
    sample = sample_of(checkpoints, "bare")
    with ckptkit.open(sample.place) as checkpoint:
        assert set(checkpoint.arrays) == set(sample.arrays)
        for name, wanted in sample.arrays.items():
            assert same(checkpoint[name][...], wanted), name
    assert objects(sample.place) == {"extra/custom_metadata": {"made": "by hand"}}


METADATA = {"zarr": {"compressor": {"id": "zstd"}}, "zarr3": {}}


def written(
    place: Path,
    leaves: Mapping[str, npt.NDArray[Any]],
    *,
    database: Mapping[str, Any] | None = None,
    driver: str = "zarr",
    metadata: Mapping[str, Any] | None = None,
    chunk: int = 4,
    says_zeros: bool = True,
    lacks_zeros: bool = False,
) -> Path:
    """An item as Orbax writes it, by the library that does so for Orbax."""
    place.mkdir(parents=True, exist_ok=True)
    tree = {}
    for name, value in leaves.items():
        store: Any = {"driver": "file", "path": f"{place}/{name}/"}
        if database is not None:
            base = f"file://{place}/"
            store = {"driver": "ocdbt", "base": base, "config": database, "path": f"{name}/"}
        grid = tensorstore.ChunkLayout.Grid(shape=[min(chunk, n) for n in value.shape])
        layout = tensorstore.ChunkLayout(write_chunk=grid)
        spec = {"driver": driver, "kvstore": store, "metadata": metadata or METADATA[driver]}
        spec["store_data_equal_to_fill_value"] = not lacks_zeros
        how: Any = {
            "create": True,
            "dtype": value.dtype,
            "shape": value.shape,
            "chunk_layout": layout,
        }
        if lacks_zeros:
            how["fill_value"] = 0
        tensorstore.open(spec, **how).result().write(value).result()
        key = [{"key": node, "key_type": 2} for node in name.split(".")]
        tree[name] = {
            "key_metadata": key,
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    said = {"tree_metadata": tree, "use_ocdbt": database is not None}
    said["store_array_data_equal_to_fill_value"] = says_zeros
    (place / "_METADATA").write_text(json.dumps(said))
    return place


def numbers(*shape: int, dtype: str = "float32") -> npt.NDArray[Any]:
    return np.random.default_rng(0).integers(1, 99, shape).astype(dtype)


def shards(*codecs: Any, at: str = "end") -> dict[str, Any]:
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}, *codecs]
    how = {"chunk_shape": [2, 2], "codecs": inner, "index_location": at}
    return {"codecs": [{"name": "sharding_indexed", "configuration": how}]}


ZSTD = {"name": "zstd", "configuration": {"level": 1}}
OLD_KEYS = {"name": "v2", "configuration": {"separator": "."}}


@pytest.mark.parametrize("database", [None, {"max_inline_value_bytes": 0}])
@pytest.mark.parametrize(
    ("driver", "metadata"),
    [
        ("zarr", {"compressor": {"id": "zstd", "level": 1}}),
        ("zarr", {"compressor": None, "dimension_separator": "/"}),
        ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}),
        ("zarr3", {"chunk_key_encoding": OLD_KEYS, "codecs": [ZSTD]}),
        ("zarr3", shards(ZSTD)),
        ("zarr3", shards(ZSTD, at="start")),
        ("zarr3", shards()),
    ],
)
def test_chunks_are_read_however_they_are_stored(
    database: Mapping[str, Any] | None, driver: str, metadata: Mapping[str, Any], tmp_path: Path
) -> None:
    """Those at the ends of uneven dims too, and in any store."""
    array = numbers(7, 10)
    place = written(
        tmp_path, {"params.w": array}, database=database, driver=driver, metadata=metadata
    )
    store = MemoryStore(Location.parse(f"memory://{tmp_path.name}-{driver}"))
    for file in (path for path in place.rglob("*") if path.is_file()):
        store.put(str(file.relative_to(place)), file.read_bytes())
    for where in (place, store):
        with ckptkit.open(where) as checkpoint:
            assert same(checkpoint["model/w"][...], array)
            assert same(checkpoint["model/w"][3:7, 5], array[3:7, 5])
    assert not ckptkit.verify(place)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"compression": None, "max_inline_value_bytes": 3},
        {"max_decoded_node_bytes": 200, "max_inline_value_bytes": 40},
        {"max_decoded_node_bytes": 200, "compression": None, "version_tree_arity_log2": 1},
    ],
)
def test_a_database_has_what_tensorstore_finds_in_it(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """In trees of several levels, of many versions, and after something was deleted."""
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/top/", "config": config}
    database = tensorstore.KvStore.open(spec).result()
    for version in range(20):
        with tensorstore.Transaction() as change:
            for number in range(version * 30):
                key = f"layers.{number % 97}.kernel/{number}"
                database.with_transaction(change)[key] = bytes([version]) * (number % 90)
    for number in range(0, 97, 5):
        gone = tensorstore.KvStore.KeyRange(f"layers.{number}.", f"layers.{number}/")
        database.delete_range(gone).result()
    store = ckptkit.open_store(tmp_path)
    folder = Folder(store, {it.key: it for it in store.list("")})
    found = read_database(folder, "top/")
    wanted = {key.decode(): database[key] for key in database.list().result()}
    assert dict(zip(found, read_places(folder, [*found.values()]), strict=True)) == wanted


@pytest.mark.parametrize(
    ("driver", "metadata", "key"), [("zarr", None, r"0\.0"), ("zarr3", shards(ZSTD), "c/0/0")]
)
def test_zeros_that_were_left_out_are_told_from_what_is_missing(
    driver: str, metadata: Mapping[str, Any] | None, key: str, tmp_path: Path
) -> None:
    array = np.zeros((6, 4), np.float32)
    array[5, 3] = 1
    for place, database, says_zeros in (
        ("files", None, False),
        ("whole", {}, True),
        ("older", {}, False),
    ):
        written(
            tmp_path / place,
            {"params.w": array},
            database=database,
            driver=driver,
            metadata=metadata,
            lacks_zeros=True,
            says_zeros=says_zeros,
        )
    with ckptkit.open(tmp_path / "older") as checkpoint:
        assert same(checkpoint["model/w"][...], array)
    for name in ("files", "whole"):
        with pytest.raises(FormatError, match=rf"params\.w/{key}: a chunk is missing"):
            ckptkit.open(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"compressor": {"id": "gzip", "level": 1}}, "of a kind that is not read here.*gzip"),
        ({"filters": [{"id": "delta"}]}, "of a kind that is not read here"),
        ({"order": "F"}, "of a kind that is not read here"),
        ({"dtype": "int4"}, "smaller than a byte"),
        ({"dtype": ">f4"}, "big-endian"),
        ({"dtype": "<U4"}, "arrays of text"),
        ({"dtype": 3}, "not the metadata of an array"),
        ({"shape": [7]}, "other dims"),
        ({"shape": [1 << 50, 10]}, "too many chunks"),
        ({"shape": [70, 10]}, "a chunk is missing"),
        ({"chunks": [0, 4]}, "must be from 1"),
        ({"chunks": [8, 4]}, "compressed bytes that are damaged"),
        ({"chunks": [1 << 40, 1 << 20]}, "larger than|damaged|too large"),
        ({"chunks": None}, "must be a list"),
        ({"compressor": None}, "not as long as it has to be"),
    ],
)
def test_metadata_of_an_array_that_lies_is_refused(
    change: Mapping[str, Any], what: str, tmp_path: Path
) -> None:
    place = written(tmp_path, {"params.w": numbers(7, 10)})
    file = place / "params.w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(change)))
    with pytest.raises(CkptkitError, match=what) as caught:
        read_all(place)
    assert str(place) in str(caught.value)


@pytest.mark.parametrize(
    ("codecs", "what"),
    [
        ([{"name": "transpose", "configuration": {"order": [1, 0]}}], "not read here"),
        ([{"name": "bytes", "configuration": {"endian": "big"}}], "not read here"),
        ([], "not the metadata of an array"),
    ],
)
def test_codecs_that_are_not_read_are_named(codecs: list[Any], what: str, tmp_path: Path) -> None:
    place = written(tmp_path, {"params.w": numbers(4, 4)}, driver="zarr3")
    file = place / "params.w" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"codecs": codecs}))
    with pytest.raises(FormatError, match=what):
        ckptkit.open(place)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("tree_metadata", None, "not the metadata of a tree"),
        ("tree_metadata", {"w": 3}, "not the metadata of a tree"),
        ("tree_metadata", {"w": {"key_metadata": [{}]}}, "not the metadata of a tree"),
        ("tree_metadata", {}, "no tensor is in the checkpoint"),
        ("use_ocdbt", True, "database of all processes is missing"),
    ],
)
def test_metadata_of_a_tree_that_lies_is_refused(
    key: str, value: Any, what: str, tmp_path: Path
) -> None:
    place = written(tmp_path, {"params.w": numbers(4, 4)})
    file = place / "_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(FormatError, match=what):
        ckptkit.open(place)
    file.write_text("[]")
    with pytest.raises(FormatError, match="not the metadata of Orbax"):
        ckptkit.open(place)


MESH = {"sharding_type": "NamedSharding", "shape": [2, 1, 3], "axis_names": ["a", "one", "model"]}


@pytest.mark.parametrize(
    ("said", "strategy"),
    [
        (MESH | {"partition_spec": [None, "a"]}, "a=tp:2,model=tp:3"),
        (MESH | {"partition_spec": [["one", "a"], "model"]}, "a=fsdp:2,model=tp:3"),
        (MESH | {"partition_spec": [["a", "model"]]}, "a=fsdp:2,model=tp:3"),
        # In another order than placements cut in, uneven, or not what is said of a mesh.
        (MESH | {"partition_spec": [["model", "a"]]}, "an unknown strategy"),
        (MESH | {"partition_spec": ["other"]}, "an unknown strategy"),
        (MESH | {"partition_spec": [None, None, "a"]}, "an unknown strategy"),
        (MESH | {"partition_spec": [["a", "a"]]}, "an unknown strategy"),
        (MESH | {"partition_spec": [], "shape": [4, 1, 1]}, "a=ddp:4"),
        (MESH | {"partition_spec": ["a"], "shape": [4, 1, 1]}, "an unknown strategy"),
        (MESH | {"partition_spec": 3}, "an unknown strategy"),
        (MESH | {"shape": [2]}, "an unknown strategy"),
        ({"sharding_type": "SingleDeviceSharding"}, "single"),
        ({}, "an unknown strategy"),
        ([], "an unknown strategy"),
    ],
)
def test_the_strategy_is_what_the_shardings_say(said: Any, strategy: str, tmp_path: Path) -> None:
    place = written(tmp_path, {"params.w": numbers(6, 6)})
    name = base64.b64encode(b"params.w").decode()
    (place / "_sharding").write_text(json.dumps({name: json.dumps(said)}))
    with ckptkit.open(place) as checkpoint:
        assert checkpoint.written_by == strategy
    (place / "_sharding").write_text('{"?": "{}"}')
    with pytest.raises(FormatError, match="not a name of an array"):
        ckptkit.open(place)


def test_a_time_that_cannot_be_is_not_believed(checkpoints: Path, tmp_path: Path) -> None:
    source = min(checkpoints.rglob("_CHECKPOINT_METADATA")).parent
    place = Path(shutil.copytree(source, tmp_path / "step"))
    said = json.loads((place / "_CHECKPOINT_METADATA").read_text())
    for time in (10**400, -1, "soon"):
        (place / "_CHECKPOINT_METADATA").write_text(
            json.dumps(said | {"commit_timestamp_nsecs": time})
        )
        with ckptkit.open(place) as checkpoint:
            assert checkpoint.arrays


def test_state_of_two_optimizers_is_not_mixed_up(tmp_path: Path) -> None:
    names = ("params.w", "opt_state.0.mu.w", "opt_state.1.mu.w", "opt_state.0.nu.w")
    place = written(tmp_path, {name: numbers(2, 2) for name in (*names, "opt_state.2.w")})
    with ckptkit.open(place) as checkpoint:
        assert set(checkpoint.arrays) == {
            *("model/w", "optimizer/w/nu", "other/opt_state.0.mu.w", "other/opt_state.1.mu.w"),
            "other/opt_state.2.w",
        }


def test_a_state_that_cannot_be_the_parameters_is_not_its(tmp_path: Path) -> None:
    """Optax would broadcast a `mu` of another shape; others may have rows and columns."""
    shapes = {"params.w": (2, 3), **{f"opt_state.0.{it}.w": (3,) for it in ("mu", "nu", "v_col")}}
    place = written(tmp_path, {name: numbers(*shape) for name, shape in shapes.items()})
    with ckptkit.open(place) as checkpoint:
        others = {"other/opt_state.0.mu.w", "other/opt_state.0.nu.w"}
        assert set(checkpoint.arrays) == {"model/w", "optimizer/w/v_col", *others}


@pytest.mark.parametrize("kind", ["bucket", "gcs_bucket"])
@pytest.mark.parametrize("name", ["manager", "files", "processes"])
def test_one_in_a_bucket_is_the_same(
    kind: str, name: str, checkpoints: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    sample = sample_of(checkpoints, name)
    store = ckptkit.open_store(f"{bucket.url}/step", bucket.options)
    for file in (path for path in sample.place.rglob("*") if path.is_file()):
        store.put(str(file.relative_to(sample.place)), file.read_bytes())
    with ckptkit.open(store) as checkpoint:
        assert set(checkpoint.arrays) == set(sample.arrays)
        for array, wanted in sample.arrays.items():
            assert same(checkpoint[array][...], wanted), array
    ckptkit.reshard(store, tmp_path, to="fsdp:2", memory="192MiB", replicate_unknown=True)
    assert ckptkit.diff(tmp_path, sample.place).same


def test_a_changed_database_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """With checksums that were made to fit, so that what reads the fields has to find it."""
    config = {"compression": None, "max_decoded_node_bytes": 400, "max_inline_value_bytes": 40}
    written(tmp_path, {f"params.{n}": numbers(9, 2) for n in range(6)}, database=config)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    places = [(p, at, end) for p, data in whole.items() for at, end in nodes(data)]
    assert len(places) > 4
    draw = random.Random(0)
    refused = 0
    for _ in range(500):
        path, begin, end = draw.choice(places)
        data = bytearray(whole[path])
        for _ in range(draw.choice((1, 1, 4))):
            data[draw.randrange(begin + 12, end - 4)] = draw.choice(
                (0, 1, 127, 255, draw.randrange(256))
            )
        crc = google_crc32c.value(bytes(data[begin : end - 4]))
        data[end - 4 : end] = crc.to_bytes(4, "little")
        path.write_bytes(data)
        try:
            ckptkit.open(tmp_path).close()
        except CkptkitError:
            refused += 1
        path.write_bytes(whole[path])
    assert refused > 50
    path, begin, end = places[0]
    path.write_bytes(whole[path][: begin + 20] + b"\xff" + whole[path][begin + 21 :])
    with pytest.raises(FormatError, match="checksum"):
        ckptkit.open(tmp_path)


def nodes(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the manifest, or nodes of a tree, are in a file of a database."""
    for magic in (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"):
        at = data.find(magic)
        while at >= 0:
            yield at, at + int.from_bytes(data[at + 4 : at + 12], "little")
            at = data.find(magic, at + 1)
