"""ckptkit beside its peers and beside what the machine can do at all; `python -m benchmarks --help`."""

from __future__ import annotations
