"""What a training step holds between forward and backward, under each policy: a table, a chart.

Run: python examples/activation_memory.py
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from activation_chart import Measured, draw
from transformer import Transformer, batch, loss_of

from ckptkit.activation import checkpoint_activations, kept_bytes, peak_bytes

LAYERS = 8


def measure(model: Transformer, policy: str, wanted: list[torch.Tensor]) -> Measured:
    """A few steps."""
    inputs, targets = batch(0)

    def step() -> None:
        model.zero_grad()
        loss_of(model(inputs), targets).backward()

    step()  # warm
    spans = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        spans.append(time.perf_counter() - start)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    same = all(map(torch.equal, gradients, wanted or gradients))
    wanted += [] if wanted else gradients
    kept = kept_bytes(lambda: loss_of(model(inputs), targets))
    return Measured(policy, kept, peak_bytes(step), min(spans), same)


def main() -> None:
    """Measure every policy on a small transformer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chart", type=Path, default=Path("runs/activation_memory.png"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(LAYERS)
    inputs, targets = batch(0)
    gradients: list[torch.Tensor] = []

    def step() -> None:
        loss_of(model(inputs), targets).backward()

    found = [measure(model, "none", gradients)]
    for policy in ("full", "every:2", "selective", "budget: half", "offload"):
        if policy == "budget: half":
            half = f"budget:{found[0].peak // 2}"
            _, undo = checkpoint_activations(model, half, step=step)
        else:
            _, undo = checkpoint_activations(model, policy)
        found.append(measure(model, policy, gradients))
        undo()
    print(f"{'policy':14}{'kept MiB':>10}{'peak MiB':>10}{'ms':>8}  gradients")
    for each in found:
        print(
            f"{each.policy:14}{each.kept / 2**20:10.1f}{each.peak / 2**20:10.1f}"
            f"{each.seconds * 1e3:8.1f}  {'the same' if each.same else 'DIFFERENT'}"
        )
    if find_spec("matplotlib") is None:
        print("no chart: it needs matplotlib (pip install 'ckptkit[chart]')")
    else:
        draw(found, arguments.chart)
        print(f"chart in {arguments.chart}")


if __name__ == "__main__":
    main()
