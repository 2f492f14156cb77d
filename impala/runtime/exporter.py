"""Serves a registry of Prometheus metrics over HTTP."""

import contextlib
import importlib.metadata
import socket
import wsgiref.simple_server

import prometheus_client as prometheus

from impala.runtime import installation, listen

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of histograms of durations."""

_SILENT_SECONDS = 5.0  # after which a connection is closed


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def handle(self) -> None:
        """Answers. Of a caller that sends nothing, or has gone before, nothing is printed."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Logs no requests."""


class Exporter:
    """Serves the metrics of a registry until it is closed, from threads that end with the process.

    Args:
      address: HOST:PORT; port 0 is any free one. 0.0.0.0 stands for all addresses, also of IPv6.
      registry: the metrics to serve.

    Raises:
      OSError: the address cannot be bound.
    """

    def __init__(self, address: str, registry: prometheus.CollectorRegistry) -> None:
        build = prometheus.Info("impala_build", "Versions of what runs.", registry=registry)
        tensorflow = importlib.metadata.version("tensorflow")
        build.info({"impala": installation.VERSION, "tensorflow": tensorflow})
        host, port = listen.parse("Metrics", address)
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():
            host = "::"
        try:
            self._server, self._thread = prometheus.start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"Metrics cannot be served on {address!r} ({error}).") from error
        self._server.RequestHandlerClass = _Handler
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
