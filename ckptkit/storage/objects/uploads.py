"""Multipart uploads that were begun and never ended: obstore cannot list them, botocore can."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

from ckptkit.errors import NotFoundError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.answers import below
from ckptkit.storage.objects.client import Upload, Uploads
from ckptkit.storage.objects.failures import translated
from ckptkit.storage.objects.s3_options import client_options, new_session
from ckptkit.storage.objects.settings import Settings

_log = logging.getLogger("ckptkit.storage")


class S3Calls(Protocol):
    """Whatever asks a server that speaks S3."""

    def call(self, method: str, key: str, **asked: Any) -> Any:
        """One request about a key of one bucket; errors are translated."""


class S3Uploads:
    """The uploads of one bucket."""

    def __init__(self, calls: S3Calls) -> None:
        self._calls = calls

    def under(self, folder: str) -> Uploads:
        """Those below `folder/`, with the bytes that were uploaded already."""
        found = []
        for it in self._pages(folder):
            key, identity = it["Key"], it["UploadId"]
            parts = self._parts(key, identity)
            # One that goes on for hours is not left over while parts of it still arrive.
            times = [it["Initiated"], *(part["LastModified"] for part in parts)]
            size = sum(part["Size"] for part in parts)
            found.append(Upload(key, identity, max(times).timestamp(), size))
        return found

    def abort(self, upload: Upload) -> None:
        """Abort one; missing is fine."""
        with suppress(NotFoundError):
            self._calls.call("abort_multipart_upload", upload.key, UploadId=upload.identity)

    def _pages(self, folder: str) -> Iterator[dict[str, Any]]:
        asked = {"Prefix": f"{folder}/" if folder else ""}
        while True:
            page = self._calls.call("list_multipart_uploads", folder, of_bucket=True, **asked)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _parts(self, key: str, identity: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        asked: dict[str, Any] = {"UploadId": identity}
        with suppress(NotFoundError):
            while True:
                page = self._calls.call("list_parts", key, **asked)
                found += page.get("Parts", ())
                if not page.get("IsTruncated"):
                    break
                asked["PartNumberMarker"] = page["NextPartNumberMarker"]
        return found


class NoUploads:
    """None: Google and Azure forget what was begun after a week, and do not list it."""

    def under(self, _folder: str) -> Uploads:
        """None."""
        return []

    def abort(self, upload: Upload) -> None:
        """There is none."""


class UnseenUploads(NoUploads):
    """S3 without botocore; says once that nobody looks."""

    _said = False

    def under(self, folder: str) -> Uploads:
        """None."""
        if not self._said:
            self._said = True
            _log.warning(
                "multipart uploads that were cut off cannot be seen without the package botocore "
                "(pip install 'ckptkit[s3]')"
            )
        return super().under(folder)


class _Botocore:
    """Asks through botocore, which obstore does not need otherwise."""

    def __init__(self, top: Location, settings: Settings) -> None:
        self._top = top
        self._settings = settings

    def call(self, method: str, key: str, *, of_bucket: bool = False, **asked: Any) -> Any:
        with translated(below(self._top, key), self._settings.secrets):
            named = {} if of_bucket else {"Key": key}
            return getattr(self._client, method)(Bucket=self._top.path, **named, **asked)

    @cached_property
    def _client(self) -> Any:
        session = new_session(self._settings, str(self._top))
        return session.create_client("s3", **client_options(self._settings))


def begun_uploads(top: Location, settings: Settings) -> S3Uploads | NoUploads:
    """What knows of the uploads of a bucket that obstore reaches."""
    if top.scheme != "s3":
        return NoUploads()
    return S3Uploads(_Botocore(top, settings)) if find_spec("botocore") else UnseenUploads()
