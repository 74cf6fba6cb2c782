"""torch_checkpointing in any store: `Config(storage_config=CkptkitStorageConfig("s3://…"))`.

What torch_checkpointing calls `tmp_NAME` and renames to `NAME` lies in `NAME` from the start:
no store of objects can rename. `NAME/files/<id>/` has its files as they are, `NAME/sums/<id>/` the
checksums of their blocks. `NAME/commit.msgpack`, which is created last and once, says which id
counts: without it there is no such checkpoint.
"""

from __future__ import annotations

from ckptkit.plugins.framework import Framework

_FRAMEWORK = Framework("torch_checkpointing", "0.1", "torch-checkpointing")
_base = _FRAMEWORK.module("torch_checkpointing.storage.base_storage")
_writer = _FRAMEWORK.module("torch_checkpointing.checkpoint_writer")
_FRAMEWORK.private(_writer, "DEFAULT_TEMP_DIR_PREFIX")
_FRAMEWORK.private(_base.StorageConfig, "create_storage")
# What it calls otherwise it would not find in ours.
for _name, *_takes in (
    ("stream_read", "path", "read_args"),
    ("get_write_stream", "path", "data"),
    ("write", "path", "data"),
    ("mkdir", "path", "recursive"),
    ("rename", "src_path", "dst_path", "is_directory", "background_cleanup"),
    *((name, "path") for name in ("stream_write", "delete", "rmdir", "ls", "exists")),
    *((name, "path") for name in ("getsize", "isdir", "remap_path")),
):
    _FRAMEWORK.private(_base.Storage, _name, _takes)

# Only what is known to be there is imported.
from ckptkit.plugins.torch_checkpointing.storage import (  # noqa: E402
    CkptkitStorage,
    CkptkitStorageConfig,
)

__all__ = ["CkptkitStorage", "CkptkitStorageConfig"]
