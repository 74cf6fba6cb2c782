"""Decisions as pure functions: who writes which chunks, which chunks fill a box, how large
chunks are.
"""

from __future__ import annotations
