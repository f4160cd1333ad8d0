"""RGB to grayscale with stated formulas: identical bytes on CPU and CUDA."""

from .modules import Img2Gray
from .op import img2gray, last_path
from .reference import img2gray_reference

__all__ = ["Img2Gray", "img2gray", "img2gray_reference", "last_path"]
