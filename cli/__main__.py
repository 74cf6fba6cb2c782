"""`python -m ckptkit.cli`, where `ckpt` is not on the path."""

from __future__ import annotations

from ckptkit_command import main

main()
