"""The ways to spread a model and its optimizer over ranks, and what each says of them."""

from __future__ import annotations
