"""DCP over an object store, as its documents say: fsspec's reader and writer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.bucket import Bucket
from benchmarks.peers import Tensors


@dataclass(frozen=True, slots=True)
class DcpToBucket:
    """Through s3fs."""

    tensors: Tensors
    bucket: Bucket
    threads: int = 1

    def save(self, folder: Path) -> None:
        """Each rank its shards, and the metadata by rank 0."""
        writer = FsspecWriter(
            self.bucket.url(folder.name), thread_count=self.threads, **self.bucket.for_s3fs
        )
        save(dict(self.tensors), storage_writer=writer)

    def load(self, folder: Path) -> None:
        """In place."""
        reader = FsspecReader(self.bucket.url(folder.name), **self.bucket.for_s3fs)
        load(dict(self.tensors), storage_reader=reader)
