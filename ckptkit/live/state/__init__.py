"""What one rank has of a job: its place among the ranks, and tensors with their layouts."""

from __future__ import annotations
