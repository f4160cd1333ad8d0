"""Loads this project's kernels, and puts them into models.

    import warpsmith
    img2gray = warpsmith.load("img2gray")
    report = warpsmith.accelerate(model)

Importing this package imports neither torch nor any Hugging Face library; using it does.
"""

from typing import TYPE_CHECKING

from .loading import load

if TYPE_CHECKING:
    from .acceleration import Report, accelerate, restore

__version__ = "0.1.0"

__all__ = ["Report", "__version__", "accelerate", "load", "restore"]


def __getattr__(name: str):
    if name in ("Report", "accelerate", "restore"):
        from . import acceleration

        return getattr(acceleration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
