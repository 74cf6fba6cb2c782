"""What the files of AWS say besides credentials: both engines are to go by the same."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ckptkit.storage.objects.s3_options import new_session
from ckptkit.storage.objects.settings import Settings, checked_endpoint

_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}


def aws_files() -> list[Path]:
    """The files with profiles, and with their credentials."""
    return [
        Path(os.path.expanduser(os.environ.get(variable) or file))  # noqa: PTH111 — `~` may have no home
        for variable, file in _FILES.items()
    ]


def profile_endpoint(settings: Settings, where: str) -> str | None:
    """The endpoint of the profile: botocore would go there, and obstore does not look."""
    if find_spec("botocore") is None or not any(map(_may_name_one, aws_files())):
        return None
    session = new_session(settings, where)
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3")
    found = of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None
    endpoint = found or profile.get("endpoint_url")
    return checked_endpoint(endpoint) if endpoint else None


def _may_name_one(file: Path) -> bool:
    """Without botocore, which takes a while."""
    try:
        return b"endpoint_url" in file.read_bytes()
    except OSError:
        return False
