"""Authenticates callers of a learner by certificates and tokens in files that are reloaded.

Nothing here uses gRPC. No secret appears in a message or a representation.
"""

import dataclasses
import logging
import pathlib
import re
import ssl
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from impala.runtime import credentials, listen
from impala.runtime.credentials import (
    Denied,
    Revocations,
    Revoked,
    Role,
    SecurityError,
    Tokens,
    first_token,
    read_revocations,
    read_tokens,
)
from impala.runtime.printable import printable

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")


@dataclasses.dataclass(frozen=True)
class ServerSecurity:
    """Credentials that a learner requires. Without any, it only listens on this host."""

    tls_cert: pathlib.Path | None = None
    """PEM file of the learner's certificate chain; enables TLS."""
    tls_key: pathlib.Path | None = None
    """PEM file of its private key."""
    tls_client_ca: pathlib.Path | None = None
    """PEM file of the authorities that sign client certificates, which are then required. A
    certificate's URI names spiffe://TRUST-DOMAIN/.../ROLE give its holder a role: actor, evaluator
    or reader; with /NAME appended, only for the name NAME or NAME-INDEX."""
    trust_domain: str = "cluster.local"
    """Trust domain of the accepted URI names."""
    token_file: pathlib.Path | None = None
    """File with a line "ROLE TOKEN [NAMES]" for each valid token; two of a role while one is being
    replaced. NAMES such as pong-a,pong-a-* are the actor names that the token is for, and no other
    token may be used for these names. With tls_client_ca, callers need both."""
    revoked_file: pathlib.Path | None = None
    """File with a line for each revoked actor: its name, in which * matches any characters, or a
    URI name of its certificate. It is reloaded when it changes, as are the other files."""
    insecure: bool = False
    """Listen beyond this host without credentials, or with tokens sent unencrypted."""
    open_ports: bool = False
    """Serve health and metrics, which need no credentials, beyond this host."""
    open_peers: bool = False
    """Let peers reach each other, at a port of all interfaces and without credentials: whoever
    reaches it can do what this process can. For a network where nobody else does."""

    def check(
        self,
        address: str,
        *,
        health: str | None = None,
        metrics: str | None = None,
        has_peers: bool = False,
    ) -> None:
        """Checks that the files exist, match, and suffice for the addresses.

        Args:
          address: HOST:PORT or unix:PATH where credentials are required.
          health: HOST:PORT where only health is served.
          metrics: HOST:PORT where metrics are served.
          has_peers: whether it learns together with others.

        Raises:
          SecurityError: names what is missing.
          OSError: an address is invalid.
        """
        if has_peers and not self.open_peers:
            raise SecurityError(
                "TensorFlow connects peers without credentials or encryption, at a port of all "
                "interfaces of this host: give --security.open-peers in a network where nobody "
                "else reaches it."
            )
        if listen.socket_path(address) is None:
            listen.parse("The learner", address)
        _check_open("Health", health, self.open_ports)
        _check_open("Metrics", metrics, self.open_ports)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SecurityError(
                "--security.tls-client-ca is given without --security.tls-cert and "
                "--security.tls-key: give all."
            )
        if not _TRUST_DOMAIN.fullmatch(self.trust_domain):
            raise SecurityError(
                f"--security.trust-domain is {self.trust_domain!r}: give what stands after "
                "spiffe:// and before the next slash in the names of your certificates."
            )
        files = (self.tls_cert, self.tls_key, self.tls_client_ca)
        _check_readable(*files, self.token_file, self.revoked_file)
        _check_tls(*files)
        if self.token_file is not None:
            read_tokens(self.token_file.read_bytes())
        if self.revoked_file is not None:
            read_revocations(self.revoked_file.read_bytes())
        if self.insecure or listen.is_local(address):
            return
        if self.tls_client_ca is None and self.token_file is None:
            raise SecurityError(
                f"Without credentials the learner listens on this host only, not on {address}: "
                "give --security.token-file or --security.tls-client-ca (with --security.tls-cert "
                "and --security.tls-key), or --security.insecure in a network where everyone may "
                "send it what they like."
            )
        if self.tls_cert is None:
            raise SecurityError(
                f"Tokens would travel to {address} in the clear: give --security.tls-cert and "
                "--security.tls-key, or --security.insecure if something else encrypts the "
                "connection."
            )


