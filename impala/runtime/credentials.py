"""Credentials: what tokens and certificates allow, for which actor names, and revocations.

Nothing here reads files or uses gRPC. No secret appears in a message or a representation.
"""

import dataclasses
import fnmatch
import hashlib
import re
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from impala.runtime.printable import printable

Role = Literal["actor", "evaluator", "reader"]
ROLES: frozenset[Role] = frozenset(typing.get_args(Role))

_SHORTEST_TOKEN = 16  # characters
_MAX_NAME = 200  # characters of an actor's name
_SPIFFE = "spiffe://"


class SecurityError(ValueError):
    """Files of certificates or tokens are missing, do not match, or have invalid contents."""


class Denied(Exception):
    """A caller is not allowed to do what it asks for.

    Args:
      reason: the message for the caller.
      is_known: whether the caller has presented a credential that is valid for something else.
    """

    def __init__(self, reason: str, is_known: bool) -> None:
        super().__init__(reason)
        self.is_known = is_known


class Revoked(Denied):
    """The caller's name or certificate was revoked, although it would otherwise be allowed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} has been revoked at this learner.", is_known=True)


@dataclasses.dataclass(frozen=True)
class Names:
    """A set of actor names.

    Args:
      text: the set as written in the file.
      pattern: matches the names in the set.
    """

    text: str
    pattern: re.Pattern[str]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.pattern.match(name) is not None

    @classmethod
    def matching(cls, patterns: Sequence[str]) -> "Names":
        """Returns the names that match any of these patterns, in which * matches any characters."""
        if not patterns:
            return cls("none", re.compile(r"(?!)"))
        # Of fnmatch's wildcards, only * is one here.
        translated = [
            fnmatch.translate(re.sub(r"([?\[])", r"[\1]", pattern)) for pattern in patterns
        ]
        return cls(",".join(patterns), re.compile("|".join(translated)))

    @classmethod
    def of_process(cls, name: str) -> "Names":
        """Returns this name, alone or followed by an index as for several processes."""
        return cls(f"{name} or {name}-INDEX", re.compile(rf"{re.escape(name)}(-[0-9]+)?\Z"))


class Grant(NamedTuple):
    """The rights of a credential."""

    role: Role
    names: Names | None  # of actors and evaluators; None: every name that is not reserved


class Token(NamedTuple):
    """A line of a token file."""

    digest: bytes
    grant: Grant


class Tokens:
    """The valid tokens.

    Args:
      tokens: any number; two with the same names are one identity, for replacing one.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._grants: dict[bytes, list[Grant]] = {}  # by digest, of which time reveals nothing
        for token in tokens:
            self._grants.setdefault(token.digest, []).append(token.grant)
        named = [token.grant.names.text for token in tokens if token.grant.names is not None]
        self.reserved = Names.matching(",".join(named).split(",") if named else ())
        """Names that only tokens listing them may use."""

    def grants(self, token: str) -> list[Grant]:
        """Returns the rights of a token; none if it is invalid."""
        return self._grants.get(_digest(token), [])


class Revocations(NamedTuple):
    """The revoked names and certificates."""

    names: Names
    uris: frozenset[str]  # of certificates


def certificate_grants(names: Iterable[str], trust_domain: str) -> list[Grant]:
    """Returns the rights of a certificate: spiffe://TRUST-DOMAIN/.../ROLE, or .../ROLE/NAME.

    Args:
      names: its subject alternative names.
      trust_domain: names of other domains give no rights.
    """
    prefix = f"{_SPIFFE}{trust_domain}/"
    grants = []
    for name in names:
        if not name.startswith(prefix):
            continue
        before, last = ["", *name.removeprefix(prefix).split("/")][-2:]
        if before in ROLES and last in ROLES:
            continue  # an actor whose name is evaluator
        for role in ROLES:
            if last == role:
                grants.append(Grant(role, names=None))
            elif before == role and last:
                grants.append(Grant(role, Names.of_process(last)))
    return grants


