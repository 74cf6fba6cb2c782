"""What all servers that speak S3 have in common for tests: buckets, and a look behind the store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import botocore.session
from botocore.config import Config

REGION = "us-east-1"
ACCESS_KEY = "CKPTKITTESTACCESSKEY"
SECRET_KEY = "ckptkit+test/secret+of+forty+characters0"
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fresh bucket, and how to reach it."""

    name: str
    scheme: str
    options: Mapping[str, object] = field(repr=False)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def through(self, endpoint: str, **more: object) -> dict[str, object]:
        """The storage options for the same bucket through another endpoint."""
        return {**self.options, "endpoint": endpoint, **more}


class S3Server(AbstractContextManager["S3Server"]):
    """A server on the loopback; a subclass starts and stops it."""

    endpoint: str
    access_key = ACCESS_KEY
    secret_key = SECRET_KEY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, object]:
        """Storage options that reach the server."""
        return {
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }

    @cached_property
    def client(self) -> Any:
        """A plain client, which knows nothing of ckptkit."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                proxies={},
                read_timeout=20,
                retries={"total_max_attempts": 2},
            ),
        )

    def new_bucket(self) -> Bucket:
        """Make a bucket that nobody else has."""
        name = f"test-{os.getpid()}-{next(_NUMBERS)}"
        self.client.create_bucket(Bucket=name)
        return Bucket(name, "s3", self.options)

    def drop(self, bucket: Bucket) -> None:
        """Delete a bucket with all that is in it: some servers keep it in memory."""
        for upload in self.uploads(bucket):
            self.client.abort_multipart_upload(
                Bucket=bucket.name, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        for key in self.keys(bucket):
            self.client.delete_object(Bucket=bucket.name, Key=key)
        self.client.delete_bucket(Bucket=bucket.name)

    def keys(self, bucket: Bucket, prefix: str = "") -> list[str]:
        """All objects of a bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket.name, Prefix=prefix
        )
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def uploads(self, bucket: Bucket) -> list[dict[str, Any]]:
        """The multipart uploads under way."""
        found = self.client.list_multipart_uploads(Bucket=bucket.name)
        return list(found.get("Uploads", ()))
