"""torch_checkpointing in any store: `Config(storage_config=CkptkitStorageConfig("s3://…"))`.

What torch_checkpointing calls `tmp_NAME` and renames to `NAME` lies in `NAME` from the start:
no store of objects can rename. `NAME/files/<id>/` has its files as they are, `NAME/sums/<id>/` the
checksums of their blocks. `NAME/commit.msgpack`, which is created last and once, says which id
counts: without it there is no such checkpoint.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from ckptkit.checkpoint.places import described, store_at
from ckptkit.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.foreign.readers.torch_save import FILES, RECORD, RECORD_KIND, SUMS
from ckptkit.format.encoding import seal, unseal
from ckptkit.live.state.ranks import current_world
from ckptkit.model.document import Fields
from ckptkit.plugins import Framework
from ckptkit.plugins.torch_checkpointing_streams import (
    BLOCK,
    SUMS_KIND,
    ReadingStream,
    WritingStream,
)
from ckptkit.storage import Store

Framework("torch_checkpointing", "0.1", "torch-checkpointing").check(
    {
        "torch_checkpointing.checkpoint_writer": ["DEFAULT_TEMP_DIR_PREFIX"],
        "torch_checkpointing.storage.base_storage": [
            "StorageConfig.create_storage",
            # What it calls otherwise it would not find in ours.
            "Storage.stream_read(path, read_args)",
            "Storage.get_write_stream(path, data)",
            "Storage.write(path, data)",
            "Storage.mkdir(path, recursive)",
            "Storage.rename(src_path, dst_path, is_directory, background_cleanup)",
            *(f"Storage.{name}(path)" for name in ("stream_write", "delete", "rmdir", "ls")),
            *(f"Storage.{name}(path)" for name in ("exists", "getsize", "isdir", "remap_path")),
        ],
    }
)

# Only what is known to be there is imported.
from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX as BEFORE
from torch_checkpointing.storage.base_storage import Storage, StorageConfig

__all__ = ["CkptkitStorage", "CkptkitStorageConfig"]

_MOST = 1 << 30


@dataclass
class CkptkitStorageConfig(StorageConfig):
    """Where the checkpoints are: `location` is a path or a URL, and a checkpoint's id is a name
    below it, such as `step-1000`.
    """

    location: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    """How to reach an object store, as `ckptkit.open` takes them."""
    temp_dir_prefix: str = BEFORE
    """What `CheckpointWriterConfig` is told under this name."""

    def create_storage(self) -> CkptkitStorage:
        return CkptkitStorage(self)

    def job(self) -> Job:
        """What the ranks of this job write under."""
        if "_job" not in self.__dict__:
            mine, world = secrets.token_hex(8), current_world()
            if world.rendezvous is not None:
                # The store may outlive the ranks: fewer must not take the files of more for theirs.
                key = f"ckptkit/torch_checkpointing/{world.size}"
                mine = world.rendezvous.compare_set(key, "", mine).decode()
            self.__dict__["_job"] = Job(mine, is_alone=world.rendezvous is None)
        job: Job = self.__dict__["_job"]
        return job

    def __getstate__(self) -> dict[str, Any]:
        # The process that saves in the background is in no process group: it cannot ask.
        self.job()
        return self.__dict__


class Job(NamedTuple):
    """The ranks that write a checkpoint together."""

    id: str
    """No other job has it."""
    is_alone: bool
    """No process group says whether there are other ranks."""


class Commit(NamedTuple):
    """What makes a checkpoint exist: the id of its files, and how large each is."""

    id: str
    files: Mapping[str, int]


class _At(NamedTuple):
    """Where a path of torch_checkpointing leads."""

    key: str
    checkpoint: str = ""
    """The checkpoint that it is in, or is all of, and which is not committed yet."""
    name: str = ""
    """In that."""
    sums: str = ""
    """Where its checksums are then."""


class CkptkitStorage(Storage):
    """A storage of torch_checkpointing over any store of ckptkit."""

    def __init__(self, config: CkptkitStorageConfig) -> None:
        self._config = config
        self._store: Store = store_at(config.location, config.storage_options or None)
        self._commits: dict[str, Commit] = {}

    # Names.

    def _at(self, path: Path) -> _At:
        text, root = str(path), str(PurePosixPath(str(self._store.location)))
        key = text.removeprefix(root).removeprefix("/") if text.startswith(f"{root}/") else text
        key = "" if text in (root, ".") else key
        if key.startswith("/") or (key == text and ":/" in text):
            raise UsageError(
                "not below the location of the storage",
                where=str(self._store.location),
                value=text,
                hint="name a checkpoint by what comes after that: manager.save('step-1000', …)",
            )
        nodes, before = key.split("/"), self._config.temp_dir_prefix
        for number, node in enumerate(nodes):
            name = node.removeprefix(before)
            if name in (node, ""):
                continue
            if self._committed(_At("/".join(nodes[:number]))):
                break
            if name.startswith(before):
                raise UsageError(
                    f"the name of a checkpoint must not begin with {before}",
                    value=text,
                )
            checkpoint, inside = "/".join([*nodes[:number], name]), "/".join(nodes[number + 1 :])
            key, sums = (
                "/".join(filter(None, [checkpoint, folder, self._config.job().id, inside]))
                for folder in (FILES, SUMS)
            )
            return _At(key, checkpoint, inside, sums)
        return _At(key)

    def _committed(self, at: _At, *, anew: bool = False) -> tuple[str, Commit, str] | None:
        """The committed checkpoint that a path is, or is in, and the name in that."""
        if at.checkpoint:
            return None
        nodes = at.key.split("/") if at.key else []
        folders = {"/".join(nodes[:n]): "/".join(nodes[n:]) for n in range(len(nodes), 0, -1)}
        known = [] if anew else [folder for folder in folders if folder in self._commits]
        for folder in known or folders:
            if commit := self._commits[folder] if known else self._read_commit(folder):
                return folder, commit, folders[folder]
        return None

    def _read_commit(self, checkpoint: str) -> Commit | None:
        self._commits.pop(checkpoint, None)
        key = f"{checkpoint}/{RECORD}"
        try:
            data = self._store.read_whole(key, _MOST)
        except NotFoundError:
            return None
        doc = self._unsealed(RECORD_KIND, data, key)
        files = doc.any("files")
        if not isinstance(files, dict) or not all(
            type(name) is str and type(size) is int and size >= 0 for name, size in files.items()
        ):
            raise FormatError(
                "not a list of files with their sizes", where=described(self._store, key)
            )
        self._commits[checkpoint] = Commit(doc.text("id"), files)
        return self._commits[checkpoint]

    def _unsealed(self, kind: str, data: bytes, key: str) -> Fields:
        where = described(self._store, key)
        try:
            return Fields(unseal(kind, data, where), where)
        except FormatError as error:
            error.hint = "the checkpoint is damaged: load another"
            raise

    def _is_begun(self, key: str) -> bool:
        """Whether there is nothing but what saves have left that were never committed."""
        names = set(self._store.children(key)) if key else set()
        return bool(names) and names <= {FILES, SUMS}

    # Writing.

    def stream_write(self, path: Path) -> WritingStream:
        return self.get_write_stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> WritingStream:
        at = self._at(path)
        if at.checkpoint:
            if self._read_commit(at.checkpoint):
                raise self._exists(at.checkpoint)
            return WritingStream(self._store, at.key, at.sums, data)
        self._refuse_committed(at)
        return WritingStream(self._store, at.key, "", data)

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 — torch_checkpointing's
        """Nothing to make; but a checkpoint of that name is refused before the work, not after."""
        at = self._at(path)
        if at.checkpoint:
            names = set(self._store.children(at.checkpoint))
            if not names <= {FILES, SUMS}:
                raise self._exists(at.checkpoint)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,  # noqa: FBT001, FBT002 — torch_checkpointing's
        background_cleanup: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        source, target = self._at(src_path), self._at(dst_path)
        if source.checkpoint and not source.name and source.checkpoint == target.key:
            self._commit(target.key)
            return
        if is_directory and not source.checkpoint:
            prefix = src_path.name.removesuffix(dst_path.name)
            raise UsageError(
                "only all of a checkpoint is renamed, and it was not written as one",
                where=described(self._store, target.key),
                value=source.key,
                hint="CheckpointWriterConfig and the storage have to be told one prefix: "
                f"CkptkitStorageConfig(…, temp_dir_prefix={prefix!r})",
            )
        if source.checkpoint or target.checkpoint or self._committed(source):
            raise StorageError(
                "only all of a checkpoint is renamed, and to its own name",
                where=described(self._store, target.key),
                value=source.key,
            )
        self._refuse_committed(target)
        if self._store.children(target.key) and not self._is_file(target.key):
            raise self._exists(target.key)
        with self.stream_read(src_path) as found, self.stream_write(dst_path) as stream:
            stream.write(found.readall())
        self._store.delete([source.key])

    def _commit(self, checkpoint: str) -> None:
        """Let what this job has written be the checkpoint, and free what others have left."""
        (mine, is_alone), others = self._config.job(), list[str]()
        sizes: dict[str, int] = {}
        summed, foreign = set[str](), set[str]()
        for stored in self._store.list(checkpoint):
            folder, _, rest = stored.key.removeprefix(f"{checkpoint}/").partition("/")
            of, _, name = rest.partition("/")
            if folder == FILES and of == mine:
                sizes[name] = stored.size
            elif folder == SUMS and of == mine:
                summed.add(name)
            elif folder in (FILES, SUMS) and name:
                others.append(stored.key)
                foreign.add(name)
            else:
                raise self._exists(checkpoint)
        if not sizes or sizes.keys() != summed:
            raise NotFoundError(
                "not all files of the checkpoint have been written",
                where=described(self._store, checkpoint),
                value=sorted(sizes.keys() ^ summed)[:3],
            )
        if is_alone and (unknown := sorted(foreign - sizes.keys())):
            raise UsageError(
                "files of other processes are there, which are in no process group with this one",
                where=described(self._store, checkpoint),
                value=unknown[:3],
                hint="call torch.distributed.init_process_group() on all ranks before the first "
                f"save; storage.rmdir(Path({checkpoint!r})) frees what a job that died has left",
            )
        fields = {"id": mine, "time": time.time(), "files": sizes}
        try:
            key = f"{checkpoint}/{RECORD}"
            self._store.put(key, seal(RECORD_KIND, fields), exclusive=True)
        except AlreadyExistsError as error:
            # Of a request that was sent again the first may have done it.
            done = self._read_commit(checkpoint)
            if done is None or done.id != mine:
                raise self._exists(checkpoint) from error
        self._store.delete(others)

    def _exists(self, key: str) -> AlreadyExistsError:
        found = AlreadyExistsError(
            "something is there already",
            where=described(self._store, key),
            hint="choose another name, or delete it first: storage.rmdir(…)",
        )
        found.errno = errno.ENOTEMPTY
        return found

    def _refuse_committed(self, at: _At) -> None:
        if found := self._committed(at):
            raise self._exists(found[0])

    def delete(self, path: Path) -> None:
        at = self._at(path)
        if at.checkpoint:
            self._store.delete([at.sums, at.key])
            return
        self._refuse_committed(at)
        self._store.size(at.key)  # as files do: what is not there cannot be deleted
        self._store.delete([at.key])

    def rmdir(self, path: Path) -> None:
        at = self._at(path)
        keys = [stored.key for stored in self._store.list(at.checkpoint or at.key)]
        if at.checkpoint:
            keys = [key for key in keys if key.startswith((f"{at.key}/", f"{at.sums}/"))]
        if not keys:
            raise NotFoundError("no such folder", where=described(self._store, at.key))
        # What says that there is a checkpoint goes before anything of it.
        self._store.delete(sorted(keys, key=lambda key: not key.endswith(f"/{RECORD}")))
        self._commits.clear()

    # Reading.

    def stream_read(self, path: Path, read_args: Any = None) -> ReadingStream:  # noqa: ARG002 — only for files
        at = self._at(path)
        found = self._committed(at)
        if not found:
            return ReadingStream(self._store, at.key, self._store.size(at.key), None)
        checkpoint, commit, name = found
        size = self._size(found)
        key = f"{checkpoint}/{SUMS}/{commit.id}/{name}"
        doc = self._unsealed(SUMS_KIND, self._store.read_whole(key, _MOST), key)
        sums = np.frombuffer(doc.bytes("sums"), "<u4")
        if doc.integer("block") != BLOCK or doc.integer("size") != size:
            raise CorruptionError(
                "not the checksums of this file", where=described(self._store, key)
            )
        key = f"{checkpoint}/{FILES}/{commit.id}/{name}"
        return ReadingStream(self._store, key, size, sums)

    def _size(self, found: tuple[str, Commit, str]) -> int:
        checkpoint, commit, name = found
        if name not in commit.files:
            raise NotFoundError(
                "no such file in the checkpoint",
                where=described(self._store, checkpoint),
                value=name,
            )
        return commit.files[name]

    def getsize(self, path: Path) -> int:
        at = self._at(path)
        if found := self._committed(at):
            return self._size(found)
        return self._store.size(at.key)

    def exists(self, path: Path) -> bool:
        at = self._at(path)
        if at.checkpoint and self._read_commit(at.checkpoint):
            return False
        if self.isdir(path):
            return True
        if found := self._committed(at):
            return found[2] in found[1].files
        return self._is_file(at.key)

    def isdir(self, path: Path) -> bool:
        at = self._at(path)
        if at.checkpoint:
            return bool(self._store.list(at.key)) and not self._is_file(at.key)
        if found := self._committed(at, anew=True):
            return not found[2] or any(name.startswith(f"{found[2]}/") for name in found[1].files)
        if self._is_begun(at.key):
            return False
        return not at.key or (bool(self._store.children(at.key)) and not self._is_file(at.key))

    def _is_file(self, key: str) -> bool:
        try:
            self._store.size(key)
        except NotFoundError:
            return False
        return True

    def ls(self, path: Path) -> list[str]:
        """The names in a folder; of checkpoints those that are committed."""
        at = self._at(path)
        if not self.isdir(path):
            raise NotFoundError("no such folder", where=described(self._store, at.key))
        if found := self._committed(at):
            below = f"{found[2]}/" if found[2] else ""
            inside = [name.removeprefix(below) for name in found[1].files if name.startswith(below)]
            return sorted({name.partition("/")[0] for name in inside})
        names = self._store.children(at.key)
        paths = {name: f"{at.key}/{name}".removeprefix("/") for name in names}
        return [name for name in names if at.checkpoint or not self._is_begun(paths[name])]

    def remap_path(self, path: Path) -> str:
        at = self._at(path)
        if found := self._committed(at):
            checkpoint, commit, name = found
            return described(
                self._store, f"{checkpoint}/{FILES}/{commit.id}/{name}".removesuffix("/")
            )
        return described(self._store, at.key)
