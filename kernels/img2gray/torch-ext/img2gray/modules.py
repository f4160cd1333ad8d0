"""A step for image pipelines."""

import torch

from .op import Weights, _arguments, img2gray


class Img2Gray(torch.nn.Module):
    """:func:`img2gray` with its keywords fixed, for ``nn.Sequential`` and transform lists.

    ``num_output_channels=3`` repeats the gray channel (a view, no copy), for models that want it.
    It replaces no class of a model, so it is not one of the ``layers`` that ``kernelize`` takes.

    Example::

        to_gray = Img2Gray(layout="HWC", weights="pil")
        gray = to_gray(frames)
    """

    def __init__(
        self,
        *,
        layout: str = "CHW",
        weights: Weights = "bt601",
        channel_order: str = "RGB",
        keepdim: bool = True,
        num_output_channels: int = 1,
    ):
        super().__init__()
        _arguments(layout, weights, channel_order, keepdim)  # refuses bad ones now
        if type(num_output_channels) is not int or num_output_channels not in (1, 3):
            raise ValueError(f"num_output_channels: must be 1 or 3, got {num_output_channels!r}")
        if num_output_channels == 3 and not keepdim:
            raise ValueError("num_output_channels: 3 needs keepdim=True")
        self.layout = layout
        self.weights = weights if isinstance(weights, str) else tuple(map(float, weights))
        self.channel_order = channel_order
        self.keepdim = keepdim
        self.num_output_channels = num_output_channels

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        gray = img2gray(
            image,
            layout=self.layout,
            weights=self.weights,
            channel_order=self.channel_order,
            keepdim=self.keepdim,
        )
        if self.num_output_channels == 1:
            return gray
        shape = list(gray.shape)
        shape[-1 if self.layout == "HWC" else -3] = 3
        return gray.expand(shape)

    def extra_repr(self) -> str:
        return (
            f"layout={self.layout!r}, weights={self.weights!r}, channel_order={self.channel_order!r}, "
            f"keepdim={self.keepdim}, num_output_channels={self.num_output_channels}"
        )
