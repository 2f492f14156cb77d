"""Who may talk to a learner: certificates and tokens in files, read again when they change.

Nothing here knows gRPC. No secret is ever part of a message or of a representation.
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
    """What a learner asks of those who call it. Without anything, it only listens locally."""

    tls_cert: pathlib.Path | None = None
    """PEM file of the learner's certificate chain: connections are encrypted."""
    tls_key: pathlib.Path | None = None
    """PEM file of its private key."""
    tls_client_ca: pathlib.Path | None = None
    """PEM file of the authorities whose client certificates are asked for. A certificate's URI
    names spiffe://TRUST-DOMAIN/.../ROLE say what its holder may do: actor, evaluator or reader;
    with /NAME behind it, only by that name or NAME-INDEX."""
    trust_domain: str = "cluster.local"
    """Trust domain of the URI names that count."""
    token_file: pathlib.Path | None = None
    """File with a line "ROLE TOKEN [NAMES]" for each token that is good; two of a role while one is
    being replaced. NAMES such as pong-a,pong-a-* are the actors that may show it, and nobody else
    may use these names."""
    revoked_file: pathlib.Path | None = None
    """File with a line for each actor that is refused: its name, in which * stands for anything, or
    a URI name of its certificate. Read again when it changes, as the other files are."""
    insecure: bool = False
    """Listen beyond this host without credentials, or with a token that travels in the clear."""
    open_ports: bool = False
    """Serve health and metrics, which ask for no credentials, beyond this host."""

    def check(self, address: str, *, health: str | None = None, metrics: str | None = None) -> None:
        """Checks the addresses, and that the files are there, go together and are enough for them.

        Args:
          address: HOST:PORT or unix:PATH where credentials are asked for.
          health: HOST:PORT where health alone is served.
          metrics: HOST:PORT where metrics are served.

        Raises:
          SecurityError: says what is missing.
          OSError: an address is none.
        """
        if listen.socket_path(address) is None:
            listen.parse("The learner", address)
        _check_open("Health", health, self.open_ports)
        _check_open("Metrics", metrics, self.open_ports)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SecurityError("tls_client_ca is given without tls_cert and tls_key: give all.")
        if not _TRUST_DOMAIN.fullmatch(self.trust_domain):
            raise SecurityError(
                f"trust_domain is {self.trust_domain!r}: give what stands after spiffe:// and "
                "before the next slash in the names of your certificates."
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
                "give a token file or client certificates (and TLS), or --security.insecure in a "
                "network where everyone may send it what they like."
            )
        if self.tls_cert is None:
            raise SecurityError(
                f"Tokens would travel to {address} in the clear: give tls_cert and tls_key, or "
                "--security.insecure if something else encrypts the connection."
            )


@dataclasses.dataclass(frozen=True)
class ClientSecurity:
    """What an actor shows, and by whom it expects the learner's certificate to be signed."""

    tls: bool = False
    """Encrypt; the learner's certificate must be signed by an authority that this system trusts."""
    tls_ca: pathlib.Path | None = None
    """PEM file of the authorities that sign the learner's certificate (encrypts)."""
    tls_cert: pathlib.Path | None = None
    """PEM file of a client certificate chain (encrypts)."""
    tls_key: pathlib.Path | None = None
    """PEM file of its private key."""
    tls_server_name: str = ""
    """Name that the learner's certificate must have; empty: the host that is dialled."""
    token_file: pathlib.Path | None = None
    """File with a line "ROLE TOKEN [NAMES]" or just a token: the first one is shown."""
    open_ports: bool = False
    """Of an actor: serve metrics, which ask for no credentials, beyond this host."""

    @property
    def is_encrypted(self) -> bool:
        """Whether to speak TLS."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    def check(self, *, metrics: str | None = None) -> None:
        """Checks that the files are there and go together, and where metrics are served.

        Args:
          metrics: HOST:PORT, if they are.

        Raises:
          SecurityError: says what is missing.
          OSError: the address is none.
        """
        _check_open("Metrics", metrics, self.open_ports)
        _check_readable(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)
        _check_tls(self.tls_cert, self.tls_key, self.tls_ca)
        if self.token_file is not None:
            first_token(self.token_file.read_bytes())


class Watched(Generic[T]):
    """What files hold, read again as soon as one of them has changed. Thread-safe.

    Args:
      paths: the files; Kubernetes swaps them under a running process.
      read: makes something of their contents. If it fails for new contents, which may be written
        half, the last good thing stays.
    """

    def __init__(self, paths: Sequence[pathlib.Path], read: Callable[[Sequence[bytes]], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._stamp()  # what was read, for good or bad
        self._told = self._seen  # what the log has said something about
        self._value = read([path.read_bytes() for path in self._paths])

    def get(self) -> T:
        """What the files hold now."""
        with self._lock:
            stamp = self._stamp()
            if stamp is not None and stamp != self._seen:
                names = ", ".join(map(str, self._paths))
                try:
                    self._value = self._read([path.read_bytes() for path in self._paths])
                    self._seen = stamp
                    _log.info("Read again: %s.", names)
                except (OSError, ValueError) as error:
                    if isinstance(error, ValueError):  # an OSError may pass: read again then
                        self._seen = stamp
                    if stamp != self._told:
                        why = error if isinstance(error, SecurityError) else type(error).__name__
                        _log.error(
                            "%s changed and cannot be used, going on as before: %s", names, why
                        )
                self._told = stamp
            return self._value

    def _stamp(self) -> tuple[tuple[int, int, int], ...] | None:
        """Changes with the files; None while one of them is missing."""
        try:
            stats = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)


class Gate:
    """Decides who may do what, from a bearer token, the names in a certificate, or both.

    Args:
      security: what is asked for. If nothing is, everyone who is not revoked may do everything.
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
        """Lets a caller pass, or not.

        Args:
          roles: any of which is enough.
          authorization: "Bearer TOKEN", as the caller sent it, or nothing.
          names: the subject alternative names of its verified certificate.
          actor: name that the caller goes by; None if it has said none.

        Raises:
          Revoked: its certificate, or the actor, was revoked.
          Denied: it has no credential, or none for this or for that name.
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
    """Certificate and key come together and belong together; the authorities are some."""
    if (cert is None) != (key is None):
        given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        raise SecurityError(f"{given} is given without {missing}: give both.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise SecurityError(f"{cert} and {key} cannot be used together: {error.reason}.") from None
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise SecurityError(f"{authorities} holds no certificates: {error.reason}.") from None


def _check_open(what: str, address: str | None, open_ports: bool) -> None:
    """Checks where something is served to whoever asks."""
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