@dataclasses.dataclass(frozen=True)
class ClientSecurity:
    """Credentials to present to the learner, and how to verify its certificate."""

    tls: bool = False
    """Use TLS; the learner's certificate must be signed by an authority that this system trusts."""
    tls_ca: pathlib.Path | None = None
    """PEM file of the authorities that sign the learner's certificate; enables TLS."""
    tls_cert: pathlib.Path | None = None
    """PEM file of a client certificate chain; enables TLS."""
    tls_key: pathlib.Path | None = None
    """PEM file of its private key."""
    tls_server_name: str = ""
    """Name that the learner's certificate must have; empty: the host of the address."""
    token_file: pathlib.Path | None = None
    """File with a line "ROLE TOKEN [NAMES]" or just a token; the first one is presented."""
    open_ports: bool = False
    """For `impala actor` alone: serve its metrics, which need no credentials, beyond this host."""

    @property
    def is_encrypted(self) -> bool:
        """Returns whether to use TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    def check(self, *, metrics: str | None = None) -> None:
        """Checks that the files exist and match, and where metrics are served.

        Args:
          metrics: HOST:PORT, if metrics are served.

        Raises:
          SecurityError: names what is missing.
          OSError: the address is invalid.
        """
        _check_open("Metrics", metrics, self.open_ports)
        _check_readable(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)
        _check_tls(self.tls_cert, self.tls_key, self.tls_ca)
        if self.token_file is not None:
            first_token(self.token_file.read_bytes())


class Watched(Generic[T]):
    """Contents of files, reloaded as soon as one of them has changed. Thread-safe.

    Args:
      paths: the files, which may be replaced at any time, as Kubernetes does.
      read: parses their contents. If it fails for new contents, which may be incomplete, the last
        valid result is kept.
    """

    def __init__(self, paths: Sequence[pathlib.Path], read: Callable[[Sequence[bytes]], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._stamp()  # of the contents read last, valid or not
        self._told = self._seen  # of the contents logged last
        self._value = read([path.read_bytes() for path in self._paths])

    def get(self) -> T:
        """Returns the parsed contents of now."""
        with self._lock:
            stamp = self._stamp()
            if stamp is not None and stamp != self._seen:
                names = ", ".join(map(str, self._paths))
                try:
                    self._value = self._read([path.read_bytes() for path in self._paths])
                    self._seen = stamp
                    _log.info("Read again: %s.", names)
                except (OSError, ValueError) as error:
                    if isinstance(error, ValueError):  # an OSError may be temporary
                        self._seen = stamp
                    if stamp != self._told:
                        why = error if isinstance(error, SecurityError) else type(error).__name__
                        _log.error(
                            "%s changed and cannot be used, going on as before: %s", names, why
                        )
                self._told = stamp
            return self._value

    def _stamp(self) -> tuple[tuple[int, int, int], ...] | None:
        """Returns a value that changes with the files; None while one is missing."""
        try:
            stats = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)


class Gate:
    """Authorises calls by a bearer token, the names in a certificate, or both.

    Args:
      security: the required credentials. Without any, everyone who is not revoked is allowed.
    """

    def __init__(self, security: ServerSecurity) -> None:
        self._asks_certificates = security.tls_client_ca is not None
        self._trust_domain = security.trust_domain
        self._tokens: Watched[Tokens] | None = None
        if security.token_file is not None:
            self._tokens = Watched([security.token_file], lambda contents: read_tokens(*contents))
        self._revoked: Watched[Revocations] | None = None
        if security.revoked_file is not None:
            self._revoked = Watched(
                [security.revoked_file], lambda contents: read_revocations(*contents)
            )

    def admit(
        self,
        roles: Collection[Role],
        authorization: str,
        names: Sequence[str],
        actor: str | None = None,
    ) -> None:
        """Checks that a caller is allowed.

        Args:
          roles: any of them is sufficient.
          authorization: "Bearer TOKEN" as the caller sent it, or empty.
          names: the subject alternative names of its verified certificate.
          actor: the caller's name; None if it has given none.

        Raises:
          Revoked: its certificate, or the actor, was revoked.
          Denied: it has no credential, or none for this role or name.
        """
        if self._asks_certificates:
            grants = credentials.certificate_grants(names, self._trust_domain)
            credentials.admit("certificate", roles, grants, actor)
        if self._tokens is not None:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer" or not token:
                raise Denied(
                    "This learner asks for a token: give --security.token-file.", is_known=False
                )
            tokens = self._tokens.get()
            credentials.admit("token", roles, tokens.grants(token), actor, tokens.reserved)
        if self._revoked is not None:
            revoked = self._revoked.get()
            if actor is not None and actor in revoked.names:
                raise Revoked(f"The name {printable(actor)}")
            if not revoked.uris.isdisjoint(names):
                raise Revoked("This certificate")


def _check_tls(
    cert: pathlib.Path | None, key: pathlib.Path | None, authorities: pathlib.Path | None
) -> None:
    """Checks that certificate and key are both given and match, and that authorities exist."""
    if (cert is None) != (key is None):
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise SecurityError(
            f"--security.tls-{given} is given without --security.tls-{missing}: give both."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key, password=lambda: b"")  # or it would be asked for
    except ssl.SSLError as error:
        why = error.reason or "both must be PEM files, the key without a passphrase"
        raise SecurityError(f"{cert} and {key} cannot be used together: {why}.") from None
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise SecurityError(f"{authorities} holds no certificates: {error.reason}.") from None


def _check_open(what: str, address: str | None, open_ports: bool) -> None:
    """Checks where something is served without credentials."""
    if address is None:
        return
    listen.parse(what, address)
    if not open_ports and not listen.is_local(address):
        raise SecurityError(
            f"{what} would be served on {address} to whoever reaches it, without credentials: give "
            "an address of this host, or --security.open-ports in a network where everyone may "
            "read it."
        )


def _check_readable(*paths: pathlib.Path | None) -> None:
    for path in paths:
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise SecurityError(f"{path} cannot be read: {error.strerror}.") from None
