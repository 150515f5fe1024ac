"""Image processing: decode, resize and cut images into patches; grids follow from the image size alone."""

from mmpos.images.decode import ImageSize
from mmpos.images.processor import ImageProcessor, ProcessedImage

__all__ = ["ImageProcessor", "ImageSize", "ProcessedImage"]
