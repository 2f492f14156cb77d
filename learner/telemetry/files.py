"""Sinks that write rows of telemetry into files of the log directory: JSON lines, TensorBoard."""

import pathlib
import time

import numpy as np
import tensorflow as tf

from impala.logdir import json_lines
from impala.logdir.rows import Row
from learner.telemetry.sinks import Histograms, Images, Sink

_LARGEST = 1e38  # TensorBoard stores float32, and subtracts values...
_LAST_STEP = 2**63 - 1  # ...and steps as int64


class TensorBoard(Sink):
    """Writes rows as TensorBoard scalars over frames, and histograms, into LOGDIR/tensorboard."""

    def __init__(self, logdir: pathlib.Path):
        self._writer = tf.summary.create_file_writer(str(logdir / "tensorboard"))

    def write(self, row: Row) -> None:
        """Writes one row and flushes it."""
        # All in one: `tf.summary.scalar` takes a millisecond and the GIL for each.
        scalars = tf.compat.v1.Summary()
        for name, value in row.items():
            bounded = max(-_LARGEST, min(float(value), _LARGEST))
            scalars.value.add(tag=name, simple_value=bounded)
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(
                scalars.SerializeToString(), step=_step(row["frames"])
            )
        self._writer.flush()

    def write_histograms(self, histograms: Histograms, frames: float) -> None:
        """Writes the histograms of a row and flushes them."""
        with self._writer.as_default():
            for name, values in histograms.items():
                finite = np.asarray(values[np.isfinite(values)], np.float64)
                bounded = np.clip(finite, -_LARGEST, _LARGEST)
                tf.summary.histogram(f"histogram/{name}", bounded, step=_step(frames))
        self._writer.flush()

    def write_images(self, images: Images, frames: float) -> None:
        """Writes images and flushes them."""
        with self._writer.as_default():
            for name, values in images.items():
                step, most = _step(frames), len(values)
                tf.summary.image(f"image/{name}", values, step=step, max_outputs=most)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class JsonLines(Sink):
    """Writes rows to LOGDIR/metrics.jsonl, to which a resumed run appends."""

    def __init__(self, logdir: pathlib.Path):
        self._file = json_lines.Appender(logdir / "metrics.jsonl")

    def write(self, row: Row) -> None:
        """Writes one row."""
        self._file.write({"time": time.time(), **row})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step(frames: float) -> np.int64:
    # As a NumPy number, like all that is written: TensorFlow keeps each of Python's for ever.
    return np.int64(min(int(frames), _LAST_STEP))
