"""The version of this package; the format has its own (`ckptkit.format.encoding.VERSION`)."""

from __future__ import annotations

__version__ = "0.1.0"
