"""The command `ckpt`."""

from __future__ import annotations

import click

import ckptkit


@click.group()
@click.version_option(ckptkit.__version__, prog_name="ckpt")
def main() -> None:
    """Look at, check and move the checkpoints of distributed training runs."""
