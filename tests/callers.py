"""A learner served within a test, and its callers with all they may show: shared by tests."""

import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypedDict, Unpack

import grpc
import messages
import numpy as np
import trustme
from cryptography import x509
from services import WAIT

from deploy.lint import certificates
from impala.runtime.security import ServerSecurity
from impala.types import Parameters
from learner.data.ingest import Ingest
from learner.fleet.accounts import Accounts
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

GOOD_TENSORS = list(messages.message().tensors)
STREAM_METHOD = "/impala.v1.Learner/StreamUnrolls"
TOKENS = {role: f"{role}-token-0123456789" for role in ("actor", "evaluator", "reader")}
OK = "OK"


class Clock:
    """Stands still, until `now` is changed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Learner:
    """A served learner whose ingest is drained by a thread."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.ingest = Ingest(capacity=16)
        self.taken: list[tuple[str, int]] = []
        self.service = messages.service(self.accounts, self.ingest)
        self.server = Server(self.service, "127.0.0.1:0")
        self.address = self.server.start()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(grace=0.0)
        self.ingest.close()
        self._thread.join(WAIT)

    def _take(self) -> None:
        while (arrival := self.ingest.get(timeout=WAIT)) is not None:
            self.taken.append((arrival.actor, arrival.sequence))


class Actor:
    """A client that numbers its messages as the protocol wants."""

    def __init__(self, address: str, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.channel = grpc.insecure_channel(address)
        self.stub = pb_grpc.LearnerStub(self.channel)
        request = messages.join_request(name, incarnation)
        self.fingerprint = self.stub.Join(request, timeout=WAIT).fingerprint
        self.sequence = 0  # the last one that was used up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def next(self, **kw: Any) -> pb.Unrolls:
        self.sequence += 1
        return self.message(self.sequence, **kw)

    def message(self, sequence: int, **kw: Any) -> pb.Unrolls:
        fields = {"fingerprint": self.fingerprint, "actor": self.name}
        fields["incarnation"] = self.incarnation
        if "arrays" not in kw:
            fields["tensors"] = GOOD_TENSORS
        return messages.message(sequence, **{**fields, **kw})


def received(stream: Any, seconds: float = WAIT) -> Iterator[pb.Receipt]:
    """Yields what comes on a stream; cancels it when nothing has come for so many seconds."""
    count = 0
    ended = threading.Event()

    def watch() -> None:
        before = -1
        while count != before:
            before = count
            if ended.wait(seconds):
                return
        stream.cancel()

    threading.Thread(target=watch, daemon=True).start()
    try:
        for each in stream:
            count += 1
            yield each
    finally:
        ended.set()


# Credentials.


def write(path: pathlib.Path, text: str | bytes) -> pathlib.Path:
    """A file that is put in its place at once, as Kubernetes does it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(partial, path)
    return path


def token_file(path: pathlib.Path, *roles: str, suffix: str = "") -> pathlib.Path:
    return write(path, "".join(f"{role} {TOKENS[role]}{suffix}\n" for role in roles))


class Pair(TypedDict):
    """Flags of a certificate and its key."""

    tls_cert: pathlib.Path
    tls_key: pathlib.Path


class ServerFiles(TypedDict, total=False):
    """Flags of the files of a learner's `ServerSecurity`."""

    tls_cert: pathlib.Path
    tls_key: pathlib.Path
    tls_client_ca: pathlib.Path
    token_file: pathlib.Path


def certificate(
    ca: trustme.CA, directory: pathlib.Path, name: str, kind: type[x509.DNSName] | None = None
) -> Pair:
    """Writes a certificate and key for a host name or a spiffe:// identity, or a name of a kind."""
    identity = (
        certificates.issue(ca, name if kind is None else kind(name), expired="expired" in name)
        if "://" in name
        else ca.issue_cert(name)
    )
    stem = name.rpartition("/")[2]
    key = write(directory / f"{stem}.key", identity.private_key_pem.bytes())
    chain = b"".join(blob.bytes() for blob in identity.cert_chain_pems)
    return {"tls_cert": write(directory / f"{stem}.crt", chain), "tls_key": key}


def mutual_tls(ca: trustme.CA, directory: pathlib.Path) -> ServerFiles:
    """Files of a learner whose clients need a certificate of the same authority."""
    pair = certificate(ca, directory, "localhost")
    authority = write(directory / "ca.crt", ca.cert_pem.bytes())
    return {"tls_cert": pair["tls_cert"], "tls_key": pair["tls_key"], "tls_client_ca": authority}


# Who is let in.


@contextmanager
def serving(listen: str = "127.0.0.1:0", **files: Unpack[ServerFiles]) -> Iterator[str]:
    service = messages.service()
    service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)]))
    server = Server(service, listen, ServerSecurity(**files))
    try:
        yield server.start()
    finally:
        server.stop(0.0)


