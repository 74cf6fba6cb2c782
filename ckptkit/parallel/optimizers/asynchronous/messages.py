"""What workers and servers say to each other over a socket: a few fixed numbers, then bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch

from ckptkit.errors import PeerError

_HEAD = struct.Struct("<BIQ")  # what, from whom, how many bytes follow
TOKEN_BYTES = 16


class Kind(IntEnum):
    """What a message is."""

    HELLO = 0
    PUSH = 1
    PULL = 2
    STATE = 3
    OPTIONS = 4
    LEAVE = 5
    DONE = 6
    FAILED = 7
    STEPS = 8


def send(pipe: socket.socket, kind: Kind, worker: int, parts: Sequence[memoryview] = ()) -> None:
    """Send a message whose bytes lie in several places."""
    pipe.sendall(_HEAD.pack(kind, worker, sum(part.nbytes for part in parts)))
    for part in parts:
        pipe.sendall(part)


def receive(pipe: socket.socket, largest: int) -> tuple[Kind, int, bytearray]:
    """The next message, of a bounded size; EOFError when the other side is gone."""
    kind, worker, length = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    if kind > max(Kind) or length > largest:
        raise PeerError("not a message of a worker or a server", value=(kind, length))
    return Kind(kind), worker, _exactly(pipe, length)


def _exactly(pipe: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = pipe.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type] # an array has the buffer protocol


def with_gradients(gradients: Sequence[torch.Tensor | None]) -> list[memoryview]:
    """Which parameters have a gradient, a byte for each, and the gradients."""
    which = bytes(gradient is not None for gradient in gradients)
    found = [gradient.detach().cpu().contiguous() for gradient in gradients if gradient is not None]
    return [memoryview(which), *(bytes_of(gradient) for gradient in found)]


def gradients_in(data: bytearray, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a message, for parameters alike."""
    which, at = data[: len(like)], len(like)
    found: list[torch.Tensor | None] = []
    for has, parameter in zip(which, like, strict=True):
        found.append(_tensor(data, at, parameter) if has else None)
        at += parameter.nbytes if has else 0
    _check(at, data)
    return found


def tensors_in(data: bytearray, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a message, like some that there are."""
    found, at = [], 0
    for parameter in like:
        found.append(_tensor(data, at, parameter))
        at += parameter.nbytes
    _check(at, data)
    return found


def _tensor(data: bytearray, at: int, like: torch.Tensor) -> torch.Tensor:
    if at + like.nbytes > len(data):
        raise PeerError("a message is too short for its tensors", value=len(data))
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=like.nbytes, offset=at)
    # Numbers begin where they may, and a tensor of them may not begin anywhere.
    return raw.clone().view(like.dtype).view(like.shape)


def _check(at: int, data: bytearray) -> None:
    if at != len(data):
        raise PeerError("a message is too long for its tensors", value=len(data))
