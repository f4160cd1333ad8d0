"""Loads this project's kernels.

    import warpsmith
    img2gray = warpsmith.load("img2gray")

Importing this package imports neither torch nor any Hugging Face library; `load` does.
"""

from .loading import load

__version__ = "0.1.0"

__all__ = ["__version__", "load"]
