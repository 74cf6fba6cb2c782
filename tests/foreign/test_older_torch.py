"""Folders of `torch.distributed.checkpoint` as torch 2.3 to 2.13 write them. What they pickle was
compared in the sources of all of these.
"""

from __future__ import annotations

import pathlib
import pickle
import shutil
import sys
import zipfile
import zlib
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

import pytest
import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptkit
from ckptkit.errors import FormatError
from tests.foreign.contract import same
from tests.foreign.jobs import network, trained, wanted_of
from tests.foreign.older import VERSIONS, written_by
from tests.foreign.test_dcp import saved
from tests.live.pool import Pool


def holds_what_torch_gathers(place: Path, net: Any, optimizer: Any) -> bool:
    wanted = wanted_of(net, optimizer)
    with ckptkit.open(place) as checkpoint:
        return set(checkpoint.arrays) == set(wanted) and all(
            same(checkpoint[name][...], value) for name, value in wanted.items()
        )


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat optimizer"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_folder_that_a_version_writes_is_read(
    version: str, is_flat: bool, tmp_path: Path
) -> None:
    net, optimizer = trained(network())
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    with written_by(version):
        saved({"model": net.state_dict(), "optimizer": state, "epoch": 3}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    minor = int(version[2:])
    assert ("version" in vars(metadata)) == (minor >= 9)
    assert ("modules" in vars(metadata.storage_meta)) == (minor >= 7)
    told = (tmp_path / "__0_0.distcp").read_bytes()
    assert (b".storage_alignment" in told) == (minor >= 7)
    assert holds_what_torch_gathers(tmp_path, net, optimizer)
    with ckptkit.open(tmp_path) as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
    assert objects["extra/epoch"] == 3
    assert objects["optimizer"][0]["kind"] == "AdamW"


def test_torch_2_3_keeps_whole_what_has_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary without one was an object, and lists within lists were not flat."""
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    net, optimizer = trained(network())
    state = get_optimizer_state_dict(net, optimizer)
    with written_by("2.4"):
        saved({"model": net.state_dict(), "optimizer": state, "extra": {"epoch": 3}}, tmp_path)
    names = pickle.loads((tmp_path / ".metadata").read_bytes()).state_dict_metadata
    assert "extra" in names
    assert "optimizer.param_groups" in names
    assert holds_what_torch_gathers(tmp_path, net, optimizer)
    with ckptkit.open(tmp_path) as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
    assert objects["extra/extra"] == {"epoch": 3}
    assert objects["optimizer"][0]["groups"][0]["options"]["lr"] == 0.01


def test_python_3_13_has_another_module_of_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Python 3.14 another protocol of pickles."""
    saved({"w": torch.arange(3)}, tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.checkpoint_id = tmp_path
    module = cast("Any", ModuleType("pathlib._local"))
    module.PosixPath = pathlib.PosixPath
    monkeypatch.setitem(sys.modules, "pathlib._local", module)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    file.write_bytes(pickle.dumps(metadata, protocol=5))
    assert b"pathlib._local" in file.read_bytes()
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint["model/w"][...].tolist() == [0, 1, 2]


class Nesting(torch.optim.SGD):
    """An optimizer with states inside of states, as Shampoo has them."""

    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                self.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "factors": {0: parameter.detach() * 2, "inner": {"root": place + 1}},
                }


def test_torch_2_10_flattens_states_inside_of_states(tmp_path: Path) -> None:
    net = network()
    optimizer = Nesting(net.parameters(), lr=0.5)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    assert "state.0.weight.factors.0" in state
    with written_by("2.10"):
        saved({"model": net.state_dict(), "optimizer": state}, tmp_path)
    with ckptkit.open(tmp_path) as checkpoint:
        for name, parameter in net.named_parameters():
            found = checkpoint[f"optimizer/{name}/factors%2F0"]
            assert same(found[...], (parameter.detach() * 2).numpy())
            assert found.info.of == f"model/{name}"
        assert len(checkpoint.arrays) == 3 * len(list(net.parameters()))
        assert "optimizer/0.weight/factors" in checkpoint.details["left_out"]


class Deflated(StreamTransformExtension):
    """What an extension is: torch has one for zstd, if a package for it is installed."""

    @staticmethod
    def registry_name() -> str:
        return "stream.deflate"

    @staticmethod
    def from_descriptor(version: str) -> Deflated:
        del version
        return Deflated()

    def get_descriptor(self) -> str:
        return "stream.deflate/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer:
            packer = zlib.compressobj()

            def write(self, data: Any) -> int:
                output.write(self.packer.compress(data))
                return len(memoryview(data))

            def flush(self) -> None:
                pass

            def close(self) -> None:
                output.write(self.packer.flush())

        return cast("IO[bytes]", Writer())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return input


def test_what_an_extension_of_torch_2_7_compressed_is_refused_by_name(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, _extensions=[Deflated()])
    with written_by("2.7"), pytest.warns(match="single process"):
        save({"w": torch.ones(99)}, storage_writer=writer, no_dist=True)
    assert not zipfile.is_zipfile(tmp_path / "__0_0.distcp")
    with pytest.raises(FormatError, match=r"extension of DCP.*stream\.deflate/1"):
        ckptkit.open(tmp_path)


def shared_out(folder: str, scale: float) -> None:
    """Save with torch 2.9 or later without collectives: each rank has metadata of its own."""
    net = network()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    with written_by("2.9"):
        save({"model": net.state_dict()}, checkpoint_id=folder, use_collectives=False)


def test_without_collectives_of_torch_2_9_what_a_larger_job_left_is_no_part_of_it(
    gloo: Pool, tmp_path: Path
) -> None:
    """Torch itself looks at the metadata of the ranks that it loads into, and sees no others."""
    gloo.run(3, shared_out, str(tmp_path), 1.0)
    with ckptkit.open(tmp_path) as checkpoint:
        for name, parameter in network().named_parameters():
            assert same(checkpoint[f"model/{name}"][...], parameter.detach().numpy())
    gloo.run(2, shared_out, str(tmp_path), 2.0)
    with pytest.raises(FormatError, match="parts of the tensor that ranks have overlap"):
        ckptkit.open(tmp_path)
    for path in tmp_path.glob("__2*"):
        path.unlink()
    with ckptkit.open(tmp_path) as checkpoint:
        for name, parameter in network().named_parameters():
            assert same(checkpoint[f"model/{name}"][...], parameter.detach().numpy() * 2)


def test_saves_with_and_without_collectives_in_one_folder_are_refused(tmp_path: Path) -> None:
    """They write the same data files, and each its own metadata, which is then wrong for them."""
    saved({"w": torch.ones(3), "v": torch.zeros(3)}, tmp_path)
    shutil.copy(tmp_path / ".metadata", tmp_path / "__0.metadata")
    with pytest.raises(FormatError, match="two saves are in the folder"):
        ckptkit.open(tmp_path)
