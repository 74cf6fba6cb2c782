from __future__ import annotations

import pickle
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ckptkit
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.live import StateMismatchError, load
from tests.foreign.contract import ForeignContract, Sample, same
from tests.foreign.jobs import as_numpy, network, trained, wanted_of
from tests.foreign.test_torch_file import model
from tests.storage.counting import CountingStore


def saved(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def changed(folder: Path, change: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


class TestOneProcess(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        """All sorts of tensors: what is no view of another one is written as it lies in memory."""
        tensors = model()
        folder = saved({"model": tensors}, tmp_path_factory.mktemp("dcp") / "step_30")
        arrays = {f"model/{name}": as_numpy(tensor) for name, tensor in tensors.items()}
        return Sample(folder, arrays, (".metadata", "__0_0.distcp"))

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """It reads the head of each part, many at a time where they lie near each other."""
        saved({f"w{n}": torch.ones(n, 1 << 19) for n in (1, 2)}, tmp_path / "large")
        saved({f"w{n}": torch.ones(3) for n in range(300)}, tmp_path / "small")
        for name, most_bytes, most_requests in (("large", 50_000, 8), ("small", 1 << 20, 6)):
            store = CountingStore(ckptkit.open_store(tmp_path / name))
            ckptkit.open(store).close()
            assert store.bytes_read < most_bytes
            assert store.operations["read_into"] + store.operations["read"] <= most_requests

    def test_the_step_is_that_of_the_folder(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.step == 30


def test_of_the_folders_of_lightning_the_newest_is_read(tmp_path: Path) -> None:
    for step in (10, 9):
        saved({"w": torch.full((2,), step)}, tmp_path / f"epoch=0-step={step}.ckpt")
    with ckptkit.open(tmp_path) as checkpoint:
        assert (checkpoint.step, checkpoint["model/w"][...].tolist()) == (10, [10, 10])


def test_a_model_with_buffers_has_its_optimizer_beside_it(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    saved({"optimizer": get_optimizer_state_dict(net, optimizer)}, tmp_path / "optimizer_0")
    with ckptkit.open(tmp_path) as checkpoint:
        wanted = wanted_of(net, optimizer)
        assert set(checkpoint.arrays) == set(wanted)
        assert all(same(checkpoint[name][...], value) for name, value in wanted.items())


def test_what_accelerate_writes_is_a_folder_for_the_model_and_one_for_the_optimizer(
    tmp_path: Path,
) -> None:
    net, optimizer = trained(network())
    state = get_optimizer_state_dict(net, optimizer)
    place = tmp_path / "checkpoint-500"
    saved({"model": net.state_dict()}, place / "pytorch_model_fsdp_0")
    saved({"optimizer": state}, place / "optimizer_0")
    torch.save({"last_epoch": 3}, place / "scheduler.pt")
    with ckptkit.open(place) as checkpoint:
        assert checkpoint.step == 500
        wanted = wanted_of(net, optimizer)
        assert set(checkpoint.arrays) == set(wanted)
        assert all(same(checkpoint[name][...], value) for name, value in wanted.items())
        assert all(info.of for info in checkpoint.manifest.arrays if info.role == "optimizer")
    # A link to a folder is a folder; that of an optimizer whose save was interrupted is named.
    (place / "optimizer_0").rename(tmp_path / "elsewhere")
    (place / "optimizer_0").symlink_to(tmp_path / "elsewhere")
    with ckptkit.open(place) as checkpoint:
        assert set(checkpoint.arrays) == set(wanted)
    (tmp_path / "elsewhere" / ".metadata").rename(tmp_path / "metadata")
    with ckptkit.open(place) as checkpoint:
        assert set(checkpoint.arrays) == {name for name in wanted if name.startswith("model/")}
        assert "optimizer_0" in checkpoint.details["left_out"]
    (tmp_path / "metadata").rename(tmp_path / "elsewhere" / ".metadata")
    # Of two models the second would be lost.
    saved({"model": network().state_dict()}, place / "pytorch_model_fsdp_1")
    with pytest.raises(FormatError, match="two folders have this, of two models") as caught:
        ckptkit.open(place)
    assert "pytorch_model_fsdp_1" in caught.value.hint
    with ckptkit.open(place / "pytorch_model_fsdp_1") as checkpoint:
        assert "model/0.weight" in checkpoint.arrays
    (place / "pytorch_model_fsdp_1" / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"pytorch_model_fsdp_1/\.metadata"):
        ckptkit.open(place)
    for number in (0, 1):
        shutil.rmtree(place / f"pytorch_model_fsdp_{number}")
    with pytest.raises(FormatError, match="no tensor is in"):
        ckptkit.open(place)


class Custom:
    pass


def test_objects_are_read_or_named(tmp_path: Path) -> None:
    generator = torch.Generator().get_state()
    state = {
        "model": {"w": torch.ones(3)},
        "scheduler": {"last_epoch": 2, "lrs": [0.1, 0.2]},
        "rng": [{"cpu": generator}],
        "config": Custom(),
        "args": (1, {"states": [torch.ones(2), 3]}),
    }
    with ckptkit.open(saved(state, tmp_path)) as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
        assert objects["extra/scheduler"] == {"last_epoch": 2, "lrs": [0.1, 0.2]}
        assert np.array_equal(checkpoint["other/rng/0/cpu"][...], generator.numpy())
        inside = [name for name in checkpoint.arrays if name.startswith("other/args")]
        assert [checkpoint[name][...].tolist() for name in inside] == [[1.0, 1.0]]
        (left_out,) = checkpoint.details["left_out"].items()
        assert left_out[0] == "config"
        assert "Custom" in left_out[1]


@pytest.mark.parametrize("number", [0, 1])
def test_an_optimizer_of_another_model_is_not_that_of_the_model(
    number: int, tmp_path: Path
) -> None:
    """Its own `load_state_dict` takes over any shape, and the next step fails."""
    net = network()
    optimizer = torch.optim.AdamW(net.named_parameters())
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    saved_state = optimizer.state_dict()
    saved_state["state"][number]["exp_avg"] = torch.ones(3, 2)
    torch.save({"model": net.state_dict(), "optimizer": saved_state}, tmp_path / "a.pt")
    with ckptkit.open(tmp_path / "a.pt") as it:
        assert not [name for name in it.arrays if name.startswith("optimizer/")]
        assert f"other/optimizer/state/{number}/exp_avg" in it.arrays
        assert "has the shape (3, 2), the parameter" in it.details["other_shape"]
    with pytest.raises(StateMismatchError, match="is of another model"):
        load(tmp_path / "a.pt", model=net, optimizer=optimizer)


def test_optimizers_may_have_states_of_other_shapes(tmp_path: Path) -> None:
    net = network()
    optimizer = torch.optim.Adafactor(net.named_parameters())
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    with ckptkit.open(tmp_path / "a.pt") as it:
        assert [name for name in it.arrays if name.endswith("row_var")]
        assert not [name for name in it.arrays if name.startswith("other/")]


@pytest.mark.parametrize("as_names", [False, True])
def test_an_optimizer_that_was_saved_as_it_is_gets_names_of_parameters(
    as_names: bool, tmp_path: Path
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    parameters: Any = net.named_parameters() if as_names else net.parameters()
    optimizer = torch.optim.Adam(parameters)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    with ckptkit.open(saved(state, tmp_path)) as checkpoint:
        for parameter, (name, _) in zip(optimizer.state, net.named_parameters(), strict=True):
            wanted = optimizer.state[parameter]["exp_avg"]
            assert same(checkpoint[f"optimizer/{name}/exp_avg"][...], wanted.numpy())


@pytest.mark.parametrize(
    "inside", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."]
)
def test_a_model_that_was_saved_inside_of_ddp_has_its_own_names(
    inside: str, tmp_path: Path
) -> None:
    net, optimizer = trained(network())
    wrapped: torch.nn.Module = net
    for name in reversed(inside.split(".")[:-1]):
        wrapped = torch.nn.Sequential(OrderedDict([(name, wrapped)]))
    for told in (False, True):
        if told:
            optimizer = torch.optim.AdamW(wrapped.named_parameters(), lr=0.01)
            net(torch.randn(4, 6)).sum().backward()
            optimizer.step()
        state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
        saved(state, tmp_path)
        again = network()
        into = torch.optim.AdamW(again.parameters())
        load(tmp_path, model=again, optimizer=into)
        assert all(map(torch.equal, again.parameters(), net.parameters()))
        assert into.param_groups[0]["lr"] == 0.01


def test_a_child_that_is_called_module_is_no_wrapper(tmp_path: Path) -> None:
    state = {"module.w": torch.ones(2), "scale": torch.ones(1)}
    assert set(ckptkit.open(saved(state, tmp_path)).arrays) == {"model/module.w", "model/scale"}


def test_a_stream_that_is_compressed_is_refused_by_name(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path)

    def compress(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, transform_descriptors=["stream.zstd/1"])

    changed(tmp_path, compress)
    with pytest.raises(FormatError, match=r"stream\.zstd/1"):
        ckptkit.open(tmp_path)


def test_a_part_that_no_file_has_is_a_hole(tmp_path: Path) -> None:
    saved({"w": torch.ones(3), "v": torch.ones(2)}, tmp_path)

    def forget(metadata: Metadata) -> None:
        metadata.storage_data = {
            index: info for index, info in metadata.storage_data.items() if index.fqn != "v"
        }

    changed(tmp_path, forget)
    with pytest.raises(FormatError, match="model/v: no file has this part"):
        ckptkit.open(tmp_path)


def swap(metadata: Metadata) -> None:
    one, other = list(metadata.storage_data)
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]


def elsewhere(**said: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = _StorageInfo(**{**vars(info), **said})

    return change


def of_tensor(**said: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for entry in metadata.state_dict_metadata.values():
            vars(entry).update(said)

    return change


def deep(metadata: Metadata) -> None:
    assert metadata.planner_data
    metadata.planner_data["w"] = (*"x" * 70, "w")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (swap, "the part holds float32 of"),
        (elsewhere(offset=3), "ends at|no file of torch.save"),
        (elsewhere(length=10), "no file of torch.save|longer than"),
        (elsewhere(length=2**40), "a part of it ends at"),
        (elsewhere(offset=-1), "must be from 0"),
        (elsewhere(relative_path="../other"), "a file of the checkpoint is missing"),
        (elsewhere(relative_path=None), "must be a string"),
        (of_tensor(size=torch.Size([1 << 34])), "no file has this part"),
        (of_tensor(size=[1] * 70, chunks=[]), "more than 32 dims|no file has this part"),
        (of_tensor(size=torch.Size([1])), "a part that is not inside of"),
        (of_tensor(size=torch.Size([3, 1])), "a part that is not inside of"),
        (of_tensor(properties=TensorProperties(cast("Any", []))), "elements of a type"),
        (of_tensor(properties=TensorProperties(cast("Any", {}))), "elements of a type"),
        (deep, "more than 64 levels"),
    ],
)
def test_metadata_that_lies_is_refused(
    change: Callable[[Metadata], None], what: str, tmp_path: Path
) -> None:
    saved({"w": torch.ones(3), "v": torch.ones(2)}, tmp_path)
    changed(tmp_path, change)
    with pytest.raises(FormatError, match=what):
        ckptkit.open(tmp_path)


def test_a_save_that_was_interrupted_has_no_metadata(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(FormatError, match="the metadata of the checkpoint is missing"):
        ckptkit.open(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(NotFoundError):
        ckptkit.open(tmp_path)


def test_objects_whose_bytes_are_gone_are_not_left_out(tmp_path: Path) -> None:
    """What is damaged is no object of a class that is not known."""
    for what, state in (("known", {"a": 3}), ("unknown", {"a": Custom()})):
        folder = saved(state, tmp_path / what)
        file = folder / "__0_0.distcp"
        good = file.read_bytes()
        for bad in (bytes(len(good)), good.replace(b"Custom", b"custom")):
            if bad == good:
                continue
            file.write_bytes(bad)
            with pytest.raises(FormatError, match="an object is damaged"):
                ckptkit.open(folder)
        file.write_bytes(good)
        changed(folder, lambda metadata: metadata.storage_data.clear())
        with pytest.raises(FormatError, match="no file has this object"):
            ckptkit.open(folder)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex_numbers_of_halves_are_read_also_from_one_file(tmp_path: Path) -> None:
    halves = torch.arange(8).reshape(4, 2).half()
    state = {"w": torch.view_as_complex(halves)}
    torch.save(state, tmp_path / "one.pt")
    for place in (saved(state, tmp_path / "dcp"), tmp_path / "one.pt"):
        with ckptkit.open(place) as checkpoint:
            assert checkpoint.read("model/w").tobytes() == halves.numpy().tobytes()
