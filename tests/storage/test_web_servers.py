"""What answers like a server and is no object store."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store


class _Page(BaseHTTPRequestHandler):
    """Answers whatever it is asked with a page."""

    def answer(self) -> None:
        page = b"<html>please log in</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page)

    do_GET = do_HEAD = answer  # noqa: N815 — so it is called

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_web_server_is_no_empty_bucket(engine: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "engine": engine}
        store = open_store("s3://bucket/run", {**options, "access_key": "a", "secret_key": "b"})
        for ask in (store.children, store.list):
            with pytest.raises(StorageError, match="no object store") as caught:
                ask()
            assert "check the endpoint" in caught.value.hint
        server.shutdown()
