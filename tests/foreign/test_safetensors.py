from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

import ckptkit
from ckptkit.errors import CkptkitError, FormatError, UnsupportedTypeError
from tests.foreign.contract import ForeignContract, Sample

Arrays = Mapping[str, npt.NDArray[Any]]
_NAMES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def random(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> npt.NDArray[Any]:
    raw = np.random.default_rng(seed).integers(0, 100, shape)
    return raw.astype(dtype)


def write(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> Path:
    """A file as the format's page describes it, by hand: nothing of ours, nothing of theirs."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        data += array.tobytes()
    return write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def ours(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    return {f"model/{name}": array for name, array in arrays.items()}


class TestOneFile(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        arrays = {
            "wide": random(1, (7, 300_000)),
            "half": random(2, (5, 3), np.float16),
            "brain": random(3, (4, 4), ml_dtypes.bfloat16),
            "eight": random(4, (9,), ml_dtypes.float8_e4m3fn),
            "other_eight": random(5, (3, 3), ml_dtypes.float8_e5m2),
            "flags": random(6, (11,), np.bool_),
            "numbers": random(7, (2, 2, 2), np.int64),
            "waves": random(8, (3,), np.complex64),
            "scalar": random(9, ()),
            "nothing": random(10, (0, 4)),
        }
        path = tmp_path_factory.mktemp("one") / "model.safetensors"
        write(path, arrays, {"format": "pt"})
        return Sample(path, ours(arrays), ("model.safetensors",))


class TestHuggingFaceFolder(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        """What transformers writes, with a config, an index, and files next to the model."""
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
        model = transformers.LlamaForCausalLM(config)
        model.bfloat16()
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder, max_shard_size="20KB")
        arrays = {
            f"model/{name}": tensor.view(torch.uint16).numpy()
            for name, tensor in model.state_dict().items()
        }
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert len(files) > 2
        return Sample(folder, arrays, (*files,))

    def test_the_config_gives_the_rules_their_sizes(self, sample: Sample, tmp_path: Path) -> None:
        ckptkit.reshard(sample.place, tmp_path, to="tp:2")
        assert ckptkit.diff(sample.place, tmp_path).same
        with ckptkit.open(tmp_path) as checkpoint:
            array = checkpoint["model/model.layers.0.self_attn.q_proj.weight"]
            assert array.part(1).boxes[0].offset == (16, 0)


class TestShardsOfDcp(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        """Rank shards as DCP's HuggingFaceStorageWriter names and describes them."""
        folder = tmp_path_factory.mktemp("shards")
        arrays = {"rows": random(1, (10, 6)), "columns": random(2, (6, 10)), "one": random(3, (3,))}
        names = [f"shard-0000{n + 1}-model-00001-of-00001.safetensors" for n in range(2)]
        for rank, name in enumerate(names):
            parts = {
                "rows": arrays["rows"][5 * rank : 5 * rank + 5],
                "columns": np.ascontiguousarray(arrays["columns"][:, 5 * rank : 5 * rank + 5]),
            }
            offsets = {"rows": [5 * rank, 0], "columns": [0, 5 * rank]}
            if rank == 0:
                parts["one"], offsets["one"] = arrays["one"], [0]
            said = {key: {"saved_offsets": value} for key, value in offsets.items()}
            text = {"DCP_SHARDING_INFO": json.dumps(said), "DCP_VERSION": "1.0"}
            write(folder / name, parts, text)
        # Nothing in these files says how many there are: of the last one nobody could miss a thing.
        return Sample(folder, ours(arrays), tuple(names[:1]))

    def test_a_shard_that_is_missing_in_between_leaves_a_hole(self, tmp_path: Path) -> None:
        said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4]}})}
        write(
            tmp_path / "shard-00002-model-00001-of-00001.safetensors", {"w": random(1, (4,))}, said
        )
        with pytest.raises(FormatError, match="no file has this part of the array"):
            ckptkit.open(tmp_path)


def entry(**fields: Any) -> bytes:
    return json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}
    ).encode()


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        (entry(data_offsets=[0, 9]), bytes(8), "past the end of the file"),
        (entry(data_offsets=[0, 2**64]), bytes(8), "must be from 0"),
        (entry(data_offsets=[8, 0]), bytes(8), "past the end of the file"),
        (entry(data_offsets=[0]), bytes(8), "past the end of the file"),
        (entry(data_offsets=[0, True]), bytes(8), "must be an integer"),
        (entry(shape=[3]), bytes(8), "8 bytes are not a tensor"),
        (entry(shape=[-1]), bytes(8), "must be from 0"),
        (entry(shape=[2**40, 2**40], data_offsets=[0, 0]), b"", "0 bytes are not a tensor"),
        (entry(shape="2"), bytes(8), "must be a list of integers"),
        (entry(more=1), bytes(8), "an unknown key"),
        (b'{"w": 3}', b"", "must be a map"),
        (b"[]", b"", "the header is not a map"),
        (b"{", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"w": 1, "w": 2}', b"", "a key is there twice"),
        (b'{"__metadata__": 3}', b"", "not a map"),
    ],
)
def test_a_header_that_lies_is_refused(
    header: bytes, data: bytes, what: str, tmp_path: Path
) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(tmp_path)
    assert str(path) in str(caught.value)


