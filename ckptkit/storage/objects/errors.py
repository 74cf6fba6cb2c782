"""From what a server or an engine says to an error that says what to do, whichever engine asked."""

from __future__ import annotations

import errno
import math
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.storage.base.address import Location
from ckptkit.storage.base.disk import refusal


class Transient(Exception):  # noqa: N818 — no error until the retries are used up
    """What may work when it is tried again; private to the object stores.

    The reason is shown to users. `within` bounds the seconds where more will hardly help.
    """

    def __init__(self, reason: str, *, within: float = math.inf) -> None:
        super().__init__(reason)
        self.reason = reason
        self.within = within


class UnsupportedError(StorageError):
    """The server does not know what was asked; to users a StorageError like others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says: an HTTP status, and the code and message of its XML or JSON."""

    status: int = 0
    code: str = ""
    message: str = ""


_CLOCK = "set the clock of this machine (NTP): it is minutes off"
_REGION = "set the option region, or AWS_REGION, to the region of the bucket"
_KEY = "check the access key and the secret key, and whether they belong to this server"
_FILES = (
    "mend ~/.aws/config and ~/.aws/credentials, or what AWS_CONFIG_FILE and "
    "AWS_SHARED_CREDENTIALS_FILE name"
)
_LOGIN = "run `aws sso login`, with --profile where you use one"
# Capitalised as servers say them, or as botocore calls its errors; the others are ours, of what
# happens without an answer.
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
    "absent": (NotFoundError, "no such object", "check the bucket, the path, the name"),
    "taken": (
        AlreadyExistsError,
        "there is an object of this name",
        "delete it first or choose another name",
    ),
    "no credentials": (
        AccessError,
        "no credentials were found",
        (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true; "
            "for gs:// set GOOGLE_APPLICATION_CREDENTIALS"
        ),
    ),
    "ConfigParseError": (UsageError, "the AWS configuration cannot be read", _FILES),
    "InvalidConfigError": (UsageError, "the AWS configuration is wrong", _FILES),
    "InfiniteLoopConfigError": (UsageError, "the AWS configuration is wrong", _FILES),
    "PartialCredentialsError": (AccessError, "half of the credentials is missing", _FILES),
    "CredentialRetrievalError": (
        AccessError,
        "the credentials could not be got",
        "check that `aws sts get-caller-identity` works",
    ),
    "SSOTokenLoadError": (AccessError, "nobody is logged in at AWS SSO", _LOGIN),
    "UnauthorizedSSOTokenError": (AccessError, "nobody is logged in at AWS SSO", _LOGIN),
    "TokenRetrievalError": (AccessError, "nobody is logged in at AWS SSO", _LOGIN),
    "unencrypted": (
        StorageError,
        "the connection would not be encrypted",
        "use an https:// endpoint, or ask for it: http=true",
    ),
    "untrusted": (
        StorageError,
        "the certificate of the server is not trusted",
        "check the endpoint, the clock, and the certificates of this machine",
    ),
    "no https": (
        StorageError,
        "the server does not speak https",
        "check the endpoint; for one without encryption ask for it: http=true",
    ),
    "endless": (
        StorageError,
        "the server says that there is more, and not where",
        "check the endpoint, and whether the server supports listings of several pages",
    ),
    # It sends a range, or all of the object, and says that all is what it sends.
    "no ranges": (
        StorageError,
        "the server does not say which range it sends",
        "engine=fsspec does not ask; better, use a server that supports ranges",
    ),
}
# And for how many seconds asking again may help.
_PASSING: dict[str, tuple[str, float]] = {
    "slow": ("no answer in time", math.inf),
    "broken": ("the connection broke", math.inf),
    # Not every resolver says when it is merely busy.
    "unknown host": ("the server's name has no address", 1),
    "busy resolver": ("the server's name cannot be looked up now", math.inf),
    # A server that starts again is back within seconds, a wrong endpoint never.
    "refused": ("nobody listens at the endpoint", 10),
}
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
_STATUS = {301: "PermanentRedirect", 307: "TemporaryRedirect", 401: "AccessDenied"} | {
    403: "AccessDenied",
    501: "NotImplemented",
    507: "QuotaExceeded",
}
_LONGEST = 200


def trouble(kind: str, where: str) -> CkptkitError | Transient:
    """What to raise for one of the kinds above, of which the server said nothing more."""
    if kind in _PASSING:
        reason, within = _PASSING[kind]
        return Transient(reason, within=within)
    error, what, hint = _KINDS[kind]
    return error(what, where=where, hint=hint)


