"""A Hugging Face folder read by a training job: by ckptkit.live, and by DCP's own reader."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from benchmarks.contender import make_durable
from benchmarks.state import Tensor
from benchmarks.training import Training, filled
from ckptkit.live import load
from ckptkit.storage.source import LocalSource

_FILE_BYTES, _PAGE = 1 << 30, 4096


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
        """How many bytes this rank asks of the system for a load, were none in the page cache."""
        before = _asked_for()
        with patch.object(LocalSource, "lend", lambda *_, **__: nullcontext()):
            self.load(folder)
        return _asked_for() - before

    def needed_bytes(self, folder: Path) -> int:  # noqa: ARG002 — as of every question
        """What this rank holds."""
        return self._training.nbytes

    def paged_bytes(self, folder: Path) -> int:
        """The pages of the files that hold what this rank needs: a disk gives no less."""
        return sum(self._pages_of(path) for path in folder.glob("*.safetensors"))

    def _pages_of(self, path: Path) -> int:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        pages = 0
        for tensor, local in zip(self._tensors, self._training.local, strict=True):
            if theirs(tensor.name) not in header:
                continue
            begin = 8 + length + header[theirs(tensor.name)]["data_offsets"][0]
            size, rows = local.element_size(), math.prod(tensor.shape[:-1])
            row, piece = tensor.shape[-1] * size, local.shape[-1] * size
            if piece == row:  # whole rows, which lie together
                pages += -(-local.nbytes // _PAGE)
                continue
            first = begin + np.arange(rows) * row + self._training.rank * piece
            pages += int(((first + piece - 1) // _PAGE - first // _PAGE + 1).sum())
        return pages * _PAGE


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


def _asked_for() -> int:
    """The bytes that this process has read until now, from whatever cache they came."""
    line, *_ = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(line.removeprefix("rchar: "))