def test_elements_smaller_than_a_byte_are_refused_by_name(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", entry(dtype="F4"), bytes(8))
    with pytest.raises(UnsupportedTypeError, match="F4"):
        ckptkit.open(path)


@pytest.mark.parametrize("length", [0, 1, 2**62])
def test_a_header_longer_than_the_file_is_not_read(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little"))
    with pytest.raises(CkptkitError, match=r"header does not fit|not valid JSON"):
        ckptkit.open(tmp_path)


def test_the_index_says_which_file_counts(tmp_path: Path) -> None:
    new, old = random(1, (3,)), random(2, (3,))
    write(tmp_path / "a.safetensors", {"w": old})
    write(tmp_path / "b.safetensors", {"w": new})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    with ckptkit.open(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint["model/w"][...], new)
    index.unlink()
    with pytest.raises(FormatError, match="in several files"):
        ckptkit.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ({"weight_map": {"w": "gone.safetensors"}}, "a file of the index is missing"),
        ({"weight_map": {"w": "../model.safetensors"}}, "a file of the index is missing"),
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "1 tensors of the index"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"w": 3}}, "must be a string"),
        ([], "no weight_map"),
    ],
)
def test_an_index_of_other_files_is_refused(index: Any, what: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": random(1, (3,))})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=what):
        ckptkit.open(tmp_path)


def test_a_checkpoint_that_changed_has_another_id(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"w": random(1, (3,))})
    first = ckptkit.open(path).save_id
    assert ckptkit.open(path).save_id == first
    write(path, {"w": random(2, (3,))})
    assert ckptkit.open(path).save_id != first


def test_of_numbered_folders_it_is_the_newest(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path / f"checkpoint-{step}" / "model.safetensors", {"w": random(step, (3,))})
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.step == 10
        assert np.array_equal(checkpoint["model/w"][...], random(10, (3,)))


@pytest.mark.parametrize("at", [1 << 50, 1 << 60])
def test_a_shard_far_behind_the_others_costs_no_memory(at: int, tmp_path: Path) -> None:
    said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [at]}})}
    write(tmp_path / "model.safetensors", {"w": random(1, (4,))}, said)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"no file has this part|too large|must be from"):
            ckptkit.open(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_more_dims_than_a_step_may_have_are_refused(tmp_path: Path) -> None:
    for dims in (33, 2000):
        header = entry(shape=[1] * (dims - 1) + [2])
        with pytest.raises(FormatError, match="more than 32 dims"):
            ckptkit.open(write_raw(tmp_path / "model.safetensors", header, bytes(8)))


def test_bytes_that_no_tensor_claims_are_refused(tmp_path: Path) -> None:
    for offsets, size in (([4, 12], 12), ([0, 8], 9), ([1, 9], 9)):
        path = write_raw(tmp_path / "model.safetensors", entry(data_offsets=offsets), bytes(size))
        with pytest.raises(FormatError, match="bytes that are of no tensor"):
            ckptkit.open(path)


def test_a_plain_model_counts_before_its_index_as_in_transformers(tmp_path: Path) -> None:
    new, old = random(1, (3,)), random(2, (3,))
    write(tmp_path / "model.safetensors", {"w": new})
    write(tmp_path / "model-00001-of-00001.safetensors", {"w": old})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    for place, wanted in ((tmp_path, new), (index, old)):
        with ckptkit.open(place) as checkpoint:
            assert np.array_equal(checkpoint["model/w"][...], wanted)


def test_a_plain_model_counts_before_others_without_an_index(tmp_path: Path) -> None:
    others = {"adapter_model.safetensors", "consolidated.safetensors"}
    for name in others:
        write(tmp_path / name, {name: random(1, (3,))})
    write(tmp_path / "model.safetensors", {"w": random(2, (3,))})
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}
        assert checkpoint.details["left_out"].keys() == others


def test_without_an_index_the_names_say_how_many_files_there_are(tmp_path: Path) -> None:
    for number in (1, 3):
        write(
            tmp_path / f"model-0000{number}-of-00003.safetensors", {f"w{number}": random(1, (3,))}
        )
    with pytest.raises(FormatError, match=r"2 of 3 files.*no model-00002-of-00003\.safetensors"):
        ckptkit.open(tmp_path)
    write(tmp_path / "model-00002-of-00003.safetensors", {"w2": random(1, (3,))})
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w1", "model/w2", "model/w3"}


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "folder.safetensors" / "x").write_bytes(b"x")
    with pytest.raises(FormatError, match="no tensor is in"):
        ckptkit.open(tmp_path)


def test_optimizers_in_folders_beside_a_model_are_named(tmp_path: Path) -> None:
    """Which of several is that of the model nothing says; a single one is read with it."""
    write(tmp_path / "model.safetensors", {"w": random(0, (2, 3))})
    for folder in ("optimizer_0", "optimizer_1", "logs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".metadata").touch()
    (tmp_path / "optimizer_2").symlink_to("nowhere")
    with ckptkit.open(tmp_path) as checkpoint:
        left_out = checkpoint.details["left_out"]
    why = "a checkpoint of its own that is not read: name its folder"
    cut = "it has no .metadata: not written whole, or not copied whole"
    assert left_out == {"optimizer_0": why, "optimizer_1": why, "optimizer_2": cut}
    (tmp_path / "optimizer_1" / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"optimizer_0/\.metadata"):
        ckptkit.open(tmp_path)
    (tmp_path / "optimizer_0" / ".metadata").unlink()
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.details["left_out"] == {f"optimizer_{n}": cut for n in range(3)}
    with ckptkit.open(tmp_path / "model.safetensors") as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}
