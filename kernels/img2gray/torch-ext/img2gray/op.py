"""The public function, its fake and its gradient."""

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

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
        ``"bt709"`` or three floats (red, green, blue), finite in float32: the same chain; integers
        are rounded half to even and saturated. The sum of the weights is free.

    Rounding: float16 and bfloat16 compute in float32 and round once; float64 computes in float64.
    NaN results are the quiet NaN without payload.

    Gradients: linear in the image (floating point); reverse and forward mode, any order, and under
    ``torch.func`` (not with a transform inside ``torch.compile``). ``out`` cannot be combined with
    any of these.

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
    if out is not None:
        return _write_out(image, arguments, out)
    if _is_transformed():
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "image: torch.compile cannot trace img2gray inside torch.func transforms or "
                "forward-mode AD; compile the function without the transform"
            )
        return _LinearFunction.apply(image, *arguments)
    # A graph that is traced now may be differentiated later.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return ops.img2gray.default(image, *arguments)
    if image.requires_grad and torch.is_grad_enabled():
        return _run(ops.img2gray, image, arguments)
    return _run(ops.img2gray_raw, image, arguments)


def _run(op: torch._ops.OpOverloadPacket, image: torch.Tensor, arguments: tuple) -> torch.Tensor:
    try:
        return op.default(image, *arguments)
    except RuntimeError as error:
        # The stable ABI loses the type of this error, which callers catch to try smaller batches.
        if "CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def _write_out(image: torch.Tensor, arguments: tuple, out: torch.Tensor) -> torch.Tensor:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: must be a torch.Tensor, got {type(out).__name__}")
    if torch.is_grad_enabled() and (image.requires_grad or out.requires_grad):
        raise ValueError(
            "out: cannot be used where a gradient is needed; leave it out or use torch.no_grad()"
        )
    compiling = torch.compiler.is_compiling()  # which knows no inference tensors
    if not compiling and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out: is an inference tensor, which only torch.inference_mode() may write")
    if _is_transformed():
        raise ValueError("out: cannot be used with forward-mode AD or torch.func transforms")
    ops.img2gray_out.default(image, *arguments, out)
    # Autograd must learn of the write, or a graph that saved `out` would use the new values.
    torch.autograd.graph.increment_version(out)
    return out


def last_path() -> str:
    """What the last call of this thread ran: device, architecture, strategy, bytes per access."""
    return ops.last_path.default()


def _arguments(layout: str, weights: Weights, channel_order: str, keepdim: bool) -> tuple:
    if not isinstance(layout, str) or layout not in ("CHW", "HWC"):
        raise ValueError(f'layout: must be "CHW" or "HWC", got {layout!r}')
    if not isinstance(channel_order, str) or channel_order not in ("RGB", "BGR"):
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
    refused = (bytes, bytearray, dict, set, frozenset)
    if isinstance(weights, refused) or not hasattr(weights, "__len__"):
        raise TypeError(f"weights: must be a name or three floats, got {weights!r}")
    if isinstance(weights, torch.Tensor) and weights.requires_grad:
        raise ValueError("weights: have no gradient, got a tensor that requires one; detach it")
    if len(weights) != 3:
        raise ValueError(
            f"weights: must be three floats (red, green, blue), got {len(weights)}: {weights!r}"
        )
    red, green, blue = weights
    if isinstance(red, str) or isinstance(green, str) or isinstance(blue, str):
        raise TypeError(f"weights: must be a name or three floats, got {weights!r}")
    try:
        red, green, blue = float(red), float(green), float(blue)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"weights: must be a name or three floats, got {weights!r}") from None
    # Written so that NaN fails, and so that weights traced as symbols pass.
    for weight in (red, green, blue):
        if not -FLOAT32_MAX <= weight <= FLOAT32_MAX:
            raise ValueError(f"weights: must be finite in float32, got {(red, green, blue)}")
    return (red, green, blue, ROUND)


def _output_shape(shape: Sequence[int], channels_last: bool, keepdim: bool) -> tuple:
    one = (1,) if keepdim else ()
    return (*shape[:-1], *one) if channels_last else (*shape[:-3], *one, *shape[-2:])


def _check_fake(image: torch.Tensor, formula: int, channels_last: bool) -> None:
    dtypes = (
        torch.uint8,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
    torch._check(
        image.dtype in dtypes, lambda: f"image: dtype must be one of {dtypes}, got {image.dtype}"
    )
    torch._check(image.dim() >= 3, lambda: f"image: must have at least 3 dims, got {image.dim()}")
    torch._check(
        formula in (TRUNCATE, ROUND, PILLOW, OPENCV),
        lambda: f"formula: must be 0 to 3, got {formula}",
    )
    torch._check(
        formula != PILLOW or image.dtype == torch.uint8,
        lambda: f'weights: "pil" is defined for uint8 images only, got dtype {image.dtype}',
    )
    channels = image.shape[-1 if channels_last else -3]
    torch._check(channels in (1, 3, 4), lambda: f"image: needs 1, 3 or 4 channels, got {channels}")


@torch.library.register_fake(add_op_namespace_prefix("img2gray"))
@torch.library.register_fake(add_op_namespace_prefix("img2gray_raw"))
def _fake(image, red, green, blue, formula, channels_last, bgr, keepdim):
    _check_fake(image, formula, channels_last)
    return image.new_empty(_output_shape(image.shape, channels_last, keepdim))


@torch.library.register_fake(add_op_namespace_prefix("img2gray_out"))
def _fake_out(image, red, green, blue, formula, channels_last, bgr, keepdim, out):
    _check_fake(image, formula, channels_last)
    shape = _output_shape(image.shape, channels_last, keepdim)
    torch._check(
        tuple(out.shape) == shape, lambda: f"out: must have shape {shape}, got {tuple(out.shape)}"
    )
    torch._check(
        out.dtype == image.dtype, lambda: f"out: must have dtype {image.dtype}, got {out.dtype}"
    )
    torch._check(
        out.device == image.device, lambda: f"out: must be on {image.device}, got {out.device}"
    )


def _setup_context(ctx, inputs, output):
    image = inputs[0]
    ctx.arguments = inputs[1:]
    ctx.channels = image.shape[-1 if inputs[5] else -3]


def _backward(ctx, grad):
    # Differentiable torch ops, so that gradients of gradients come by themselves; nothing is saved.
    red, green, blue, _, channels_last, bgr, keepdim = ctx.arguments
    dim = -1 if channels_last else -3
    if not keepdim:
        grad = grad.unsqueeze(dim)
    if ctx.channels > 1:
        weights = (blue, green, red) if bgr else (red, green, blue)
        channels = [grad * weight for weight in weights]
        if ctx.channels == 4:
            channels.append(torch.zeros_like(grad))
        grad = torch.cat(channels, dim)
    return grad, None, None, None, None, None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("img2gray"), _backward, setup_context=_setup_context
)


def _is_transformed() -> bool:
    """Whether forward-mode AD or a torch.func transform is at work, which ops would not notice."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _LinearFunction(torch.autograd.Function):
    """The op for transforms. It is linear: its tangent is the op of the tangent."""

    @staticmethod
    def forward(image, *arguments):
        return _run(ops.img2gray_raw, image, arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _LinearFunction.apply(tangent, *ctx.arguments)

    @staticmethod
    def vmap(info, in_dims, image, *arguments):
        return _LinearFunction.apply(image.movedim(in_dims[0], 0), *arguments), 0
