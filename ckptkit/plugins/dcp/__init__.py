"""Under `torch.distributed.checkpoint` (DCP): `dcp.save(state, storage_writer=Writer(run, step=7))`
writes an ordinary step, `dcp.load(state, storage_reader=Reader(run))` reads one, whoever wrote it.
"""

from __future__ import annotations

from ckptkit.plugins.dcp.reader import DcpReader as Reader
from ckptkit.plugins.dcp.writer import DcpWriter as Writer

__all__ = ["Reader", "Writer"]
