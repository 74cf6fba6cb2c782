"""From what a server answers to an error that says what to do, whichever engine asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.location import Location
from ckptkit.storage.objects.client import Transient, UnsupportedError

_AGAIN = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "TooManyRequests",
    "OperationAborted",
    "ServerBusy",
    # Two conditional writes at once: neither was refused for good.
    "ConditionalRequestConflict",
    # The body was damaged on its way.
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
}
_AGAIN_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CLOCK = "set the clock of this machine (NTP): it is minutes off"
_REGION = "set the option region, or AWS_REGION, to the region of the bucket"
_KEY = "check the access key and the secret key, and whether they belong to this server"
_KINDS: dict[str, tuple[type[CkptkitError], str, str]] = {
    "AccessDenied": (AccessError, "not allowed", "ask for permission to read, write and list here"),
    "AllAccessDisabled": (AccessError, "not allowed", "the bucket is closed; choose another"),
    "InvalidAccessKeyId": (AccessError, "the access key is not known", _KEY),
    "SignatureDoesNotMatch": (AccessError, "the secret key is wrong", _KEY),
    "InvalidToken": (AccessError, "the session token is not valid", "get new credentials"),
    "ExpiredToken": (AccessError, "the credentials have expired", "get new credentials"),
    "TokenRefreshRequired": (AccessError, "the credentials have expired", "get new credentials"),
    "RequestTimeTooSkewed": (AccessError, "the clocks of client and server differ", _CLOCK),
    "RequestExpired": (AccessError, "the clocks of client and server differ", _CLOCK),
    "AuthorizationHeaderMalformed": (StorageError, "the region is wrong", _REGION),
    "PermanentRedirect": (StorageError, "the bucket is in another region", _REGION),
    "TemporaryRedirect": (StorageError, "the bucket is in another region", _REGION),
    "IllegalLocationConstraintException": (StorageError, "the region is wrong", _REGION),
    "InvalidBucketName": (StorageError, "no bucket can have this name", "check the URL"),
    "NoSuchUpload": (
        NotFoundError,
        "the upload is gone",
        "something aborts uploads too early: a rule of the bucket, or a clean-up",
    ),
    "QuotaExceeded": (NoSpaceError, "the quota is used up", "free some space or ask for more"),
    "EntityTooLarge": (StorageError, "the server takes no object of this size", "lower part_size"),
    "NotImplemented": (UnsupportedError, "the server cannot do this", "check what it supports"),
}
_STATUS = {301: "PermanentRedirect", 307: "TemporaryRedirect", 401: "AccessDenied"} | {
    403: "AccessDenied",
    501: "NotImplemented",
    507: "QuotaExceeded",
}
NO_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true; "
    "for gs:// set GOOGLE_APPLICATION_CREDENTIALS"
)
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: an HTTP status, and the code and message of its XML or JSON."""

    status: int = 0
    code: str = ""
    message: str = ""


def said(answer: Answer, where: str, secrets: Iterable[str] = ()) -> CkptkitError | Transient:
    """What to raise for an answer that is no success."""
    code = answer.code or _STATUS.get(answer.status, "")
    if code == "NoSuchBucket":
        return no_bucket(where)
    if answer.status == 412 or code == "PreconditionFailed":
        return taken(where)
    if code in _AGAIN or (answer.status in _AGAIN_STATUS and code not in _KINDS):
        return Transient(" ".join(str(it) for it in (answer.status or "", code) if it).strip())
    if code in _KINDS:
        kind, what, hint = _KINDS[code]
        return kind(f"{what}{_told(answer, secrets)}", where=where, hint=hint)
    if answer.status == 404:
        return absent(where)
    return StorageError(
        f"the server refused{_told(answer, secrets)}",
        where=where,
        hint="check the endpoint, and whether the server supports what was asked",
    )


def below(top: Location, key: str) -> str:
    """A key as users know it; the whole of it where there is no key."""
    return f"{top}/{key}" if key else str(top)


def absent(where: str) -> NotFoundError:
    """There is no such object."""
    return NotFoundError("no such object", where=where, hint="check the bucket, the path, the name")


def no_bucket(where: str) -> NotFoundError:
    """There is no such bucket."""
    bucket = "/".join(where.split("/")[:3])
    return NotFoundError(
        f"there is no bucket {bucket}",
        where=where,
        hint="check its name and the endpoint, or create it first",
    )


def taken(where: str) -> AlreadyExistsError:
    """There is an object of this name."""
    return AlreadyExistsError(
        "there is an object of this name",
        where=where,
        hint="delete it first or choose another name",
    )


def no_credentials(where: str) -> AccessError:
    """Nobody said with which credentials to ask."""
    return AccessError("no credentials were found", where=where, hint=NO_CREDENTIALS_HINT)


def unknown_host(_where: str) -> Transient:
    """The name of the server has no address; not every resolver says when it is merely busy."""
    return Transient("the server's name has no address", within=1)


def unresolved_host(_where: str) -> Transient:
    """Nobody who knows the address of the server answers now."""
    return Transient("the server's name cannot be looked up now")


def unencrypted(where: str) -> StorageError:
    """Plain http, which nobody asked for."""
    return StorageError(
        "the connection would not be encrypted",
        where=where,
        hint="use an https:// endpoint, or ask for it: http=true",
    )


def untrusted(where: str) -> StorageError:
    """The server's certificate is not trusted."""
    return StorageError(
        "the certificate of the server is not trusted",
        where=where,
        hint="check the endpoint, the clock, and the certificates of this machine",
    )


def no_https(where: str) -> StorageError:
    """The server does not speak TLS."""
    return StorageError(
        "the server does not speak https",
        where=where,
        hint="check the endpoint; for one without encryption ask for it: http=true",
    )


def wrong_region(where: str) -> StorageError:
    """The server sends on to another region, and does not say which."""
    return StorageError("the bucket is in another region", where=where, hint=_REGION)


def no_ranges(where: str) -> StorageError:
    """The server sends a range, or all of the object, and says that all is what it sends."""
    return StorageError(
        "the server does not say which range it sends",
        where=where,
        hint="engine=fsspec does not ask; better, use a server that supports ranges",
    )


def refused_connection(_where: str) -> Transient:
    """Nobody listens: a server that starts again is back within seconds, a wrong endpoint never."""
    return Transient("nobody listens at the endpoint", within=10)


def xml_answer(status: int, body: str) -> Answer:
    """The answer in an error document of S3, or its JSON elsewhere."""
    code = re.search(r"<Code>([^<]*)</Code>", body)
    message = re.search(r"<Message>([^<]*)</Message>", body)
    return Answer(status, code[1] if code else "", message[1] if message else "")


def _told(answer: Answer, secrets: Iterable[str]) -> str:
    told = " ".join(f"{answer.status or ''} {answer.code}: {answer.message}".split())
    for secret in secrets:
        told = told.replace(secret, "…")
    told = told.strip(": ")
    return f" ({told[:_LONGEST]})" if told else ""
