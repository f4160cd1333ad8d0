"""RGB to gray with the weights of torchvision, truncated for integers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

import warpsmith

from ..case import (
    BUILTIN,
    COMPILE,
    EAGER,
    MAX_AUTOTUNE,
    OURS,
    PEER,
    Case,
    Provider,
    compiled,
    largest_difference,
    ready,
    relative_error,
    two_roundings,
)
from ..models import FRAMES

RED, GREEN, BLUE = WEIGHTS = (0.2989, 0.587, 0.114)
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "float16": torch.float16}

# (dtype, layout, batch, frame)
PUBLISHED_BASELINES = [
    ("uint8", "HWC", 1, "1080p"),
    ("uint8", "HWC", 16, "1080p"),
    ("uint8", "HWC", 1, "4K"),
    ("uint8", "HWC", 16, "4K"),
    ("uint8", "HWC", 64, "224"),
    ("float32", "CHW", 64, "224"),
    ("float16", "CHW", 64, "224"),
    ("uint8", "CHW", 64, "224"),
]
GPU_SHAPES = [
    *PUBLISHED_BASELINES,
    ("uint8", "CHW", 16, "4K"),
    ("float32", "CHW", 512, "224"),
    *(
        ("uint8", "HWC", batch, frame)
        for batch, frame in itertools.product((1, 8, 32), ("512", "1024", "4096"))
    ),
]
CPU_SHAPES = [
    ("uint8", "HWC", 1, "1080p"),
    ("uint8", "HWC", 1, "4K"),
    ("uint8", "HWC", 64, "224"),
    ("uint8", "CHW", 64, "224"),
    ("float32", "CHW", 64, "224"),
]


def cases(device: str) -> Iterator[Case]:
    for shape in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        yield case(device, *shape)


def case(device: str, dtype_name: str, layout: str, batch: int, frame: str) -> Case:
    dtype, (height, width) = DTYPES[dtype_name], FRAMES[frame]
    channels_last = layout == "HWC"
    shape = (batch, height, width, 3) if channels_last else (batch, 3, height, width)
    channel = -1 if channels_last else 1

    def make_inputs() -> tuple:
        if dtype == torch.uint8:
            return (torch.randint(0, 256, shape, dtype=dtype, device=device),)
        return (torch.rand(shape, device=device).to(dtype),)

    def reference(image: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64, device=image.device)
        return torch.tensordot(ends(image).double(), weights, dims=([channel], [0]))

    def ends(images: torch.Tensor) -> torch.Tensor:
        return images[[0, -1]]

    integral = dtype == torch.uint8
    return Case(
        group=f"{dtype_name} {layout}",
        name=f"{frame} x{batch}",
        make_inputs=make_inputs,
        reference=reference,
        select=lambda gray: ends(gray.reshape(batch, height, width)),
        difference=largest_difference if integral else relative_error,
        # Truncation takes up to 1 off; where the sum is an integer, rounding errors decide.
        tolerance=1.0 + 1e-9 if integral else two_roundings(dtype),
        providers=list(providers(device, layout, shape, dtype)),
        num_bytes=4 * batch * height * width * dtype.itemsize,
        host_time=device == "cuda"
        and batch * height * width <= FRAMES["1080p"][0] * FRAMES["1080p"][1],
        sets=(3, 48) if device == "cuda" else (2, 16),
    )


def providers(device: str, layout: str, shape: tuple, dtype: torch.dtype) -> Iterator[Provider]:
    channels_last = layout == "HWC"

    def terms(image: torch.Tensor) -> torch.Tensor:
        red, green, blue = image.unbind(-1 if channels_last else 1)
        return (RED * red + GREEN * green + BLUE * blue).to(image.dtype)

    def weighted_sum(image: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor(WEIGHTS, device=image.device)
        if not channels_last:
            weights = weights[:, None, None]
        return (image.float() * weights).sum(-1 if channels_last else 1).to(image.dtype)

    yield Provider("warpsmith", OURS, ours(layout))
    yield Provider("eager, three terms", EAGER, ready(terms))
    yield Provider("compile, three terms", COMPILE, compiled(terms))
    if device == "cuda":
        yield Provider("compile, sum", COMPILE, compiled(weighted_sum))
        yield Provider("compile max-autotune", COMPILE, compiled(terms, MAX_AUTOTUNE))
    yield Provider("torchvision v2", BUILTIN, torchvision(layout))
    if device == "cpu" and channels_last and dtype == torch.uint8:
        yield Provider("OpenCV", PEER, opencv, prepare=as_array, result=torch.from_numpy)


def ours(layout: str) -> Callable[[], Callable]:
    def load() -> Callable:
        img2gray = warpsmith.load("img2gray").img2gray
        return functools.partial(img2gray, layout=layout)

    return load


def torchvision(layout: str) -> Callable[[], Callable]:
    def load() -> Callable:
        from torchvision.transforms.v2.functional import rgb_to_grayscale

        if layout == "HWC":
            return lambda image: rgb_to_grayscale(image.permute(0, 3, 1, 2))
        return rgb_to_grayscale

    return load


def as_array(inputs: tuple) -> tuple:
    """Images below each other: OpenCV takes one at a time."""
    (image,) = inputs
    return (image.reshape(-1, image.shape[2], 3).numpy(),)


def opencv() -> Callable:
    import cv2

    cv2.setNumThreads(torch.get_num_threads())
    return lambda array: cv2.cvtColor(array, cv2.COLOR_RGB2GRAY)
