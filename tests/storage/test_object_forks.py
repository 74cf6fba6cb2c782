"""What becomes of a store in a process that was forked after the store had been used."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from tests.servers.s3_server import Bucket


def in_a_fork(do: Callable[[], str]) -> str:
    """What `do` returns in a forked process, where nothing may wait without end."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            said = do()
        except BaseException:  # noqa: BLE001 — told, and the process must not go on as a test
            said = traceback.format_exc()
        os.write(writes, said[-4000:].encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def test_a_fork_is_told_that_obstore_would_wait_without_end(bucket: Bucket) -> None:
    options = {**bucket.options, "engine": "obstore"}
    store = open_store(bucket.url, options)
    store.put("a", b"before")

    def read() -> str:
        for one in (store, open_store(bucket.url, options)):
            with pytest.raises(StorageError, match="forked") as caught:
                one.read_whole("a", 10)
            assert "engine=fsspec" in caught.value.hint
        return "refused"

    assert in_a_fork(read) == "refused"
    assert store.read_whole("a", 10) == b"before"


def test_a_store_of_fsspec_goes_on_in_a_fork(bucket: Bucket) -> None:
    options = {**bucket.options, "engine": "fsspec"}
    store = open_store(bucket.url, options)
    store.put("a", b"before")

    def read() -> str:
        store.put("b", b"by the fork")
        return store.read_whole("a", 10).decode()

    assert in_a_fork(read) == "before"
    assert store.read_whole("b", 20) == b"by the fork"
