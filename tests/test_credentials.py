"""What tokens, certificates and the file of revoked names allow, without files and without gRPC."""

import contextlib

import pytest

from impala.runtime import credentials
from impala.runtime.credentials import Denied, Names, Role, SecurityError

A, B, ANY = (f"{name}-token-0123456789" for name in ("first", "second", "any"))


def _may(file: str, token: str, actor: str, role: Role = "actor") -> bool:
    tokens = credentials.read_tokens(file.encode())
    with contextlib.suppress(Denied):
        credentials.admit("token", [role], tokens.grants(token), actor, tokens.reserved)
        return True
    return False


def test_a_star_is_the_only_wildcard_of_whole_names() -> None:
    names = Names.matching(["pong-a-*", "b?d", "[x]", "*.host"])
    for name in ("pong-a-", "pong-a-7", "pong-a-b-c", "b?d", "[x]", "a.b.host", "pong-a-\n"):
        assert name in names, name
    for name in ("pong-a", "xpong-a-7", "bad", "x", "ahost", "a.hosts", "B?D", ""):
        assert name not in names, name
    assert "a" not in Names.matching([])


def test_a_reserved_name_belongs_to_its_lines_token() -> None:
    file = f"actor {A} pong-a,pong-a-*\nactor {B} pong-b-*\nactor {ANY}\n"
    may = {
        token: [name for name in ("pong-a", "pong-a-1", "pong-b-1", "x") if _may(file, token, name)]
        for token in (A, B, ANY)
    }
    assert may == {A: ["pong-a", "pong-a-1"], B: ["pong-b-1"], ANY: ["x"]}


def test_who_may_use_a_name_and_what_else_is_told_in_the_refusal() -> None:
    tokens = credentials.read_tokens(f"actor {A} pong-a-*\nactor {ANY}\n".encode())
    for token, told in (
        (A, r"may not be used by the name x\\x1b\[0m: it is for pong-a-\*\."),
        (ANY, r"by the name pong-a-1: it is for any name that is not reserved for another\."),
    ):
        actor = "x\x1b[0m" if token == A else "pong-a-1"
        with pytest.raises(Denied, match=told) as error:
            credentials.admit("token", ["actor"], tokens.grants(token), actor, tokens.reserved)
        assert error.value.is_known
        assert not any(secret in str(error.value) for secret in (A, ANY))


def test_two_lines_with_the_same_names_are_one_identity() -> None:
    file = f"actor {A} pong-a-*\nactor {B} pong-a-*\n"
    assert _may(file, A, "pong-a-1")
    assert _may(file, B, "pong-a-1")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"actor {A} a, b", "Line 2 of the token file has names that cannot be read"),
        (f"actor {A} a,,b", "Line 2 of the token file has names that cannot be read"),
        (f"actor {A} ,", "Line 2 of the token file has names that cannot be read"),
        (f"reader {A} a", "a reader has none"),
        ("actor pong-a-*", "The token in line 2 of the token file has 8 characters"),
    ],
)
def test_refusals_of_names_do_not_tell_the_token(line: str, told: str) -> None:
    with pytest.raises(SecurityError, match=told) as error:
        credentials.read_tokens(f"# names\n{line}\n".encode())
    assert A not in str(error.value)


DOMAIN = "cluster.local"


@pytest.mark.parametrize(
    ("uri", "role", "allowed"),
    [
        ("spiffe://cluster.local/impala/actor", "actor", ["x", "x-1", "y"]),
        ("spiffe://cluster.local/actor", "actor", ["x", "x-1", "y"]),
        ("spiffe://cluster.local/impala/actor/x", "actor", ["x", "x-1"]),
        ("spiffe://cluster.local/impala/evaluator/y", "evaluator", ["y"]),
        ("spiffe://cluster.local/impala/reader/anna", "reader", []),
        ("spiffe://cluster.local/impala/actor/x/y", None, []),
        ("spiffe://cluster.local/impala/actor/", None, []),
        ("spiffe://cluster.local/impala/actor/evaluator", None, []),  # whose is it?
        ("spiffe://cluster.local/impala/operator", None, []),
        ("spiffe://cluster.local", None, []),
        ("spiffe://elsewhere/impala/actor", None, []),
        ("spiffe://cluster.local.elsewhere/actor", None, []),
        ("https://cluster.local/actor", None, []),
        ("actor", None, []),
    ],
)
def test_a_certificate_is_for_a_role_and_maybe_a_name(
    uri: str, role: Role | None, allowed: list[str]
) -> None:
    grants = credentials.certificate_grants(["localhost", uri], DOMAIN)
    assert [grant.role for grant in grants] == ([role] if role else [])
    may = []
    for name in ("x", "x-1", "x-1-2", "x-", "xx", "y") if grants else ():
        try:
            credentials.admit("certificate", [role] if role else [], grants, name)
        except Denied:
            continue
        may.append(name)
    assert may == (["x", "x-1", "x-1-2", "x-", "xx", "y"] if len(allowed) == 3 else allowed)


def test_names_and_certificates_are_revoked_by_line() -> None:
    revoked = credentials.read_revocations(
        "# bad since\tMonday\n\n pong-a-3 \nhäcker *\nspiffe://cluster.local/actor/x\n".encode()
    )
    assert [n in revoked.names for n in ("pong-a-3", "häcker 7", "pong-a-33", "#")] == [1, 1, 0, 0]
    assert revoked.uris == {"spiffe://cluster.local/actor/x"}
    assert "" not in credentials.read_revocations(b"").names


@pytest.mark.parametrize("contents", [b"\xff\xfe", b"ok\na\x00b\n", b"x" * 201])
def test_a_file_of_revoked_names_that_is_none_is_refused(contents: bytes) -> None:
    with pytest.raises(SecurityError, match="file of revoked names"):
        credentials.read_revocations(contents)
