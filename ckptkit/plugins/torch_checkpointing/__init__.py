"""torch_checkpointing in any store: `Config(storage_config=CkptkitStorageConfig("s3://…"))`.

What torch_checkpointing calls `tmp_NAME` and renames to `NAME` lies in `NAME` from the start:
no store of objects can rename. `NAME/files/<id>/` has its files as they are, `NAME/sums/<id>/` the
checksums of their blocks. `NAME/commit.msgpack`, which is created last and once, says which id
counts: without it there is no such checkpoint.
"""

from __future__ import annotations

from ckptkit.plugins.framework import Framework

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
from ckptkit.plugins.torch_checkpointing.storage import (  # noqa: E402
    CkptkitStorage,
    CkptkitStorageConfig,
)

__all__ = ["CkptkitStorage", "CkptkitStorageConfig"]
