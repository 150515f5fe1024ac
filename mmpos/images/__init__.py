"""Images as patches: decoded, resized and cut for a vision encoder, with grids known from the size alone."""

from mmpos.images.decode import ImageSize
from mmpos.images.processor import ImageProcessor, ProcessedImage

__all__ = ["ImageProcessor", "ImageSize", "ProcessedImage"]
