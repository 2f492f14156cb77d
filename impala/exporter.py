"""Serves Prometheus metrics over HTTP. Which ones there are, each service says itself."""

import importlib.metadata

import prometheus_client as prometheus

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of histograms of durations."""


class Exporter:
    """Serves the metrics of a registry until it is closed."""

    def __init__(self, listen: str, registry: prometheus.CollectorRegistry) -> None:
        """Binds the address.

        Args:
          listen: HOST:PORT; port 0 is any free one.
          registry: what is served.

        Raises:
          OSError: it cannot be bound.
        """
        build = prometheus.Info("impala_build", "Versions of what runs.", registry=registry)
        build.info({name: importlib.metadata.version(name) for name in ("impala", "tensorflow")})
        host, _, port = listen.rpartition(":")
        fix = "give HOST:PORT of this machine with a port that is free"
        if not port.isdecimal():
            raise OSError(f"Metrics cannot be served on {listen!r}: {fix}.")
        try:
            self._server, self._thread = prometheus.start_http_server(
                int(port), host.strip("[]"), registry
            )
        except (OSError, OverflowError) as error:
            raise OSError(f"Metrics cannot be served on {listen!r} ({error}): {fix}.") from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
