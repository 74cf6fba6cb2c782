"""What botocore and s3fs need to know to reach a server as the settings say."""

from __future__ import annotations

from typing import Any

from ckptkit.errors import UsageError
from ckptkit.storage.objects.settings import Settings


def new_session(settings: Settings, where: str) -> Any:
    """A session of botocore, which reads `~/.aws`."""
    import botocore.session  # noqa: PLC0415 — costs time, and may not be there
    from botocore.exceptions import ProfileNotFound  # noqa: PLC0415

    session = botocore.session.Session(profile=None if settings.access_key else settings.profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound:
        raise UsageError(
            "there is no such profile",
            where=where,
            value=settings.profile,
            hint="`aws configure list-profiles` lists them; see AWS_PROFILE and ~/.aws",
        ) from None
    return session


def client_options(settings: Settings) -> dict[str, Any]:
    """The arguments of botocore's `create_client`."""
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    signed = {"signature_version": UNSIGNED} if settings.anonymous else {}
    return {
        "aws_access_key_id": settings.access_key,
        "aws_secret_access_key": settings.secret_key,
        "aws_session_token": settings.session_token,
        "endpoint_url": settings.endpoint,
        "region_name": settings.region,
        "use_ssl": not settings.is_plain,
        "config": Config(**config_options(settings), **signed),
    }


def config_options(settings: Settings) -> dict[str, Any]:
    """The arguments of botocore's `Config`: one attempt, for it is repeated elsewhere."""
    from botocore.config import Config  # noqa: PLC0415

    style = "path" if settings.endpoint else "auto"
    if settings.path_style is not None:
        style = "path" if settings.path_style else "virtual"
    found: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": settings.connect_timeout,
        "read_timeout": settings.stall_seconds,
        "max_pool_connections": max(10, settings.concurrency),
        "s3": {"addressing_style": style},
    }
    # Servers other than Amazon's do not understand these checksums; ETags and CRCs are checked.
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if name in Config.OPTION_DEFAULTS:
            found[name] = "when_required"
    return found
