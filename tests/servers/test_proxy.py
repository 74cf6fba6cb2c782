"""The proxy passes on what it should, counts it, and breaks exactly what it was told to break."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

from tests.servers.faults import (
    Answer,
    Delay,
    Fault,
    FlipDownload,
    FlipUpload,
    Hold,
    LoseAnswer,
    ResetDownload,
    ResetUpload,
    Rule,
    Stall,
    Strip,
    Truncate,
    kind,
)
from tests.servers.proxy import Proxy

BODY = bytes(range(256)) * 1000


class Echo(ThreadingHTTPServer):
    """Answers a PUT with its body, a GET with `BODY`, and remembers what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Echo

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "Transfer-Encoding" in self.headers:
            while not body.endswith(b"0\r\n\r\n"):
                body += self.rfile.readline()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, headers, body))
        content = BODY if self.command in ("GET", "HEAD") else body
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _take  # noqa: N815 — http.server's names

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(f"http://127.0.0.1:{echo.server_port}") as running:
        yield running


class Client:
    """One connection to the proxy."""

    def __init__(self, proxy: Proxy) -> None:
        parts = urlsplit(proxy.endpoint)
        self.connection = HTTPConnection(str(parts.hostname), parts.port, timeout=0.5)

    def ask(self, method: str = "GET", path: str = "/b/k", body: bytes = b"") -> bytes:
        self.connection.request(method, path, body or None, {"If-None-Match": "*", "Host": "s3.x"})
        return self.answer().read()

    def answer(self) -> HTTPResponse:
        return self.connection.getresponse()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    made = Client(proxy)
    yield made
    made.connection.close()


def test_what_is_sent_and_answered_goes_through_on_one_connection(
    echo: Echo, proxy: Proxy, client: Client
) -> None:
    assert client.ask() == BODY
    first = client.connection.sock
    assert client.ask("PUT", "/b/k%20?x=1", BODY) == BODY
    assert client.ask("HEAD") == b""
    assert client.ask("GET", "/b?list-type=2") == BODY
    assert client.connection.sock is first
    assert [request[:2] for request in echo.seen][1] == ("PUT", "/b/k%20?x=1")
    assert all(headers["host"] == "s3.x" for _, _, headers, _ in echo.seen)
    assert proxy.counts == {"GET": 1, "PUT": 1, "HEAD": 1, "LIST": 1}
    assert (proxy.bytes_up, proxy.bytes_down) == (len(BODY), 3 * len(BODY))
    proxy.forget()
    assert not proxy.counts


def test_a_client_that_asks_before_it_sends_is_welcomed(echo: Echo, proxy: Proxy) -> None:
    parts = urlsplit(proxy.endpoint)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), 2) as raw:
        raw.sendall(b"PUT /b/k HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 100")
        raw.sendall(b"ok")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    assert "expect" not in echo.seen[0][2]


