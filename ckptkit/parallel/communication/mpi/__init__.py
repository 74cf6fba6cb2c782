"""torch.distributed over mpi4py: a backend of its own, since torch's wheels have none."""

from __future__ import annotations
