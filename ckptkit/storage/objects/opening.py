"""From a location and its options to a store over the engine that fits."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.storage.location import BUCKETS, Location
from ckptkit.storage.objects.client import Client
from ckptkit.storage.objects.profiles import aws_files, profile_endpoint
from ckptkit.storage.objects.settings import Settings, read_settings
from ckptkit.storage.objects.store import ObjectStore, split
from ckptkit.storage.options import Address, Options

_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "GCSFS_")
_FILE_SYSTEMS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


def open_objects(location: Location, options: Options) -> ObjectStore:
    """The store of a location on a server; nothing is asked until the first call on it."""
    settings = read_settings(location.scheme, options)
    top = split(location)[0]
    if location.scheme == "s3" and settings.endpoint is None:
        settings = replace(settings, endpoint=profile_endpoint(settings, str(location)))
    # What only one file system understands need not be hashable; fsspec keeps those itself.
    client = _client(top, settings) if settings.others else _kept(top, settings, _surroundings())
    return ObjectStore(client, Address(location, dict(options)), settings)


@lru_cache(maxsize=16)
def _kept(top: Location, settings: Settings, _surroundings: object) -> Client:
    """One client for all stores that are reached alike: they share its connections."""
    return _client(top, settings)


def _surroundings() -> object:
    """What a client may have read besides its settings; no connection outlives a fork."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    files = [*aws_files(), Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", ""))]
    return os.getpid(), tuple(sorted(found.items())), tuple(map(_changed, files))


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _client(top: Location, settings: Settings) -> Client:
    if _engine(top.scheme, settings) == "obstore":
        from ckptkit.storage.objects.obstore_client import ObstoreClient  # noqa: PLC0415

        return ObstoreClient(top, settings)
    if top.scheme == "s3":
        from ckptkit.storage.objects.s3fs_client import S3fsClient  # noqa: PLC0415

        return S3fsClient(top, settings)
    from ckptkit.storage.objects.fsspec_client import FsspecClient  # noqa: PLC0415

    return FsspecClient(top, settings)


def _engine(scheme: str, settings: Settings) -> str:
    if scheme not in BUCKETS:
        if settings.engine == "obstore":
            raise UsageError(
                f"the engine obstore does not know {scheme}://",
                hint="leave the option engine out",
            )
        return "fsspec"
    needed = {"obstore": "obstore", "fsspec": _FILE_SYSTEMS[scheme]}
    found = [engine for engine, module in needed.items() if find_spec(module)]
    wanted = settings.engine or next(iter(found), "obstore")
    if wanted not in found:
        raise UsageError(
            f"{scheme}:// needs the package {needed[wanted]}",
            hint=f"pip install 'ckptkit[{_EXTRAS[scheme]}]'",
        )
    return wanted
