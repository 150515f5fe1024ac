"""A guard around decoders: whatever they raise over a bad file becomes one error, and half an image is no image."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.images.backends import pillow

__all__ = ["guarded"]


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Inside, Pillow refuses truncated files, and errors of any decoder come out as errors of mmpos.

    Any exception is the file's fault: decoders raise OSError, SyntaxError, ValueError, struct.error and more over it.
    """
    image_module = pillow()
    try:
        with _whole_images:
            yield
    except (MmposError, ImportError, MemoryError):
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise LimitExceededError(f"image: got a {what} over Pillow's own limit ({error})") from error
    except Exception as error:
        raise InvalidInputError(f"image: got a truncated or corrupt {what}, want a whole one ({error})") from error


class _WholeImages:
    """While a thread is inside, PIL.ImageFile.LOAD_TRUNCATED_IMAGES is off: it would let half-grey images pass.

    Pillow has this one global switch only, so the first thread in turns it off and the last one out restores it.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        from PIL import ImageFile

        with self._lock:
            if not self._inside:
                self._before = ImageFile.LOAD_TRUNCATED_IMAGES
                ImageFile.LOAD_TRUNCATED_IMAGES = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        from PIL import ImageFile

        with self._lock:
            self._inside -= 1
            if not self._inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_whole_images = _WholeImages()
