"""Which multipart uploads count as left over, and listings that are told page by page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import Location, open_store
from ckptkit.storage.base.address import Settings
from ckptkit.storage.objects import amazon
from ckptkit.storage.objects.fsspec import S3fsClient

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Answers:
    """A server with one upload, whose parts came one per minute and fill two pages."""

    def list_multipart_uploads(self, **asked: Any) -> Any:
        return {"Uploads": [{"Key": "run/pack", "UploadId": "u", "Initiated": BEGAN}]}

    def list_parts(self, **asked: Any) -> Any:
        first = asked.get("PartNumberMarker", 0) + 1
        parts = [
            {"Size": 10, "LastModified": BEGAN + timedelta(minutes=number)}
            for number in range(first, first + 100)
        ]
        last = first + 99
        return {"Parts": parts, "IsTruncated": last < 200, "NextPartNumberMarker": last}


def test_an_upload_is_as_old_as_its_newest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amazon, "new_client", lambda *_: Answers())
    (upload,) = amazon.BotocoreBucket(Location.parse("s3://bucket"), Settings()).uploads("run")
    assert upload.modified == (BEGAN + timedelta(minutes=200)).timestamp()
    assert upload.size == 2000


def test_a_listing_with_more_and_no_word_where_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    page: dict[str, Any] = {"IsTruncated": True}
    monkeypatch.setattr(S3fsClient, "_call", lambda *_, **__: page)
    with pytest.raises(StorageError, match="there is more, and not where"):
        open_store("s3://bucket", {"engine": "fsspec"}).list()
    bucket = amazon.BotocoreBucket(Location.parse("s3://bucket"), Settings())
    monkeypatch.setattr(bucket, "_ask", lambda *_, **__: page)
    with pytest.raises(StorageError, match="there is more, and not where"):
        bucket.uploads("run")
