"""Which multipart uploads count as left over."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from ckptkit.storage.objects.amazon import S3Uploads

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Answers:
    """A server with one upload, whose parts came one per minute and fill two pages."""

    def call(self, method: str, key: str, **asked: Any) -> Any:
        """One answer."""
        if method == "list_multipart_uploads":
            return {"Uploads": [{"Key": "run/pack", "UploadId": "u", "Initiated": BEGAN}]}
        first = asked.get("PartNumberMarker", 0) + 1
        parts = [
            {"Size": 10, "LastModified": BEGAN + timedelta(minutes=number)}
            for number in range(first, first + 100)
        ]
        last = first + 99
        return {"Parts": parts, "IsTruncated": last < 200, "NextPartNumberMarker": last}


def test_an_upload_is_as_old_as_its_newest_part() -> None:
    (upload,) = S3Uploads(Answers()).under("run")
    assert upload.modified == (BEGAN + timedelta(minutes=200)).timestamp()
    assert upload.size == 2000
