"""Draws what `activation_memory.py` has measured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy, and what it costs."""

    policy: str
    kept: int
    """Bytes when the forward has ended."""
    peak: int
    """Bytes at most."""
    seconds: float
    same: bool
    """Whether its gradients are those without it."""


def draw(found: list[Measured], path: Path) -> None:
    """A bar for each policy, and its time above it."""
    import_module("matplotlib").use("Agg")  # an extra
    plt = import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(8, 4))
    places = range(len(found))
    axes.bar(places, [each.peak / 2**20 for each in found], color="#c6d4e6", label="peak")
    axes.bar(places, [each.kept / 2**20 for each in found], color="#2f5d8a", label="after forward")
    for place, each in enumerate(found):
        axes.annotate(
            f"{each.seconds / found[0].seconds:.2f}x",
            (place, each.peak / 2**20),
            ha="center",
            va="bottom",
        )
    axes.set_xticks(places, [each.policy for each in found], rotation=20)
    axes.set_ylabel("MiB of activations")
    axes.set_title("Activations of a step, and its time")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
