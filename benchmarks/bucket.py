"""A bucket of an object store on this machine, and how each contender is told of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

_VARIABLE = "CKPTKIT_BENCH_BUCKET"
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where it is, and the keys of a server that nobody else can reach."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"
    environment: Mapping[str, str] = field(default_factory=dict)
    """What whoever reaches it needs to have there."""

    @classmethod
    def told(cls) -> Bucket:
        """The one that the process which started this one has told it of."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    @contextmanager
    def tell(self) -> Iterator[None]:
        """Tell the processes that are started meanwhile."""
        told = {_VARIABLE: json.dumps(asdict(self)), **self.environment}
        before = {name: os.environ.get(name) for name in told}
        os.environ.update(told)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @property
    def is_plain(self) -> bool:
        """Whether what is sent is not encrypted."""
        return self.endpoint.startswith("http:")

    def url(self, prefix: str) -> str:
        """A place in it."""
        return f"s3://{self.name}/{prefix}"

    @property
    def options(self) -> Mapping[str, object]:
        """As ckptkit takes them."""
        return {
            "endpoint": self.endpoint,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "region": self.region,
        }

    @property
    def for_s3fs(self) -> dict[str, Any]:
        """As s3fs takes them. Over https botocore would send a CRC behind each body, which Ceph's
        gateway refuses; without one it signs bodies, unless it is told not to.
        """
        encrypted = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        }
        return {
            **({} if self.is_plain else {"config_kwargs": encrypted}),
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": self.region},
        }

    def raw(self) -> Any:
        """As obstore itself."""
        from obstore.store import S3Store  # noqa: PLC0415 — not everyone who is told needs it

        return S3Store(
            self.name,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            unsigned_payload=not self.is_plain,
            client_options={"allow_http": True, "timeout": "300s"},
        )

    def empty(self) -> None:
        """Delete everything in it."""
        import obstore  # noqa: PLC0415

        store = self.raw()
        paths = [entry["path"] for batch in store.list() for entry in batch]
        for begin in range(0, len(paths), _PAGE):
            obstore.delete(store, paths[begin : begin + _PAGE])
