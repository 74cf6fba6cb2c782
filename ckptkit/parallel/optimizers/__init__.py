"""What torch's optimizers lack: compressed gradients, asynchronous SGD, elastic training."""

from __future__ import annotations
