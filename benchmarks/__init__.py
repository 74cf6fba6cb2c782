"""ckptkit beside its peers and what the machine can do at all; see `python -m benchmarks -h`."""

from __future__ import annotations
