"""What carries the messages of a communicator: the few questions it asks."""

from __future__ import annotations

from typing import Protocol

import torch

DEFAULT_TIMEOUT = 600.0

REDUCED = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
"""The dtypes that every transport can add up and compare; all others are widened to one of them."""


class Transport(Protocol):
    """Moves flat, dense tensors on `device` between the ranks of one group.

    A communicator has made sure that all ranks make the same call with fitting sizes, and never
    moves nothing, so an implementation checks neither. What the other ranks do not do within
    `timeout` seconds is a PeerError, and so is their end; never a hang.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    timeout: float

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank passes, in the order of the ranks; these are of any length."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Put the sum, max or min of all ranks in place of a tensor of a dtype of `REDUCED`."""

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Put the bytes of rank `src` in place of those of the other ranks."""

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Give each rank its part, as bytes; get `sizes[rank]` bytes of each rank."""

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Send bytes; return when they may change, which may be when they were received."""

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        """Fill with the next bytes that `src` sends with this tag; or of all, without tags."""

    def split(self, ranks: tuple[int, ...]) -> Transport | None:
        """A transport between some ranks, ascending; None on the others. All ranks call it."""

    def close(self) -> None:
        """Let go of what the transport itself has made."""
