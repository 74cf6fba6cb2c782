"""The sizes that rules refer to: those of a config.json, and those that are named one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click


def sizes_from(config: str | None, given: tuple[str, ...]) -> dict[str, Any]:
    """What --config and --set say; --set wins."""
    found = _read(config) if config is not None else {}
    for pair in given:
        match = re.fullmatch(r"\s*([A-Za-z_]\w{0,99})\s*=\s*([0-9]{1,18})\s*", pair, re.ASCII)
        if match is None:
            raise click.BadParameter(
                f"{pair!r} is no size: write NAME=N, such as head_dim=128", param_hint="--set"
            )
        found[match[1]] = int(match[2])
    return found


def _read(config: str) -> dict[str, Any]:
    try:
        doc = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"{config}: {error.strerror}", param_hint="--config") from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{config} is no JSON: {error}", param_hint="--config") from error
    if not isinstance(doc, dict):
        raise click.BadParameter(
            f"{config} is no config.json: it holds a {type(doc).__name__}", param_hint="--config"
        )
    return doc
