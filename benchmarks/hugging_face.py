"""A Hugging Face folder read by a training job: by ckptkit.live, and by DCP's own reader."""

from __future__ import annotations

from contextlib import nullcontext
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
from ckptkit.storage.source import LocalSource

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
        """How many bytes this rank asks of the system for a load, were none in the page cache."""
        before = _asked_for()
        with patch.object(LocalSource, "lend", lambda *_, **__: nullcontext()):
            self.load(folder)
        return _asked_for() - before

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


def _asked_for() -> int:
    """The bytes that this process has read until now, from whatever cache they came."""
    line, *_ = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(line.removeprefix("rchar: "))
