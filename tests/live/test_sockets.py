"""Ranks that ask each other at any time: who is answered, at which address, and until when."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

from ckptkit.errors import PeerError
from ckptkit.live.state import sockets
from ckptkit.live.state.sockets import Listener, connect, receive
from ckptkit.live.state.tensors import TensorForm

TOKEN = b"t" * 16


def echo(sock: socket.socket) -> None:
    """Give every byte back."""
    while True:
        sock.sendall(receive(sock, 1))


def test_only_who_knows_the_token_is_answered() -> None:
    listener = Listener("127.0.0.1", TOKEN, echo)
    with connect("127.0.0.1", listener.port, TOKEN, 5) as sock:
        sock.sendall(b"a")
        assert sock.recv(1) == b"a"
    with connect("127.0.0.1", listener.port, b"x" * 16, 5) as sock, suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    listener.close()


def test_a_listener_that_closes_ends_its_connections_and_leaves_no_thread() -> None:
    before = threading.active_count()
    listener = Listener("127.0.0.1", TOKEN, echo)
    with connect("127.0.0.1", listener.port, TOKEN, 5) as sock:
        sock.sendall(b"a")
        assert sock.recv(1) == b"a"
        listener.close()
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        connect("127.0.0.1", listener.port, TOKEN, 5)


WAYS = {"master": "10.0.0.1", "there": "10.0.0.2", "here": "10.0.0.3", "local": "127.0.1.1"}


@pytest.mark.parametrize(
    ("master", "hosts", "expected"),
    [
        ("master", ["here", "there"], "10.0.0.1"),
        ("local", ["here", "there"], "10.0.0.2"),
        ("", ["here", "nowhere", "there"], "10.0.0.2"),
        ("local", ["here", "nowhere"], "10.0.0.3"),
        ("master", ["here", "here"], "10.0.0.1"),
        ("local", ["here"], "127.0.0.1"),
        ("", ["here"], "127.0.0.1"),
    ],
)
def test_servers_listen_where_other_machines_reach_them(
    monkeypatch: pytest.MonkeyPatch, master: str, hosts: list[str], expected: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(sockets, "_address_towards", lambda host: WAYS.get(host, ""))
    assert sockets.own_address(hosts) == expected


def test_an_address_that_only_this_machine_knows_is_not_told_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(PeerError, match="no address of its own that other machines reach"):
        sockets.own_address([socket.gethostname(), "nowhere.invalid"])


def test_a_message_has_its_tensors_as_they_are_and_no_more_than_is_asked_for() -> None:
    one, other = socket.socketpair()
    tensors = [torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T, torch.empty(0, 2)]
    tensors += [torch.tensor(True), torch.arange(40_000.0)]
    value: dict[str | int, Any] = {"a": tensors, 3: (None, 2**70, "é", b"\0")}
    with one, other:
        telling = threading.Thread(target=sockets.tell, args=(one, value))
        telling.start()
        found = sockets.hear(other, 160_013)
        telling.join()
        assert found[3] == value[3]
        for each, mine in zip(found["a"], tensors, strict=True):
            assert (each.dtype, each.shape) == (mine.dtype, mine.shape)
            assert torch.equal(each, mine)
        sockets.tell(one, tensors[:3])
        with pytest.raises(PeerError, match="more tensors than there are"):
            sockets.hear(other, 12)
    with pytest.raises(PeerError, match="no tensor of this protocol"):
        TensorForm.heard(["float32", [-1]])
    with pytest.raises(PeerError, match="no tensor of this protocol"):
        TensorForm.heard(["nn", [1]])
