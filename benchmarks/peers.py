"""The peers: torch.distributed.checkpoint, safetensors, torch.save; as their documents say."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.contender import make_durable
from benchmarks.state import Part
from ckptkit.plugins.dcp import Reader, Writer

warnings.filterwarnings("ignore", module="torch")

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Dcp:
    """DCP with the default reader and writer: fsync (`sync_files`) is on."""

    tensors: Tensors
    threads: int = 1

    def save(self, folder: Path) -> None:
        """Each rank its shards, and the metadata by rank 0."""
        writer = FileSystemWriter(folder / "dcp", thread_count=self.threads)
        save(dict(self.tensors), storage_writer=writer)

    def load(self, folder: Path) -> None:
        """In place."""
        load(dict(self.tensors), storage_reader=FileSystemReader(folder / "dcp"))


@dataclass(frozen=True, slots=True)
class UnderDcp:
    """DCP with our reader and writer."""

    tensors: Tensors

    def save(self, folder: Path) -> None:
        """A step."""
        save(dict(self.tensors), storage_writer=Writer(folder / "run", step=0, overwrite=True))

    def load(self, folder: Path) -> None:
        """In place, every chunk checked."""
        load(dict(self.tensors), storage_reader=Reader(folder / "run"))


@dataclass(frozen=True, slots=True)
class Safetensors:
    """One file of each rank's own tensors; it neither syncs nor commits."""

    tensors: Tensors
    rank: int
    sync: bool = False

    def save(self, folder: Path) -> None:
        """`save_file`, made durable where `sync`."""
        path = self._path(folder)
        save_file(dict(self.tensors), path)
        if self.sync:
            make_durable(path)
            make_durable(folder)

    def load(self, folder: Path) -> None:
        """Each tensor into the existing one."""
        with safe_open(self._path(folder), framework="pt") as file:
            for name, tensor in self.tensors.items():
                tensor.copy_(file.get_tensor(name))

    def _path(self, folder: Path) -> Path:
        return folder / f"rank-{self.rank}.safetensors"


@dataclass(frozen=True, slots=True)
class TorchSave:
    """One pickle of each rank's own tensors; it neither syncs nor commits."""

    tensors: Tensors
    rank: int
    sync: bool = False

    def save(self, folder: Path) -> None:
        """`torch.save`, made durable where `sync`."""
        path = self._path(folder)
        torch.save(dict(self.tensors), path)
        if self.sync:
            make_durable(path)
            make_durable(folder)

    def load(self, folder: Path) -> None:
        """Mapped, then each tensor into the existing one."""
        loaded = torch.load(self._path(folder), weights_only=True, mmap=True)
        for name, tensor in self.tensors.items():
            tensor.copy_(loaded[name])

    def _path(self, folder: Path) -> Path:
        return folder / f"rank-{self.rank}.pt"


def join(rank: int, world_size: int, address: str) -> None:
    """Make the process group of the job, as torchrun would."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)


def local_tensors(part: Part) -> dict[str, torch.Tensor]:
    """The arrays of the part as tensors over the same memory."""
    return {
        tensor.name: torch.from_numpy(part.arrays[tensor.name]).view(_DTYPES[tensor.dtype])
        for tensor in part.tensors
    }


def sharded_tensors(part: Part) -> dict[str, torch.Tensor]:
    """The same as DTensors that are cut by rows, or as they are on a single rank."""
    local = local_tensors(part)
    if part.world_size == 1:
        return local
    mesh = init_device_mesh("cpu", (part.world_size,), mesh_dim_names=("fsdp",))
    shapes = {tensor.name: torch.Size(tensor.shape) for tensor in part.tensors}
    return {
        name: DTensor.from_local(
            tensor, mesh, [Shard(0)], shape=shapes[name], stride=_stride(shapes[name])
        )
        for name, tensor in local.items()
    }


def _stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
