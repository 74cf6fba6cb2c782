"""The blocks at the borders of parts: collected piece by piece, written as one."""

from __future__ import annotations

import threading

from ckptkit.storage.buffers import AlignedBuffer, BufferPool
from ckptkit.storage.direct import BLOCK


class EdgeBlocks:
    """Blocks that several parts share, of a file of `total` bytes."""

    def __init__(self, total: int, pool: BufferPool) -> None:
        self._total = total
        self._pool = pool
        self._lock = threading.Lock()
        self._blocks: dict[int, AlignedBuffer] = {}
        self._wanted: dict[int, int] = {}

    def add(self, offset: int, piece: memoryview) -> AlignedBuffer | None:
        """Take a piece that lies inside one block; returns the block when that completes it."""
        begin = offset // BLOCK * BLOCK
        with self._lock:
            block = self._blocks.get(begin)
            if block is None:
                block = self._blocks[begin] = self._new(begin)
            block.view[offset - begin : offset - begin + piece.nbytes] = piece
            self._wanted[begin] -= piece.nbytes
            if self._wanted[begin]:
                return None
            del self._wanted[begin]
            return self._blocks.pop(begin)

    def clear(self) -> None:
        """Give back what never became complete."""
        with self._lock:
            for block in self._blocks.values():
                block.give_back()
            self._blocks.clear()

    def _new(self, begin: int) -> AlignedBuffer:
        block = self._pool.take(BLOCK)
        size = self._wanted[begin] = min(BLOCK, self._total - begin)
        # What lies behind the end of the file reaches the disk too, until the file is cut.
        block.view[size:] = bytes(BLOCK - size)
        return block
