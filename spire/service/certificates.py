"""Make a CA and one certificate per service for mutual TLS (`spire certs`).

The CA's key is stored beside the certificates, which suits tests and a machine or two. Certificates of an existing CA
work as well (`spire/rpc/tls.py` names the files).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spire.address import bare
from spire.errors import DataError
from spire.rpc.tls import AUTHORITY, CERTIFICATE, KEY

SERVICES = ("gateway", "verifier", "draft")

_AUTHORITY_KEY = "ca.key"
_AUTHORITY_DAYS = 3650
_ON_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
# Certificates are valid from this long ago, because clocks differ.
_BACKDATED = timedelta(hours=1)


def make_certificates(directory: Path, hosts: Sequence[str] = (), days: float = 365) -> None:
    """Write new certificates and keys to `directory`/gateway, /verifier and /draft. An existing CA is used again.

    Each certificate is valid for the service's name, loopback and `hosts`. Raises DataError for an unusable file.
    """
    try:
        ca_key, ca = _authority(directory)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        for name in SERVICES:
            key = ec.generate_private_key(ec.SECP256R1())
            names = [_general_name(host) for host in (name, *_ON_THIS_MACHINE, *hosts)]
            certificate = (
                _unsigned(name, ca.subject, key, days)
                .add_extension(x509.SubjectAlternativeName(names), critical=False)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(usage, critical=False)
                .add_extension(issuer, critical=False)
                .sign(ca_key, SHA256())
            )
            _write_key(directory / name / KEY, key)
            _write(directory / name / CERTIFICATE, certificate.public_bytes(Encoding.PEM))
            _write(directory / name / AUTHORITY, ca.public_bytes(Encoding.PEM))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{directory}: certificates cannot be made: {error}") from error


def _authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return key and certificate of the CA, which is created if absent."""
    key_file, file = directory / _AUTHORITY_KEY, directory / AUTHORITY
    absent = [one for one in (key_file, file) if not one.exists()]
    if len(absent) == 1:
        raise ValueError(f"{absent[0].name} of the CA there is missing: name another directory for a new CA")
    if absent:
        _new_authority(key_file, file)
    key = load_pem_private_key(key_file.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key_file} is no key that was made here")
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    if certificate.public_key() != key.public_key():
        raise ValueError(f"{key_file} is not the key of {file}")
    return key, certificate


def _new_authority(key_file: Path, file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = "Spire's own CA"
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    certificate = (
        _unsigned(name, _called(name), key, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **never), critical=True)
        .sign(key, SHA256())
    )
    _write(file, certificate.public_bytes(Encoding.PEM))
    _write_key(key_file, key)


def _unsigned(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_called(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(bare(host)))
    except ValueError:
        return x509.DNSName(host)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    _write(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)


def _write(file: Path, content: bytes, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.touch(mode)
    file.write_bytes(content)
