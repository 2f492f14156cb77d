"""Writes images as a video file: GIF with Pillow, MP4 with imageio where it is installed."""

import importlib.util
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

_FRAMES_PER_SECOND = 20


def check(path: pathlib.Path) -> None:
    """Checks that a video can be written, before an episode is played for it.

    Raises:
      ValueError: the suffix is unknown, or needs a package that is missing.
    """
    if path.suffix == ".mp4":
        if not all(map(importlib.util.find_spec, ("imageio", "imageio_ffmpeg"))):
            raise ValueError(
                f"{path}: MP4 needs imageio and imageio-ffmpeg, which are not installed. Install "
                "them (pip install imageio imageio-ffmpeg), or give a name that ends in .gif."
            )
    elif path.suffix != ".gif":
        raise ValueError(f"{path} ends in {path.suffix!r}; it must end in .gif or .mp4.")


def write(path: pathlib.Path, images: Iterable[np.ndarray]) -> None:
    """Writes images as they come, 20 per second.

    Args:
      path: a file whose name ends in .gif or .mp4; its directory is made if needed.
      images: at least one, uint8 [H, W, 3].
    """
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mp4":
        _write_mp4(path, images)
    else:
        _write_gif(path, images)


def _write_gif(path: pathlib.Path, images: Iterable[np.ndarray]) -> None:
    import PIL.Image

    pictures = (PIL.Image.fromarray(image) for image in images)
    first = next(pictures)
    with path.open("wb") as file:
        first.save(
            file,
            format="GIF",
            save_all=True,
            append_images=pictures,
            duration=1000 // _FRAMES_PER_SECOND,
            loop=0,
        )


def _write_mp4(path: pathlib.Path, images: Iterable[np.ndarray]) -> None:
    import imageio  # type: ignore[import-not-found, unused-ignore]

    made: Any = imageio.get_writer(path, fps=_FRAMES_PER_SECOND, macro_block_size=1)
    with made as writer:
        for image in images:
            height, width = (size - size % 2 for size in image.shape[:2])  # H.264 wants even sizes
            writer.append_data(image[:height, :width])
