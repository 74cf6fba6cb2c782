"""A certificate of the loopback, by an authority that nobody but these tests knows."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_HOST = "127.0.0.1"


class Certificate:
    """Files in a folder: `authority` is what clients trust, `server` what a server shows, with its
    key.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "authority.pem"
        self.server = folder / "server.pem"
        root, root_key = _made("ckptkit's tests", None)
        leaf, key = _made(_HOST, (root, root_key))
        pem = serialization.Encoding.PEM
        self.authority.write_bytes(root.public_bytes(pem))
        form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        private = key.private_bytes(pem, form, secret)
        self.server.write_bytes(leaf.public_bytes(pem) + private)

    @property
    def context(self) -> ssl.SSLContext:
        """For a server in this process."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server)
        return context

    @property
    def environment(self) -> dict[str, str]:
        """Where obstore, and what stands on botocore, look for whom to trust."""
        return dict.fromkeys(("SSL_CERT_FILE", "AWS_CA_BUNDLE"), str(self.authority))


def _made(name: str, issuer: tuple[x509.Certificate, Any] | None) -> tuple[x509.Certificate, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer:
        address = x509.IPAddress(ipaddress.ip_address(_HOST))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key