def test_a_body_in_chunks_goes_through(echo: Echo, proxy: Proxy) -> None:
    parts = urlsplit(proxy.endpoint)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), 2) as raw:
        raw.sendall(b"POST /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"3\r\nabc\r\n0\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    assert proxy.bytes_up == len(b"3\r\nabc\r\n0\r\n\r\n")


@pytest.mark.parametrize(("status", "code"), [(503, b"SlowDown"), (429, b"TooMany"), (500, b"Int")])
def test_answers_come_in_place_of_the_server_s(
    echo: Echo, proxy: Proxy, client: Client, status: int, code: bytes
) -> None:
    proxy.inject(Answer(status), kind("PUT"), times=2)
    for _ in range(2):
        client.connection.request("PUT", "/b/k", b"body")
        answer = client.answer()
        assert answer.status == status
        assert b"<Code>" + code in answer.read()
    assert echo.seen == []
    assert client.ask("PUT", "/b/k", b"body") == b"body"


@pytest.mark.parametrize("fault", [ResetUpload(1000), ResetUpload(), ResetDownload(), Stall()])
def test_a_broken_connection_gives_no_answer(proxy: Proxy, client: Client, fault: Fault) -> None:
    proxy.inject(fault)
    with pytest.raises((OSError, HTTPException)):
        client.ask("PUT", "/b/k", BODY)
    client.connection.close()
    assert client.ask() == BODY


def test_a_cut_upload_reaches_the_server_in_part_only(
    echo: Echo, proxy: Proxy, client: Client
) -> None:
    proxy.inject(ResetUpload(1000))
    with pytest.raises((OSError, HTTPException)):
        client.ask("PUT", "/b/k", BODY)
    assert all(body != BODY for _, _, _, body in echo.seen)


def test_a_lost_answer_is_that_of_a_request_that_was_done(
    echo: Echo, proxy: Proxy, client: Client
) -> None:
    proxy.inject(LoseAnswer())
    with pytest.raises((OSError, HTTPException)):
        client.ask("PUT", "/b/k", b"body")
    assert [body for _, _, _, body in echo.seen] == [b"body"]


def test_a_truncated_body_is_noticed_unless_its_length_lies_too(
    proxy: Proxy, client: Client
) -> None:
    proxy.inject(Truncate(1000))
    with pytest.raises(IncompleteRead) as caught:
        client.ask()
    assert caught.value.partial == BODY[:1000]
    client.connection.close()
    proxy.inject(Truncate(1000, honest=True))
    assert client.ask() == BODY[:1000]


def test_one_bit_flips_on_either_way(echo: Echo, proxy: Proxy, client: Client) -> None:
    proxy.inject(FlipUpload(70_000))
    client.ask("PUT", "/b/k", BODY)
    (found,) = [body for _, _, _, body in echo.seen]
    assert [at for at in range(len(BODY)) if found[at] != BODY[at]] == [70_000]
    proxy.inject(FlipDownload(100_000))
    found = client.ask()
    assert [at for at in range(len(BODY)) if found[at] != BODY[at]] == [100_000]


def test_conditions_can_be_stripped_off(echo: Echo, proxy: Proxy, client: Client) -> None:
    proxy.inject(Strip(), times=None)
    client.ask("PUT", "/b/k", b"body")
    assert "if-none-match" not in echo.seen[0][2]


def test_latency_delays_and_nothing_else(proxy: Proxy, client: Client) -> None:
    proxy.inject(Delay(0.1))
    before = time.monotonic()
    assert client.ask() == BODY
    assert time.monotonic() - before >= 0.1


def test_a_held_request_goes_on_when_the_test_wants(
    echo: Echo, proxy: Proxy, client: Client
) -> None:
    hold = Hold()
    proxy.inject(hold)
    client.connection.request("GET", "/b/k")
    assert hold.come.wait(5)
    assert echo.seen == []
    hold.go.set()
    assert client.answer().read() == BODY


def test_rules_say_which_of_the_requests_meet_them() -> None:
    rule = Rule(Stall(), skip=2, times=3, every=4)
    assert [number for number in range(20) if rule.meets(number)] == [2, 6, 10]
    assert not Rule(Stall(), times=0).meets(0)
    assert all(Rule(Stall(), times=None).meets(number) for number in range(9))


def test_a_request_meets_one_fault_and_the_proxy_tells_which(proxy: Proxy, client: Client) -> None:
    proxy.inject(Answer(503), kind("PUT", path="/k", query="partNumber"))
    proxy.inject(Answer(500), kind("PUT"))
    client.connection.request("PUT", "/b/k?partNumber=1", b"x")
    answer = client.answer()
    assert answer.status == 503
    answer.read()
    ((fault, head),) = proxy.met
    assert fault == Answer(503)
    assert head.kind == "PUT"
    proxy.forgive()
    assert proxy.met == []


def test_it_stops_with_requests_under_way(echo: Echo) -> None:
    with Proxy(f"http://127.0.0.1:{echo.server_port}") as proxy:
        proxy.inject(Stall())
        client = Client(proxy)
        client.connection.request("GET", "/b/k")
    with pytest.raises((OSError, HTTPException)):
        client.answer()
    client.connection.close()
