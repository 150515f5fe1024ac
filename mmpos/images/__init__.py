"""Images as patches: decoded, resized and cut for a vision encoder, with grids known from the size alone."""

from mmpos.images.processor import ImageProcessor, ProcessedImage
from mmpos.images.sizes import ImageSize

__all__ = ["ImageProcessor", "ImageSize", "ProcessedImage"]
