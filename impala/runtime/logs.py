"""Logging to standard error, as text or as JSON lines."""

import json
import logging
import sys
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class _CurrentStderr(logging.StreamHandler[Any]):
    """Writes to the current sys.stderr, which a live console view replaces."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object per record, for collectors of logs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def say_failure(message: str) -> None:
    """Says on standard error why a command ends; as a record, where logs are JSON."""
    handlers = logging.getLogger().handlers
    if any(isinstance(handler.formatter, _JsonFormatter) for handler in handlers):
        logging.getLogger("impala").error(message)
    else:
        print(f"impala: {message}", file=sys.stderr)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    logging.getLogger("impala").critical("%s", error, exc_info=(kind, error, trace))


def log_to_stderr(log_format: LogFormat = "text") -> None:
    """Sets up logging for a command."""
    handler = _CurrentStderr()
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
        sys.excepthook = _log_uncaught
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[handler],
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
