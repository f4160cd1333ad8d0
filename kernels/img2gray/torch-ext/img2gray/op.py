"""The public function, its fake and its gradient."""

import math
from collections.abc import Sequence

import torch

from ._ops import add_op_namespace_prefix, ops

Weights = str | Sequence[float]

# The `formula` argument of the ops: how integers are formed. Floats use the weights alone.
TRUNCATE, ROUND, PILLOW, OPENCV = range(4)

# name -> (red, green, blue, formula)
FORMULAS = {
    "bt601": (0.2989, 0.587, 0.114, TRUNCATE),
    "bt709": (0.2126, 0.7152, 0.0722, ROUND),
    "pil": (0.299, 0.587, 0.114, PILLOW),
    "opencv": (0.299, 0.587, 0.114, OPENCV),
}

FLOAT32_MAX = torch.finfo(torch.float32).max


def img2gray(
    image: torch.Tensor,
    *,
    layout: str = "CHW",
    weights: Weights = "bt601",
    channel_order: str = "RGB",
    keepdim: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grayscale of an RGB image, in the dtype of the image.

    Shapes, with any leading dims:
        ``layout="CHW"``: ``[..., C, H, W] -> [..., 1, H, W]``, or ``[..., H, W]`` if not ``keepdim``.
        ``layout="HWC"``: ``[..., H, W, C] -> [..., H, W, 1]``, or ``[..., H, W]`` if not ``keepdim``.
        C is 3, or 4 with a last channel that is ignored, or 1: then the result is a copy.
        The layout is never guessed from sizes.

    Dtypes: uint8, uint16, float16, bfloat16, float32, float64. Devices: CPU and CUDA, with the same
    bytes.

    Strides: any, taken as they are, for ``image`` and ``out``. A new result is contiguous.

    Formulas (``weights``):
        ``"bt601"``: torchvision v2's ``rgb_to_grayscale``, in float32
        ``fma(B, .114, fma(G, .587, R * .2989))``, truncated for integers.
        ``"pil"``: Pillow's ``convert("L")``, ``(19595 R + 38470 G + 7471 B + 32768) >> 16``; uint8
        only.
        ``"opencv"``: OpenCV's ``COLOR_RGB2GRAY``, ``(9798 R + 19235 G + 3735 B + 16384) >> 15`` for
        integers; weights .299, .587, .114 otherwise.
        ``"bt709"`` or three finite floats (red, green, blue): the same chain; integers are rounded
        half to even and saturated. The sum of the weights is free.

    Rounding: float16 and bfloat16 compute in float32 and round once; float64 computes in float64.
    NaN results are the quiet NaN without payload.

    Gradients: linear in the image (floating point); any order. ``out`` cannot be combined with a
    gradient.

    Errors: ``TypeError`` or ``ValueError`` for a bad keyword, ``RuntimeError`` for a bad tensor,
    before any launch; each names the argument, the rule and the value.

    Example::

        gray = img2gray(image)                                    # [3, H, W] -> [1, H, W]
        gray = img2gray(frames, layout="HWC", weights="opencv")   # [N, H, W, 3] -> [N, H, W, 1]
        img2gray(image, weights=(0.3, 0.6, 0.1), out=buffer)
    """
    arguments = _arguments(layout, weights, channel_order, keepdim)
    if not isinstance(image, torch.Tensor):
        raise TypeError(f"image: must be a torch.Tensor, got {type(image).__name__}")
    needs_grad = image.requires_grad and torch.is_grad_enabled()
    if out is not None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out: must be a torch.Tensor, got {type(out).__name__}")
        if needs_grad or (out.requires_grad and torch.is_grad_enabled()):
            raise ValueError(
                "out: cannot be used where a gradient is needed; leave it out or use torch.no_grad()"
            )
        ops.img2gray_out.default(image, *arguments, out)
        return out
    if needs_grad:
        return ops.img2gray.default(image, *arguments)
    return ops.img2gray_raw.default(image, *arguments)


def last_path() -> str:
    """What the last call of this thread ran: device, architecture path, strategy, bytes per access."""
    return ops.last_path.default()


def _arguments(layout: str, weights: Weights, channel_order: str, keepdim: bool) -> tuple:
    if layout != "CHW" and layout != "HWC":
        raise ValueError(f'layout: must be "CHW" or "HWC", got {layout!r}')
    if channel_order != "RGB" and channel_order != "BGR":
        raise ValueError(f'channel_order: must be "RGB" or "BGR", got {channel_order!r}')
    if not isinstance(keepdim, bool):
        raise TypeError(f"keepdim: must be a bool, got {keepdim!r}")
    if isinstance(weights, str):
        if weights not in FORMULAS:
            raise ValueError(
                f"weights: must be one of {', '.join(FORMULAS)} or three floats, got {weights!r}"
            )
        formula = FORMULAS[weights]
    else:
        formula = _custom_formula(weights)
    return (*formula, layout == "HWC", channel_order == "BGR", keepdim)


def _custom_formula(weights: Sequence[float]) -> tuple:
    try:
        values = tuple(float(weight) for weight in weights)
    except TypeError:
        raise TypeError(f"weights: must be a name or three floats, got {weights!r}") from None
    if len(values) != 3:
        raise ValueError(
            f"weights: must be three floats (red, green, blue), got {len(values)}: {values}"
        )
    if not all(math.isfinite(value) and abs(value) <= FLOAT32_MAX for value in values):
        raise ValueError(f"weights: must be finite in float32, got {values}")
    return (*values, ROUND)


def _check_and_output_shape(
    image: torch.Tensor, formula: int, channels_last: bool, keepdim: bool
) -> list:
    dtypes = (
        torch.uint8,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
    torch._check(image.dtype in dtypes, lambda: f"image: dtype {image.dtype} is not supported")
    torch._check(image.dim() >= 3, lambda: f"image: must have at least 3 dims, got {image.dim()}")
    torch._check(
        formula != PILLOW or image.dtype == torch.uint8,
        lambda: 'weights: "pil" is for uint8 images only',
    )
    channel = image.dim() - (1 if channels_last else 3)
    channels = image.shape[channel]
    torch._check(channels in (1, 3, 4), lambda: f"image: needs 1, 3 or 4 channels, got {channels}")
    shape = list(image.shape)
    shape[channel : channel + 1] = [1] if keepdim else []
    return shape


@torch.library.register_fake(add_op_namespace_prefix("img2gray"))
@torch.library.register_fake(add_op_namespace_prefix("img2gray_raw"))
def _fake(image, red, green, blue, formula, channels_last, bgr, keepdim):
    return image.new_empty(_check_and_output_shape(image, formula, channels_last, keepdim))


@torch.library.register_fake(add_op_namespace_prefix("img2gray_out"))
def _fake_out(image, red, green, blue, formula, channels_last, bgr, keepdim, out):
    shape = _check_and_output_shape(image, formula, channels_last, keepdim)
    torch._check(
        list(out.shape) == shape, lambda: f"out: must have shape {shape}, got {list(out.shape)}"
    )
    torch._check(
        out.dtype == image.dtype, lambda: f"out: must have dtype {image.dtype}, got {out.dtype}"
    )
    torch._check(
        out.device == image.device, lambda: f"out: must be on {image.device}, got {out.device}"
    )


def _setup_context(ctx, inputs, output):
    image, red, green, blue, _, ctx.channels_last, bgr, ctx.keepdim = inputs
    ctx.channels = image.shape[image.dim() - (1 if ctx.channels_last else 3)]
    ctx.weights = (blue, green, red) if bgr else (red, green, blue)


def _backward(ctx, grad):
    # Differentiable torch ops, so that gradients of gradients come by themselves; nothing is saved.
    dim = -1 if ctx.channels_last else -3
    if not ctx.keepdim:
        grad = grad.unsqueeze(dim)
    if ctx.channels > 1:
        channels = [grad * weight for weight in ctx.weights]
        if ctx.channels == 4:
            channels.append(torch.zeros_like(grad))
        grad = torch.cat(channels, dim)
    return grad, *[None] * 7


torch.library.register_autograd(
    add_op_namespace_prefix("img2gray"), _backward, setup_context=_setup_context
)