def admit(
    what: str,
    roles: Collection[Role],
    grants: Sequence[Grant],
    actor: str | None = None,
    reserved: Names | None = None,
) -> None:
    """Checks that a caller's credential allows what it asks for.

    Args:
      what: kind of the credential.
      roles: any of them is sufficient.
      grants: the rights of the credential.
      actor: the caller's name; None if it has given none.
      reserved: names that need a grant listing them.

    Raises:
      Denied: the credential gives no right, not this one, or not for this name.
    """
    if not grants:
        raise Denied(f"This {what} is not known here.", is_known=False)
    fitting = [grant for grant in grants if grant.role in roles]
    if not fitting:
        has = sorted({grant.role for grant in grants})
        raise Denied(
            f"This {what} is for {' and '.join(has)}; here {' or '.join(sorted(roles))} is needed.",
            is_known=True,
        )
    if actor is None:
        return
    is_reserved = reserved is not None and actor in reserved
    if any(not is_reserved if each.names is None else actor in each.names for each in fitting):
        return
    allowed = " or ".join(
        "any name that is not reserved for another" if each.names is None else each.names.text
        for each in fitting
    )
    raise Denied(
        f"This {what} may not be used by the name {printable(actor)}: it is for {allowed}.",
        is_known=True,
    )


def read_tokens(contents: bytes) -> Tokens:
    """Parses lines ROLE TOKEN [NAMES]; a comment line begins with #.

    NAMES are patterns separated by commas, in which * matches any characters.

    Raises:
      SecurityError: names the line, never its contents.
    """
    tokens = []
    for number, line in enumerate(_lines(contents), start=1):
        if not line:
            continue
        role, *rest = line.split()
        if role not in ROLES:
            raise SecurityError(
                f"Line {number} of the token file begins with no role: write ROLE TOKEN [NAMES], "
                f"where ROLE is one of {', '.join(sorted(ROLES))}."
            )
        digest = _digest(_checked(rest[0] if rest else "", number))
        patterns = rest[1].split(",") if rest[1:] else []
        if len(rest) > 2 or not all(patterns) or (patterns and role == "reader"):
            raise SecurityError(
                f"Line {number} of the token file has names that cannot be read: write ROLE TOKEN "
                "NAMES, with commas and no spaces between NAMES; a reader has none."
            )
        tokens.append(Token(digest, Grant(role, Names.matching(patterns) if patterns else None)))
    if not tokens:
        raise SecurityError("The token file holds no token.")
    return Tokens(tokens)


def first_token(contents: bytes) -> str:
    """Returns the first token of lines ROLE TOKEN [NAMES] or TOKEN.

    Raises:
      SecurityError: there is none.
    """
    for number, line in enumerate(_lines(contents), start=1):
        if line:
            first, *rest = line.split()
            return _checked(rest[0] if rest and first in ROLES else first, number)
    raise SecurityError("The token file holds no token.")


def read_revocations(contents: bytes) -> Revocations:
    """Parses lines that are a name, in which * matches any characters, or a spiffe:// URI.

    An empty file revokes nobody; a comment line begins with #.

    Raises:
      SecurityError: names the line.
    """
    try:
        lines = [line.strip() for line in contents.decode("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise SecurityError("The file of revoked names is not plain text.") from None
    for number, line in enumerate(lines, start=1):
        is_long = len(line) > _MAX_NAME and not line.startswith(_SPIFFE)
        if (is_long or not line.isprintable()) and not line.startswith("#"):
            raise SecurityError(
                f"Line {number} of the file of revoked names is none: write a name of at most "
                f"{_MAX_NAME} printable characters, in which * stands for any, or a spiffe:// URI."
            )
    lines = [line for line in lines if line and not line.startswith("#")]
    uris = frozenset(line for line in lines if line.startswith(_SPIFFE))
    return Revocations(Names.matching([line for line in lines if line not in uris]), uris)


def _lines(contents: bytes) -> list[str]:
    """Returns the lines without comments; "" for an empty line."""
    try:
        lines = contents.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise SecurityError("The token file is not plain text.") from None
    return ["" if line.lstrip().startswith("#") else line.strip() for line in lines]


def _checked(token: str, number: int) -> str:
    if len(token) < _SHORTEST_TOKEN:
        raise SecurityError(
            f"The token in line {number} of the token file has {len(token)} characters; it must "
            f"have {_SHORTEST_TOKEN} or more and no spaces: openssl rand -hex 32 makes a good one."
        )
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
