"""torch_checkpointing in any store: `Config(storage_config=CkptkitStorageConfig("s3://…"))`.

What torch_checkpointing calls `tmp_NAME` and renames to `NAME` lies in `NAME` from the start:
no store of objects can rename. `NAME/files/<id>/` has its files as they are, `NAME/sums/<id>/` the
checksums of their blocks. `NAME/commit.msgpack`, which is created last and once, says which id
counts: without it there is no such checkpoint.
"""

from __future__ import annotations

from ckptkit.plugins.torch_checkpointing.storage import CkptkitStorage, CkptkitStorageConfig

__all__ = ["CkptkitStorage", "CkptkitStorageConfig"]
