"""Stores of obstore, set up as the settings say."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from ckptkit.errors import UsageError
from ckptkit.storage.location import Location
from ckptkit.storage.objects.credentials import s3_credentials
from ckptkit.storage.objects.retrying import FIRST_PAUSE, LONGEST_PAUSE
from ckptkit.storage.objects.settings import Settings

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

AnyStore: TypeAlias = S3Store | GCSStore | AzureStore


def built(
    top: Location, settings: Settings, *, in_flight: int, retries: bool, signs_bodies: bool
) -> AnyStore:
    """The store of one bucket, for requests that send about so many bytes at a time, or none and
    are answered with many; with `retries` it repeats what fails, by itself and in silence.

    Bodies are signed at most over plain http: that costs a hash, and https protects them anyway.
    """
    extra = settings.extra_seconds(in_flight)
    client = _client_options(settings)
    if in_flight:
        # While one is sent nothing comes.
        client["timeout"] = timedelta(seconds=settings.stall_seconds + extra)
    else:
        client["read_timeout"] = timedelta(seconds=settings.stall_seconds)
        client["timeout"] = timedelta(seconds=settings.answer_seconds)
    retry = _retry_config(settings, extra, retries=retries)
    if top.scheme == "s3":
        signs = signs_bodies and settings.is_plain
        return _s3(top.path, settings, client, retry, signs_bodies=signs)
    make = _gs if top.scheme == "gs" else _az
    return make(top.path, settings, client, retry)


def _s3(
    bucket: str,
    settings: Settings,
    client: ClientConfig,
    retry: RetryConfig,
    *,
    signs_bodies: bool,
) -> S3Store:
    found = s3_credentials(settings, f"s3://{bucket}")
    virtual = settings.path_style is False or (
        settings.path_style is None and settings.endpoint is None and "." not in bucket
    )
    config: S3Config = {
        "region": settings.region or found.region or "us-east-1",
        "virtual_hosted_style_request": virtual,
        "unsigned_payload": not signs_bodies,
        "skip_signature": settings.anonymous,
    }
    if settings.endpoint:
        config["endpoint"] = _with_bucket(settings.endpoint, bucket if virtual else "")
    return S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config=retry,
        credential_provider=found.provider,
    )


def _gs(bucket: str, settings: Settings, client: ClientConfig, retry: RetryConfig) -> GCSStore:
    config: GCSConfig = {"skip_signature": settings.anonymous}
    if settings.endpoint:
        config["base_url"] = settings.endpoint
    return GCSStore(bucket, config=config, client_options=client, retry_config=retry)


def _az(container: str, settings: Settings, client: ClientConfig, retry: RetryConfig) -> AzureStore:
    """Here a key is the name of the account and its key, and a session token is a SAS."""
    config: AzureConfig = {"skip_signature": settings.anonymous}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    if settings.access_key:
        config["account_name"] = settings.access_key
    if settings.secret_key:
        config["account_key"] = settings.secret_key
    if settings.session_token:
        config["sas_key"] = settings.session_token
    try:
        return AzureStore(container, config=config, client_options=client, retry_config=retry)
    except Exception as error:
        raise UsageError(
            "the Azure account is not named, or its key is no key",
            where=f"az://{container}",
            hint="set AZURE_STORAGE_ACCOUNT_NAME and its key, or access_key and secret_key",
        ) from error


def _client_options(settings: Settings) -> ClientConfig:
    return {
        "allow_http": settings.is_plain,
        "connect_timeout": timedelta(seconds=settings.connect_timeout),
    }


def _retry_config(settings: Settings, extra: float, *, retries: bool) -> RetryConfig:
    return {
        "max_retries": 1000 if retries else 0,
        "retry_timeout": timedelta(seconds=settings.deadline + extra),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE),
            "base": 2,
        },
    }


def _with_bucket(endpoint: str, bucket: str) -> str:
    if not bucket:
        return endpoint
    parts = urlsplit(endpoint)
    return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()