def error_of(answer: Answer, where: str, secrets: Iterable[str] = ()) -> CkptkitError | Transient:
    """What to raise for an answer that is no success: `answer_of` the other way round."""
    code = answer.code or _STATUS.get(answer.status, "")
    if code == "NoSuchBucket":
        bucket = "/".join(where.split("/")[:3])
        return NotFoundError(
            f"there is no bucket {bucket}",
            where=where,
            hint="check its name and the endpoint, or create it first",
        )
    if answer.status == 412 or code == "PreconditionFailed":
        return trouble("taken", where)
    if code in _AGAIN or (answer.status in _AGAIN_STATUS and code not in _KINDS):
        return Transient(" ".join(str(it) for it in (answer.status or "", code) if it).strip())
    told = " ".join(f"{answer.status or ''} {answer.code}: {answer.message}".split())
    for secret in secrets:
        told = told.replace(secret, "…")
    told = told.strip(": ")[:_LONGEST]
    told = f" ({told})" if told else ""
    if code in _KINDS:
        error, what, hint = _KINDS[code]
        return error(f"{what}{told}", where=where, hint=hint)
    if answer.status == 404:
        return trouble("absent", where)
    return StorageError(
        f"the server refused{told}",
        where=where,
        hint="check the endpoint, and whether the server supports what was asked",
    )


def below(top: Location, key: str) -> str:
    """A key as users know it; the whole of it where there is no key."""
    return f"{top}/{key}" if key else str(top)


# By name, because none of the packages needs to be there. First what the connection tells, which
# may be the cause of what looks like a plain time-out.
_WITHOUT_CREDENTIALS = {"NoCredentialsError", "DefaultCredentialsError", "RefreshError"}
_UNTRUSTED = {"SSLError", "SSLCertVerificationError", "ClientConnectorCertificateError"}
_SLOW = {"ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "FSTimeoutError"}
_BROKEN = {
    *("ConnectionClosedError", "EndpointConnectionError", "HTTPClientError", "ResponseParserError"),
    *("ClientPayloadError", "ServerDisconnectedError", "ClientOSError", "ClientConnectionError"),
    *("IncompleteReadError", "ResponseStreamingError", "ContentLengthError", "ChecksumError"),
}
# Where the connection tells nothing: the first that fits.
_OTHERS: tuple[tuple[type[OSError], set[str], str], ...] = (
    (TimeoutError, _SLOW, "slow"),
    (ConnectionError, _BROKEN, "broken"),
    (FileNotFoundError, set(), "absent"),
    (FileExistsError, set(), "taken"),
    (PermissionError, set(), "AccessDenied"),
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def translated(where: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate what botocore, aiohttp and fsspec raise inside; our own pass unchanged."""
    try:
        yield
    except (CkptkitError, Transient):
        raise
    except Exception as error:  # noqa: BLE001 — file systems raise what they like
        # From None: what these libraries say may hold requests, with their signatures.
        raise translation(error, where, secrets) from None


def translation(
    error: Exception, where: str, secrets: Iterable[str] = ()
) -> CkptkitError | Transient:
    """What to raise instead of an error of an engine."""
    if answer := answer_of(error):
        return error_of(answer, where, secrets)
    told = Answer(code=type(error).__name__, message=str(error))
    if told.code in _KINDS:
        return error_of(told, where, secrets)
    for cause in _causes(error):
        if kind := _connection_trouble(cause):
            return trouble(kind, where)
    # The nearest cause counts: a full disk may be met while a missing file is dealt with.
    for cause in _causes(error):
        for known, names, kind in _OTHERS:
            if isinstance(cause, known) or type(cause).__name__ in names:
                return trouble(kind, where)
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return refusal(cause, where)
    return error_of(told, where, secrets)


def answer_of(error: BaseException) -> Answer | None:
    """What the server said, if it said anything."""
    for cause in _causes(error):
        name, message = type(cause).__name__, str(getattr(cause, "message", ""))
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, message = (str(response["Error"].get(it, "")) for it in ("Code", "Message"))
            # Without a body botocore gives the status as the code.
            return Answer(status, "" if code.isdigit() else code, message)
        number = getattr(cause, "code", None)
        if name == "HttpError" and number is not None:
            return Answer(int(number), message=message)
        number = getattr(cause, "status", None)
        if name == "ClientResponseError" and isinstance(number, int):
            return Answer(number, message=message)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        # aiohttp keeps what the operating system said here.
        inner = getattr(following, "os_error", None)
        if isinstance(inner, BaseException) and id(inner) not in seen:
            yield inner
        following = following.__cause__ or following.__context__


def _connection_trouble(error: BaseException) -> str:
    name = type(error).__name__
    if name in _WITHOUT_CREDENTIALS:
        return "no credentials"
    if isinstance(error, socket.gaierror) or name == "ClientConnectorDNSError":
        resolver = getattr(error, "os_error", error)
        is_busy = getattr(resolver, "errno", None) == socket.EAI_AGAIN
        return "busy resolver" if is_busy else "unknown host"
    # botocore follows a redirect that leads to itself.
    if isinstance(error, RecursionError):
        return "PermanentRedirect"
    if isinstance(error, ssl.SSLError) or name in _UNTRUSTED:
        if "WRONG_VERSION" in str(error):
            return "no https"
        if name in _UNTRUSTED or isinstance(error, ssl.SSLCertVerificationError):
            return "untrusted"
    return "refused" if isinstance(error, ConnectionRefusedError) else ""
