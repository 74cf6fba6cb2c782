"""A Hugging Face folder read by a training job: by ckptkit.live, and by DCP's own reader."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from benchmarks.contender import make_durable
from benchmarks.state import Tensor
from benchmarks.training import Training, filled
from ckptkit.live import load

_FILE_BYTES = 1 << 30


class Model:
    """The parameters of a job as files of safetensors, which `load` fills its model from."""

    def __init__(self, training: Training, tensors: list[Tensor]) -> None:
        self._training = training
        self._tensors = tensors

    def save(self, folder: Path) -> None:
        """Rank 0 writes the whole model, a file at a time."""
        if self._training.rank:
            return
        held: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(self._tensors):
            held[theirs(tensor.name)] = filled(tensor, seed=number)
            is_last = number + 1 == len(self._tensors)
            if is_last or sum(each.nbytes for each in held.values()) > _FILE_BYTES:
                path = folder / f"model-{number:05d}.safetensors"
                save_file(held, path, {"format": "pt"})
                make_durable(path)
                held.clear()

    def load(self, folder: Path) -> None:
        """In place."""
        load(folder, model=self._training.model)

    def read_bytes(self, folder: Path) -> int:
        """How many bytes the device gives this rank for a load."""
        before = _given()
        self.load(folder)
        return _given() - before

    def read_bytes_apart(self, folder: Path) -> int:
        """The same, were this the only rank of its machine."""
        with patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            return self.read_bytes(folder)

    def needed_bytes(self, folder: Path) -> int:  # noqa: ARG002 — as of every question
        """What this rank holds."""
        return self._training.nbytes


class ByDcp(Model):
    """The same files by DCP's reader, into the tensors of the same model."""

    def __init__(self, training: Training, tensors: list[Tensor], threads: int = 1) -> None:
        super().__init__(training, tensors)
        self._threads = threads

    def load(self, folder: Path) -> None:
        """In place."""
        state = {theirs(t.name): self._training.tensors[t.name] for t in self._tensors}
        reader = HuggingFaceStorageReader(str(folder), thread_count=self._threads)
        load_with_dcp(state, storage_reader=reader)


def theirs(name: str) -> str:
    """What a tensor is called in the files."""
    return name.removeprefix("model/")


def _given() -> int:
    """The bytes that a device has read for this process until now."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"])
