"""Bytes between ranks by collectives of torch.distributed, on whichever device these want them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def wire() -> torch.device:
    """Where the backend of the default group wants tensors to be."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found


def bytes_of_first(data: bytes | None, size: int) -> bytes:
    """Rank 0's bytes on every rank of the default group; all of them know how many there are."""
    if data is None:
        tensor = torch.empty(size, dtype=torch.uint8, device=wire())
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(wire())
    dist.broadcast(tensor, src=0)
    return bytes(tensor.cpu().numpy()) if data is None else data
