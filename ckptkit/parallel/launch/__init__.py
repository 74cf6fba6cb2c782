"""Starting the ranks of a job, watching over them, and ending them."""

from __future__ import annotations

from ckptkit.parallel.launch.job import Job, Outcome
from ckptkit.parallel.launch.launching import launch

__all__ = ["Job", "Outcome", "launch"]
