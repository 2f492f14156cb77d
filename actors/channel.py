"""The gRPC channel to the learner (certificates, tokens, options), and a client for its status.

Certificates and tokens are read again when their files change.
"""

import time
from typing import Self

import grpc

from actors.session import Failure, LearnerError, LearnerRefused
from impala.runtime.credentials import first_token
from impala.runtime.security import ClientSecurity, Watched
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

NO_SECURITY = ClientSecurity()
_STATUS_SECONDS = 10.0
_STALE_SECONDS = 5.0  # after which a channel without a learner is replaced

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.enable_http_proxy", 0),  # http_proxy of a cluster leads out of it
    ("grpc.use_local_subchannel_pool", 1),  # clients in one process have a connection each
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),  # JoinReply.max_message_bytes is checked before
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # the backoff that counts is the session's
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def failure(error: grpc.RpcError) -> Failure:
    """Returns why a call failed."""
    return Failure(error.code().name, error.details() or "")


class LearnerChannel:
    """A channel to the learner that connects on first use.

    Args:
      learner: host:port or unix:PATH.
      security: the credentials to present, and how to verify the learner.

    Raises:
      SecurityError: the files of `security` cannot be used.
    """

    def __init__(self, learner: str, security: ClientSecurity = NO_SECURITY) -> None:
        security.check()
        self._learner = learner
        self._security = security
        ca, cert, key = security.tls_ca, security.tls_cert, security.tls_key
        self._files = Watched([path for path in (ca, cert, key) if path is not None], list)
        self._token: Watched[str] | None = None
        if security.token_file is not None:
            self._token = Watched([security.token_file], lambda contents: first_token(*contents))
        self._before: grpc.Channel | None = None  # that the present one has replaced
        self._is_closed = False
        self._dial()

    def renew(self, *, is_lost: bool = False) -> None:
        """Opens a new channel if the certificates have changed since the last one was opened.

        The last one stays open until the next time, as another thread may be about to call through
        it: gRPC raises no RpcError, but ValueError, if a channel is closed before a call.

        Args:
          is_lost: there was no learner to call. A channel older than 5 s is then replaced anyway:
            it may ask for the address of a name again after two minutes, whatever its options say.
        """
        is_stale = is_lost and time.monotonic() > self._dialled_at + _STALE_SECONDS
        if is_stale or self._files.get() is not self._dialled:
            if self._before is not None:
                self._before.close()
            self._before = self._channel
            self._dial()

    def metadata(self) -> list[tuple[str, str]]:
        """Returns the metadata of a call: the token, as currently in its file.

        This is not an interceptor: one that makes a call while its channel is closed crashes gRPC.
        """
        if self._token is None:
            return []
        return [("authorization", f"Bearer {self._token.get()}")]

    def close(self) -> None:
        """Cancels the calls in progress and closes the channel."""
        self._is_closed = True
        for channel in (self._before, self._channel):
            if channel is not None:
                channel.close()

    def _dial(self) -> None:
        security = self._security
        self._dialled, self._dialled_at = self._files.get(), time.monotonic()
        options = list(_OPTIONS)
        if security.tls_server_name:
            options.append(("grpc.ssl_target_name_override", security.tls_server_name))
        if security.is_encrypted:
            rest = list(self._dialled)
            ca = rest.pop(0) if security.tls_ca is not None else None
            cert, key = rest if rest else (None, None)
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            self._channel = grpc.secure_channel(self._learner, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(self._learner, options=options)
        if self._is_closed:  # meanwhile, by another thread
            self._channel.close()
        self.stub = pb_grpc.LearnerStub(self._channel)
        self.stream_of_bytes = self._channel.stream_stream(  # of messages that are serialised
            "/impala.v1.Learner/StreamUnrolls", response_deserializer=pb.Receipt.FromString
        )


class StatusClient(LearnerChannel):
    """Asks for the status of a learner's run, with a reader's credentials. A context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self) -> pb.RunStatus:
        """Returns the current status.

        Raises:
          LearnerRefused: the learner refused, and would refuse again.
          LearnerError: no answer; a later attempt may get one.
        """
        self.renew()
        try:
            return self.stub.GetStatus(
                pb.GetStatusRequest(), timeout=_STATUS_SECONDS, metadata=self.metadata()
            )
        except grpc.RpcError as error:
            why = failure(error)
            if why.is_refusal:
                raise LearnerRefused(
                    f"no status of the learner at {self._learner}: {why}"
                ) from None
            raise LearnerError(
                f"no status of the learner at {self._learner}: it does not answer ({why}). The "
                "file `address` in the log directory of a run says where its learner listens."
            ) from None
