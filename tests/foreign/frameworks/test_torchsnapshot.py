from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ckptkit
from ckptkit.errors import CkptkitError, FormatError
from tests.foreign.contract import BitForBit, ForeignContract, Sample
from tests.foreign.frameworks.written import written_by
from tests.storage.counting import CountingStore


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by("torchsnapshot", tmp_path_factory.mktemp("torchsnapshot"))


def sample_of(snapshots: Path, name: str, pattern: str) -> Sample:
    parts = sorted(str(p.relative_to(snapshots / name)) for p in (snapshots / name).glob(pattern))
    assert parts
    with np.load(snapshots / f"{name}.npz") as file:
        return Sample(snapshots / name, dict(file), (".snapshot_metadata", *parts[:3]))


class TestBatched(ForeignContract):
    """Small tensors are in one file."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, snapshots: Path) -> Sample:
        return sample_of(snapshots, "batched", "batched/*")

    def test_the_optimizer_has_the_names_of_its_parameters(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            objects = {item.name: item.value for item in checkpoint.manifest.objects}
            assert checkpoint.written_by == "single"
            assert checkpoint["optimizer/2.bias/exp_avg"].info.of == "model/2.bias"
        (document,) = objects["optimizer"]
        assert document["kind"] == "AdamW"
        assert document["groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert document["groups"][0]["options"]["betas"] == (0.9, 0.999)

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Of a file of torch.save it reads the pickle, and of others nothing."""
        store = CountingStore(ckptkit.open_store(sample.place))
        ckptkit.open(store).close()
        largest = max(path.stat().st_size for path in sample.place.glob("batched/*"))
        read = [name for name in store.operations if name.startswith("read")]
        assert read
        assert store.bytes_read < largest + 20_000


