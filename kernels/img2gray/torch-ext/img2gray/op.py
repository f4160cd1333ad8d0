"""The public function, its fake and its gradient."""

import itertools
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix, ops

Weights = str | Sequence[float]

# Looked up once, and the shortest callables: a call takes 2 us without the work.
IMG2GRAY = ops.img2gray.default
IMG2GRAY_OUT = ops.img2gray_out.default
# What calling this overload calls. Graphs hold overloads, and get the one above.
IMG2GRAY_RAW = getattr(ops.img2gray_raw.default, "_op", ops.img2gray_raw.default)

is_compiling = torch.compiler.is_compiling
is_tracing = torch._C._is_tracing
count_dispatch_modes = torch._C._len_torch_dispatch_stack  # make_fx is one
are_transforms_active = torch._C._are_functorch_transforms_active

# The `formula` argument of the ops; the last one takes the weights of the call.
BT601, BT709, PILLOW, OPENCV, CUSTOM = range(5)

# name -> (red, green, blue, formula)
FORMULAS = {
    "bt601": (0.2989, 0.587, 0.114, BT601),
    "bt709": (0.2126, 0.7152, 0.0722, BT709),
    "pil": (0.299, 0.587, 0.114, PILLOW),
    "opencv": (0.299, 0.587, 0.114, OPENCV),
}

# Of the arguments that follow the tensors.
DEFAULTS = tuple(argument.default_value for argument in IMG2GRAY._schema.arguments[1:])

NAMED_WEIGHTS = {formula: weights for *weights, formula in FORMULAS.values()}

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
    the derivatives and ``vmap`` of ``torch.func`` (not inside ``torch.compile``). ``out`` cannot be
    combined with any of these.

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
    # Forward-mode AD or a torch.func transform, which ops would not notice.
    transformed = forward_ad._current_level >= 0 or are_transforms_active()
    if out is not None:
        return _write_out(image, arguments, out, transformed)
    if transformed:
        if is_compiling():
            raise NotImplementedError(
                "image: torch.compile cannot trace img2gray inside torch.func transforms or "
                "forward-mode AD; compile the function without the transform"
            )
        arguments = _with_defaults(arguments)
        op = _LinearFunction.apply
    elif is_compiling() or is_tracing() or count_dispatch_modes() > 0:
        # A graph that is traced now may be differentiated later.
        return IMG2GRAY(image, *arguments)
    elif image.requires_grad and torch.is_grad_enabled():
        op = IMG2GRAY
    else:
        op = IMG2GRAY_RAW
    try:
        return op(image, *arguments)
    except RuntimeError as error:
        # The stable ABI loses the type of this error, which callers catch to try smaller batches.
        if "CUDA out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def _write_out(
    image: torch.Tensor, arguments: tuple, out: torch.Tensor, transformed: bool
) -> torch.Tensor:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: must be a torch.Tensor, got {type(out).__name__}")
    if torch.is_grad_enabled() and (image.requires_grad or out.requires_grad):
        raise ValueError(
            "out: cannot be used where a gradient is needed; leave it out or use torch.no_grad()"
        )
    compiling = is_compiling()  # which knows no inference tensors
    if not compiling and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out: is an inference tensor, which only torch.inference_mode() may write")
    if transformed:
        raise ValueError("out: cannot be used with forward-mode AD or torch.func transforms")
    if not compiling and out.is_neg():
        raise ValueError("out: must store its values, got a lazily negated view")
    IMG2GRAY_OUT(image, out, *arguments)
    # Autograd must learn of the write, or a graph that saved `out` would use the new values.
    torch.autograd.graph.increment_version(out)
    return out


def last_path() -> str:
    """What the last call of this thread ran: device, architecture, strategy, bytes per access."""
    return ops.last_path.default()


def _arguments(layout: str, weights: Weights, channel_order: str, keepdim: bool) -> tuple:
    """What the ops take after the tensors; defaults at the end may be missing."""
    try:
        if isinstance(weights, str) and isinstance(keepdim, bool):
            return NAMED_ARGUMENTS[layout, weights, channel_order, keepdim]
    except (KeyError, TypeError):
        pass
    return _checked_arguments(layout, weights, channel_order, keepdim)


def _checked_arguments(layout: str, weights: Weights, channel_order: str, keepdim: bool) -> tuple:
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
        custom, formula = (), FORMULAS[weights][3]
    else:
        *custom, formula = _custom_formula(weights)
    return (layout == "HWC", formula, keepdim, channel_order == "BGR", *custom)


def _without_defaults(arguments: tuple) -> tuple:
    count = len(arguments)
    while count > 0 and arguments[count - 1] == DEFAULTS[count - 1]:
        count -= 1
    return arguments[:count]


def _with_defaults(arguments: tuple) -> tuple:
    return arguments + DEFAULTS[len(arguments) :]


# Made once, and short: each argument of an op takes 0.2 us to parse.
NAMED_ARGUMENTS = {
    keywords: _without_defaults(_checked_arguments(*keywords))
    for keywords in itertools.product(("CHW", "HWC"), FORMULAS, ("RGB", "BGR"), (True, False))
}


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
    return (red, green, blue, CUSTOM)


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
        formula in range(CUSTOM + 1), lambda: f"formula: must be 0 to {CUSTOM}, got {formula}"
    )
    torch._check(
        formula != PILLOW or image.dtype == torch.uint8,
        lambda: f'weights: "pil" is defined for uint8 images only, got dtype {image.dtype}',
    )
    channels = image.shape[-1 if channels_last else -3]
    torch._check(channels in (1, 3, 4), lambda: f"image: needs 1, 3 or 4 channels, got {channels}")


@torch.library.register_fake(add_op_namespace_prefix("img2gray"))
@torch.library.register_fake(add_op_namespace_prefix("img2gray_raw"))
def _fake(image, channels_last=False, formula=BT601, keepdim=True, *_):
    _check_fake(image, formula, channels_last)
    return image.new_empty(_output_shape(image.shape, channels_last, keepdim))


@torch.library.register_fake(add_op_namespace_prefix("img2gray_out"))
def _fake_out(image, out, channels_last=False, formula=BT601, keepdim=True, *_):
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
    ctx.channels = image.shape[-1 if inputs[1] else -3]


def _backward(ctx, grad):
    # Differentiable torch ops, so that gradients of gradients come by themselves; nothing is saved.
    channels_last, formula, keepdim, bgr, *custom = ctx.arguments
    dim = -1 if channels_last else -3
    if not keepdim:
        grad = grad.unsqueeze(dim)
    if ctx.channels > 1:
        weights = custom if formula == CUSTOM else NAMED_WEIGHTS[formula]
        weights = reversed(weights) if bgr else weights
        channels = [grad * weight for weight in weights]
        if ctx.channels == 4:
            channels.append(torch.zeros_like(grad))
        grad = torch.cat(channels, dim)
    return grad, None, None, None, None, None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("img2gray"), _backward, setup_context=_setup_context
)


class _LinearFunction(torch.autograd.Function):
    """The op for transforms. It is linear: its tangent is the op of the tangent."""

    @staticmethod
    def forward(image, *arguments):
        return IMG2GRAY_RAW(image, *arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _LinearFunction.apply(tangent, *ctx.arguments)

    @staticmethod
    def vmap(info, in_dims, image, *arguments):
        return _LinearFunction.apply(image.movedim(in_dims[0], 0), *arguments), 0
