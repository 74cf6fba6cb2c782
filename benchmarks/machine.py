"""What the numbers were measured on; nothing that names the machine or its folders."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "isal", "torch", "safetensors")


def describe(folder: Path) -> dict[str, Any]:
    """Processor, memory, file system and versions."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "missing"
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "file_system": _file_system(folder),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        **packages,
    }


def in_words(machine: dict[str, Any]) -> str:
    """The same in one sentence."""
    packages = ", ".join(f"{name} {machine[name]}" for name in ("python", *_PACKAGES))
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, "
        f"{machine['file_system']}, Linux {machine['kernel']}; {packages}."
    )


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def _file_system(folder: Path) -> str:
    """The type of the file system with the longest mount point above the folder."""
    mounts = [line.split(" ") for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    above = [(m[1], m[2]) for m in mounts if folder.resolve().is_relative_to(m[1])]
    return max(above, key=lambda mount: len(mount[0]))[1]