class TestUnbatched(ForeignContract):
    """Each tensor, chunk of one and object is in a file of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, snapshots: Path) -> Sample:
        return sample_of(snapshots, "unbatched", "0/extra/[bhtw]*")

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Of files of torch.save it reads what is more than these small tensors."""

    def test_values_are_kept(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            objects = {item.name: item.value for item in checkpoint.manifest.objects}
        assert objects["extra/extra"] == {
            "epoch": 3,
            "rate": 0.25,
            "name": "a/b",
            "flag": True,
            "raw": b"\x00\xff",
            "pair": (1, 2.5),
            "nothing": None,
            "empty": {},
            "list": [{"deep": [1]}, 4],
            "numbers": {8: "eight"},
        }


class TestSharded(ForeignContract):
    """Each of two ranks has shards of its own, and values of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, snapshots: Path) -> Sample:
        return sample_of(snapshots, "sharded", "batched/*")

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """It reads what an optimizer counts, which is as large as these tensors are."""

    def test_the_strategy_is_told_by_what_each_rank_has(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.written_by == "fsdp:2"
            assert checkpoint["model/2.weight"].part(1).boxes[0].offset == (3, 0)
            assert checkpoint.details["of_each_rank"] == ["mine"]
            assert "mine/rank" in checkpoint.details["of_rank_0"]


class TestReplicated(BitForBit):
    """Each rank wrote a part of what all have."""

    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, snapshots: Path) -> Sample:
        return sample_of(snapshots, "ddp", "replicated/**/*")

    def test_what_is_replicated_is_told_to_be(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.written_by == "ddp:2"


def test_the_yaml_of_older_versions_says_the_same(snapshots: Path, tmp_path: Path) -> None:
    said = json.loads((snapshots / "sharded" / ".snapshot_metadata").read_text())
    for path in (snapshots / "sharded").rglob("*"):
        if path.is_file() and path.name != ".snapshot_metadata":
            target = tmp_path / path.relative_to(snapshots / "sharded")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    # As version 0.1.0 had it before JSON: `yaml.dump(asdict(self), sort_keys=False)`.
    (tmp_path / ".snapshot_metadata").write_text(yaml.safe_dump(said, sort_keys=False))
    assert ckptkit.diff(snapshots / "sharded", tmp_path).same


Manifest = dict[str, Any]


def tensor(location: str, shape: tuple[int, ...] = (2, 3), **more: Any) -> Manifest:
    said = {"type": "Tensor", "location": location, "serializer": "buffer_protocol"}
    return said | {"dtype": "torch.float32", "shape": [*shape], "replicated": False} | more


def written(folder: Path, manifest: Manifest, *, ranks: int = 1, **files: bytes) -> Path:
    """A snapshot by hand."""
    said = {"version": "0.1.0", "world_size": ranks, "manifest": manifest}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".snapshot_metadata").write_text(json.dumps(said))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def model(*, ranks: int = 1, **entries: Manifest) -> Manifest:
    """A manifest in which each rank has these entries of a model."""
    keys = [*entries]
    found: Manifest = {f"{rank}/model": {"type": "dict", "keys": keys} for rank in range(ranks)}
    for rank in range(ranks):
        found |= {f"{rank}/model/{key}": entry for key, entry in entries.items()}
    return found


def test_metadata_that_lost_a_rank_is_refused(snapshots: Path, tmp_path: Path) -> None:
    """The rows of that rank would be missing, and nothing else says how many there were."""
    place = Path(shutil.copytree(snapshots / "sharded", tmp_path / "sharded"))
    said = json.loads((place / ".snapshot_metadata").read_text())
    said["manifest"] = {k: v for k, v in said["manifest"].items() if not k.startswith("1/")}
    (place / ".snapshot_metadata").write_text(json.dumps(said))
    with pytest.raises(FormatError, match="of 2 ranks it has entries of 1"):
        ckptkit.open(place)


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        (("1/model/0.weight",), "model/0.weight"),
        (("1/optimizer/state/2.bias/exp_avg",), "optimizer/state/2.bias/exp_avg"),
        # What is around it is lost with it.
        (("1/optimizer/state/2.bias", "1/optimizer/state"), "optimizer/state/0.weight/exp_avg"),
        (("1/model",), "model/0.weight"),
        (("0/model/2.weight",), "model/2.weight"),
    ],
)
def test_metadata_that_lost_some_entries_of_a_rank_is_refused_by_name(
    lost: tuple[str, ...], name: str, snapshots: Path, tmp_path: Path
) -> None:
    """Without the last rows of a tensor what is left looks like a smaller one."""
    place = Path(shutil.copytree(snapshots / "sharded", tmp_path / "sharded"))
    said = json.loads((place / ".snapshot_metadata").read_text())
    said["manifest"] = {k: v for k, v in said["manifest"].items() if not k.startswith(lost)}
    (place / ".snapshot_metadata").write_text(json.dumps(said))
    with pytest.raises(FormatError, match=f"rank {lost[0][0]} has no entry of it") as caught:
        ckptkit.open(place)
    assert f"{lost[0][0]}/{name}" in str(caught.value)


def test_metadata_that_lost_shards_of_an_entry_is_refused(snapshots: Path, tmp_path: Path) -> None:
    """Nothing tells the shape; but the file of many tensors has bytes that are nobody's then."""
    place = Path(shutil.copytree(snapshots / "sharded", tmp_path / "sharded"))
    whole = (place / ".snapshot_metadata").read_text()
    for rank in (0, 1):
        said = json.loads(whole)
        said["manifest"][f"{rank}/model/0.weight"]["shards"].pop()
        (place / ".snapshot_metadata").write_text(json.dumps(said))
        with pytest.raises(FormatError, match=r"no entry has the bytes|no file has this part"):
            ckptkit.open(place)


def test_a_file_of_a_shard_that_no_entry_names_is_told(tmp_path: Path) -> None:
    """It may be of an older snapshot that was there, so it is not refused."""
    (tmp_path / "sharded").mkdir()
    for name in ("a", "b"):
        (tmp_path / "sharded" / name).write_bytes(bytes(24))
    said = {"offsets": [0, 0], "sizes": [2, 3], "tensor": tensor("sharded/a")}
    written(tmp_path, model(a={"type": "ShardedTensor", "shards": [said]}))
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.details["left_out"] == {"sharded/b": "a file that no entry names"}


def test_a_stage_of_a_pipeline_need_not_have_shards_of_the_other(tmp_path: Path) -> None:
    manifest: Manifest = {}
    data = np.arange(6, dtype=np.float32).tobytes()
    for rank in range(4):
        name = "ab"[rank // 2]
        said = shard([2 * (rank % 2), 0], [2, 3])
        manifest[f"{rank}/model"] = {"type": "dict", "keys": [name]}
        manifest[f"{rank}/model/{name}"] = {"type": "ShardedTensor", "shards": [said]}
    with ckptkit.open(written(tmp_path, manifest, ranks=4, f=data)) as checkpoint:
        assert {n: array.shape for n, array in checkpoint.arrays.items()} == {
            "model/a": (4, 3),
            "model/b": (4, 3),
        }


def test_a_dtensor_is_put_together_and_tells_its_mesh(tmp_path: Path) -> None:
    """As versions after 0.1.0 have it."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    manifest: Manifest = {}
    files = {}
    for rank in range(4):
        row, column = divmod(rank, 2)
        part = whole[:, 3 * column : 3 * column + 3]
        files[f"f{rank}"] = part.tobytes()
        shard = {"offsets": [0, 3 * column], "sizes": [4, 3], "tensor": tensor(f"f{rank}", (4, 3))}
        entry: Manifest = {"type": "DTensor", "shards": [shard] if row == 0 else []}
        entry |= {"mesh": [[0, 1], [2, 3]], "dim_map": [[-1], [1]]}
        manifest[f"{rank}/model"] = {"type": "OrderedDict", "keys": ["w"]}
        manifest[f"{rank}/model/w"] = entry
    with ckptkit.open(written(tmp_path, manifest, ranks=4, **files)) as checkpoint:
        assert np.array_equal(checkpoint["model/w"][...], whole)
        assert checkpoint.written_by == "ddp:2,tp:2"
        assert checkpoint["model/w"].part(3).boxes[0].offset == (0, 3)


def test_parts_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    manifest = {"0/model": {"type": "dict", "keys": ["a"]}, "0/model/a": tensor("a")}
    manifest |= {"1/model": {"type": "dict", "keys": ["b"]}, "1/model/b": tensor("b", (6,))}
    with ckptkit.open(written(tmp_path, manifest, ranks=2, a=data, b=data)) as checkpoint:
        assert {name: array.shape for name, array in checkpoint.arrays.items()} == {
            "model/a": (2, 3),
            "model/b": (6,),
        }
        assert checkpoint.written_by == "an unknown strategy"


def test_what_ranks_have_for_themselves_is_never_taken_for_the_same(tmp_path: Path) -> None:
    """Nothing tells whether it is: but of numbers, which are looked at."""
    manifest: Manifest = {}
    files = {}
    for rank in range(2):
        parts = {"w": (2, 3), "same": (), "other": (1,)}
        files[f"w{rank}"] = np.full(6, rank, np.float32).tobytes()
        files[f"same{rank}"] = np.float32(7).tobytes()
        files[f"other{rank}"] = np.float32(rank).tobytes()
        entries = {name: tensor(f"{name}{rank}", shape) for name, shape in parts.items()}
        manifest |= {
            path: entry
            for path, entry in model(ranks=2, **entries).items()
            if path.startswith(f"{rank}/")
        }
    with ckptkit.open(written(tmp_path, manifest, ranks=2, **files)) as checkpoint:
        assert {name: array[...].ravel()[0] for name, array in checkpoint.arrays.items()} == {
            "model/same": 7,
            "other/model/w/rank.0": 0,
            "other/model/w/rank.1": 1,
            "other/model/other/rank.0": 0,
            "other/model/other/rank.1": 1,
        }
        assert checkpoint.details["of_each_rank"] == ["model"]
        assert checkpoint.written_by == "an unknown strategy"


def without(path: str) -> Callable[[Manifest], Any]:
    return lambda manifest: manifest.pop(path)


def setting(path: str, **fields: Any) -> Callable[[Manifest], Any]:
    return lambda manifest: manifest.setdefault(path, {}).update(fields)


def shards(*said: Any) -> Callable[[Manifest], Any]:
    def change(manifest: Manifest) -> None:
        manifest["0/model/w"] = {"type": "ShardedTensor", "shards": [*said]}

    return change


def shard(offsets: Any, sizes: Any, **more: Any) -> Manifest:
    return {"offsets": offsets, "sizes": sizes, "tensor": tensor("f", (2, 3), **more)}


W = "0/model/w"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without("0/model"), "values are in it, and it is not told"),
        (without(W), "not those of its keys"),
        (setting("0/model", keys=["w", "v"]), "not those of its keys"),
        (setting("0/model", keys=[[]]), "not the keys of a dict"),
        (setting("0/model", type=["dict"]), "must be a string"),
        (setting("0/model/more", type="int", serialized_value="1"), "not those of its keys"),
        (setting("0/list", type="list"), None),
        (setting("0/model", type="list"), "an item of a list is missing"),
        (setting("0/x", type="int", serialized_value="1e9"), "not what torchsnapshot writes"),
        (setting("0/x", type="int", serialized_value="1" * 5000), "not what torchsnapshot writes"),
        (setting("0/x", type="float", serialized_value="AAA="), "not what torchsnapshot writes"),
        (setting("0/x", type="bool", serialized_value="1"), "not what torchsnapshot writes"),
        (setting("0/x", type="unicorn"), "a kind that is not read here.*unicorn"),
        (setting("9/x", type="int", serialized_value="1"), "not a path of a rank"),
        (setting("x", type="int", serialized_value="1"), "not a path of a rank"),
        (setting("0//x", type="int", serialized_value="1"), "not a path of a rank"),
        (setting("0/" + "a/" * 70 + "a", type="list"), "not a path of a rank"),
        (setting(W, location="../f"), "a file of the checkpoint is missing"),
        (setting(W, location=None), "must be a string"),
        (setting(W, shape=[2, 4]), "32 bytes are wanted at 0, and the file has 24"),
        (setting(W, shape=[2, 2]), "16 bytes are wanted at 0, and the file has 24"),
        (setting(W, shape=[1 << 40, 1 << 40]), "bytes are wanted"),
        (setting(W, shape=[-1]), "must be from 0"),
        (setting(W, byte_range=[0, 23]), "24 bytes are wanted"),
        (setting(W, byte_range=[8, 32]), "24 bytes are wanted at 8, and the file has 24"),
        (setting(W, byte_range=[24, 0]), "24 bytes are wanted"),
        (setting(W, byte_range=[0]), "24 bytes are wanted"),
        (setting(W, shape=[13], dtype="torch.bfloat16"), "without the last: it is lost"),
        (setting(W, dtype="torch.qint8"), "elements of a type.*qint8"),
        (setting(W, dtype=[]), "elements of a type"),
        (setting(W, serializer="per_tensor_qtensor"), "per_tensor_qtensor"),
        (setting(W, serializer="torch_save"), "not a zip file"),
        (shards(shard([0, 0], [2, 3]), shard([4, 0], [2, 3])), "no file has this part"),
        (shards(shard([0, 0], [2, 3]), shard([0], [6])), "differ in their number of dims"),
        (shards(shard([0, 0], [3, 2])), r"a part of \(3, 2\) is said to be of \(2, 3\)"),
        (shards(shard([0, 0], [2, 3]), shard([2, 0], [2, 3], dtype="torch.int32")), "dtypes"),
        (shards(shard([1 << 50, 0], [2, 3])), "no file has this part"),
        (shards(3), "must be a map"),
        (lambda manifest: manifest.update({W: 3}), "must be a map"),
    ],
)
def test_metadata_that_lies_is_refused(
    change: Callable[[Manifest], Any], what: str | None, tmp_path: Path
) -> None:
    manifest = model(w=tensor("f"))
    change(manifest)
    place = written(tmp_path, manifest, f=bytes(24))
    if what is None:
        ckptkit.open(place).close()
        return
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(place)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not the metadata"),
        (b"[]", "not the metadata"),
        (b"manifest: [", "neither valid JSON nor valid YAML"),
        (b"[" * 100_000, "neither valid JSON nor valid YAML"),
        (b"{" * 100_000, "not valid JSON"),
        (b"a: &a [1]\nmanifest: [*a, *a]", "an alias, or a value"),
        (b"manifest: {}\nmanifest: {}", "twice"),
        (b"manifest: {? [a] : b}", "neither valid JSON nor valid YAML"),
        (b"manifest: !!python/object/apply:os.system [ls]", "neither valid JSON nor valid YAML"),
        (b"manifest: {}\nworld_size: 0", "must be from 1"),
        (b'{"manifest": {}, "manifest": {}}', "twice"),
        (b"manifest: {}\nworld_size: 1", "no tensor is in the checkpoint"),
    ],
)
def test_a_file_that_is_no_metadata_is_refused(data: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / ".snapshot_metadata").write_bytes(data)
    with pytest.raises(CkptkitError, match=what):
        ckptkit.open(tmp_path)


def test_a_copy_without_hidden_files_is_told_what_it_lacks(tmp_path: Path) -> None:
    for name in ("0", "replicated"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(bytes(24))
    with pytest.raises(FormatError, match="the metadata of the snapshot is missing"):
        ckptkit.open(tmp_path)


def test_an_object_of_a_class_is_named_and_a_damaged_one_refused(
    snapshots: Path, tmp_path: Path
) -> None:
    (whole,) = (snapshots / "unbatched").glob("0/extra/pair")
    manifest = model(w=tensor("f"))
    manifest["0/config"] = {"type": "object", "location": "o", "serializer": "torch_save"}
    place = written(tmp_path, manifest, f=bytes(24), o=whole.read_bytes())
    with ckptkit.open(place) as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
        assert objects == {"extra/config": (1, 2.5)}
    (tmp_path / "o").write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(FormatError, match="cut short"):
        ckptkit.open(place)
