"""Requests and tensors on a socket: a short JSON document, and the bytes of a tensor."""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.errors import PeerError, UnsupportedTypeError

_LENGTH = struct.Struct("!I")
_MOST = 1 << 20  # bytes of a document
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass(slots=True)
class Deadline:
    """The time until which all of something has to be done."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    def limit(self, sock: socket.socket) -> None:
        """Let the next operation end by then."""
        sock.settimeout(self.left())

    def left(self) -> float:
        """The seconds until then."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def send_document(sock: socket.socket, document: dict[str, Any]) -> None:
    """Send a document."""
    data = json.dumps(document).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_document(sock: socket.socket, deadline: Deadline | None = None) -> dict[str, Any]:
    """Wait for a document."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, deadline))
    if length > _MOST:
        raise PeerError("no document of this protocol", value=length)
    document = json.loads(bytes(receive_exactly(sock, length, deadline)))
    if not isinstance(document, dict):
        raise PeerError("no document of this protocol", value=document)
    return document


def receive_exactly(
    sock: socket.socket, length: int, deadline: Deadline | None = None
) -> memoryview:
    """So many bytes."""
    buffer = memoryview(bytearray(length))
    receive_into(sock, buffer, deadline)
    return buffer


def receive_into(sock: socket.socket, view: memoryview, deadline: Deadline | None = None) -> None:
    """Fill memory; `EOFError` where the other side has ended."""
    done = 0
    while done < len(view):
        if deadline is not None:
            deadline.limit(sock)
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count


def described(tensor: torch.Tensor, *, where: str = "") -> dict[str, Any]:
    """What a tensor is, as a document; only plain memory can be sent."""
    if not is_plain(tensor):
        raise UnsupportedTypeError(
            "only dense tensors can be sent to other ranks",
            where=where,
            value=f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}",
            hint="keep the local part of a DTensor, and the dense form of a sparse one",
        )
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": tensor.device.type,
        "requires_grad": tensor.requires_grad,
    }


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but memory and its shape."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def send_tensor(sock: socket.socket, said: dict[str, Any], flat: torch.Tensor) -> None:
    """Send what a tensor is, and its bytes."""
    send_document(sock, said)
    if flat.numel():
        sock.sendall(_view(flat))


def receive_tensor(
    sock: socket.socket, said: dict[str, Any], deadline: Deadline | None = None
) -> torch.Tensor:
    """The tensor that a document announces, in new memory."""
    tensor = empty_like(said, device="cpu")
    if tensor.numel():
        receive_into(sock, _view(bytes_of(tensor)), deadline)
    if said.get("device") == "cuda":
        tensor = tensor.to("cuda")
    return tensor.requires_grad_(bool(said.get("requires_grad")))


def empty_like(said: dict[str, Any], *, device: str) -> torch.Tensor:
    """Memory for the tensor that a document describes."""
    shape, dtype = said.get("shape"), _DTYPES.get(str(said.get("dtype")))
    if dtype is None or not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise PeerError("no tensor of this protocol", value=said)
    return torch.empty(shape, dtype=dtype, device=device)


def _view(flat: torch.Tensor) -> memoryview:
    array: Any = flat.numpy()
    return memoryview(array)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; its own where they lie in a row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
