"""One interface to the ranks of a job, and what carries its messages."""

from __future__ import annotations
