"""Certificates for tests, for hosts and for identities, which trustme alone cannot issue."""

import datetime

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def issue(
    ca: trustme.CA, *names: str | x509.GeneralName, expired: bool = False
) -> trustme.LeafCert:
    """Returns a certificate that is valid for an hour, or expired a second ago.

    Args:
      ca: signs it.
      names: hosts, URIs such as spiffe://cluster.local/impala/actor, and names of any kind.
      expired: whether it has expired.
    """
    signer = x509.load_pem_x509_certificate(ca.cert_pem.bytes())
    signer_key = serialization.load_pem_private_key(ca.private_key_pem.bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [_general(name) for name in names]
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(seconds=-1 if expired else 3600))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=True)
        .sign(signer_key, hashes.SHA256())  # type: ignore[arg-type]
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return trustme.LeafCert(pem, cert.public_bytes(serialization.Encoding.PEM), [])


def _general(name: str | x509.GeneralName) -> x509.GeneralName:
    if isinstance(name, x509.GeneralName):
        return name
    return x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
