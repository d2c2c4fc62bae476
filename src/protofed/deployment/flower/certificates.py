"""Throw-away keys for a federation on one machine: a CA, a certificate for the server, a key for each node."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE, VALID = "127.0.0.1", timedelta(days=1)
CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"


def write_certificates(folder: Path, nodes: int) -> None:
    """ca.crt, server.pem and server.key for TLS on this machine; node-0, node-0.pub, ... for the nodes."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _named("ProtoFed, this machine only")
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HERE))]
    leaf = (
        _certificate(_named("localhost"), issuer, server.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / CA).write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / CERTIFICATE).write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / KEY, server, serialization.PrivateFormat.PKCS8)
    for number in range(nodes):
        write_node_key(folder / f"node-{number}")


def write_node_key(path: Path) -> None:
    """A node's private key, and beside it the public one that the SuperLink is told of."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now, number = datetime.now(UTC), x509.random_serial_number()
    return x509.CertificateBuilder(issuer, subject, key, number, now - timedelta(hours=1), now + VALID)


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