def calls(channel: grpc.Channel, token: str | None = None) -> dict[str, str]:
    """The status of every method, by name."""
    stub = pb_grpc.LearnerStub(channel)
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []

    def stream() -> None:
        list(stub.StreamUnrolls(iter([messages.message(1)]), timeout=WAIT, metadata=metadata))

    def join(role: int) -> Callable[[], object]:
        return lambda: stub.Join(messages.join_request(role=role), timeout=WAIT, metadata=metadata)

    attempts: dict[str, Callable[[], object]] = {
        "join as actor": join(pb.ROLE_ACTOR),
        "join as evaluator": join(pb.ROLE_EVALUATOR),
        "stream": stream,
        "parameters": lambda: stub.GetParameters(
            pb.GetParametersRequest(), timeout=WAIT, metadata=metadata
        ),
        "snapshot": lambda: stub.GetSnapshot(
            pb.GetSnapshotRequest(actor="a"), timeout=WAIT, metadata=metadata
        ),
        "report": lambda: stub.ReportEvaluation(
            pb.Evaluation(
                actor="e",
                learner_incarnation=messages.LEARNER,
                frames=10,
                episodes=[pb.Episode(length=1)],
            ),
            timeout=WAIT,
            metadata=metadata,
        ),
        "status": lambda: stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT, metadata=metadata),
    }
    # Which the service does not offer: who is let in is told so.
    unoffered: dict[str, Callable[[], object]] = {
        "executable": lambda: stub.GetExecutablePolicy(
            pb.GetExecutablePolicyRequest(), timeout=WAIT, metadata=metadata
        ),
        "act": lambda: list(stub.Act(iter([]), timeout=WAIT, metadata=metadata)),
    }
    said = {name: status(attempt) for name, attempt in unoffered.items()}
    return {name: status(attempt) for name, attempt in attempts.items()} | {
        name: OK if code == "FAILED_PRECONDITION" else code for name, code in said.items()
    }


def status(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except grpc.RpcError as error:
        told = any(token in str(error) for token in TOKENS.values())
        return "A SECRET" if told else str(error.code().name)
    return OK


ACTOR = ("join as actor", "stream", "parameters", "executable", "act")
EVALUATOR = ("join as evaluator", "parameters", "snapshot", "report", "executable")
READER = ("parameters", "status")


def only(allowed: Sequence[str], otherwise: str) -> dict[str, str]:
    methods = {*ACTOR, *EVALUATOR, *READER}
    return {name: OK if name in allowed else otherwise for name in methods}


@contextmanager
def secure_channel(
    address: str, ca: trustme.CA | None, client: Pair | None = None
) -> Iterator[grpc.Channel]:
    port = address.rpartition(":")[2]
    pair = (client["tls_key"].read_bytes(), client["tls_cert"].read_bytes()) if client else ()
    roots = ca.cert_pem.bytes() if ca is not None else None
    with grpc.secure_channel(
        f"localhost:{port}", grpc.ssl_channel_credentials(roots, *pair)
    ) as channel:
        yield channel
