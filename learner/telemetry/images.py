"""Images of what an agent sees, for TensorBoard."""

import numpy as np
import tree

from impala.types import Nest

_ROWS = 4  # the newest, side by side: as many as are stacked, as a rule
_LEAST_HEIGHT = 64  # pixels; smaller images are enlarged
_MOST_CHANNELS = 16
_COLOURS = (1, 3)  # channels of a picture; others are shown beside each other


def of_observations(observation: Nest) -> dict[str, np.ndarray]:
    """Returns the newest observations of one environment as images, by the name of their leaf.

    Args:
      observation: [T + 1, B, ...]; leaves of whole numbers of the shape [..., height, width] or
        [..., height, width, channels] are images.

    Returns:
      uint8 [N, height, width, 1 or 3], the last one the newest.
    """
    found = {}
    for path, leaf in tree.flatten_with_path({"observation": observation}):
        rows = leaf[-_ROWS:, 0]
        if rows.ndim == 3:
            rows = rows[..., np.newaxis]
        if rows.dtype.kind in "bu" and rows.ndim == 4 and rows.shape[-1] <= _MOST_CHANNELS:
            found["/".join(map(str, path))] = _shown(rows)
    return found


def _shown(rows: np.ndarray) -> np.ndarray:
    """Returns images [N, height, width, channels] as they are shown."""
    if rows.shape[-1] not in _COLOURS:
        rows = np.concatenate(np.split(rows, rows.shape[-1], axis=-1), axis=2)
    values = rows.astype(np.int64)
    if values.max(initial=0) <= 1:  # on or off
        values *= 255
    factor = -(-_LEAST_HEIGHT // rows.shape[1])
    enlarged = values.repeat(factor, axis=1).repeat(factor, axis=2)
    return np.clip(enlarged, 0, 255).astype(np.uint8)
