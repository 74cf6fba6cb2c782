"""The engine: writing, committing, reading, checking and keeping steps."""

from __future__ import annotations
