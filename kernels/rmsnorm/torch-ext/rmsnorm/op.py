"""The public functions, their fakes and gradients."""

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix, ops
from .reference import fused_add_rms_norm_reference, rms_norm_reference

# Looked up once, and the shortest callables: a call takes 2 us without the work. Graphs hold
# overloads; what calling an overload calls is for eager mode.
RMS_NORM = ops.rms_norm.default
RMS_NORM_EAGER = getattr(RMS_NORM, "_op", RMS_NORM)
RMS_NORM_TRAIN = ops.rms_norm_train.default
RMS_NORM_OUT = ops.rms_norm_out.default
RMS_NORM_BACKWARD = ops.rms_norm_backward.default
FUSED_ADD = ops.fused_add_rms_norm.default
FUSED_ADD_EAGER = getattr(FUSED_ADD, "_op", FUSED_ADD)
FUSED_ADD_TRAIN = ops.fused_add_rms_norm_train.default
FUSED_ADD_IN_PLACE = ops.fused_add_rms_norm_.default

is_compiling = torch.compiler.is_compiling
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # from torch 2.12 on
is_tracing = torch._C._is_tracing
is_grad_enabled = torch.is_grad_enabled
count_dispatch_modes = torch._C._len_torch_dispatch_stack  # make_fx is one
are_transforms_active = torch._C._are_functorch_transforms_active

ROUNDINGS = {"once": 0, "input_dtype": 1, "weight_dtype": 2}
FLOAT32_MAX = torch.finfo(torch.float32).max
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dim: ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias``.

    Shapes: ``x [..., N]`` of any rank from 1 on, ``weight [N]``, ``bias [N]`` (needs a weight);
    result as x. Any size may be 0.

    Dtypes: float16, bfloat16, float32 for x and for weight, in any combination; bias as weight.

    Strides: any, for all of them, as long as the dims before the last merge into 8 or fewer. A new
    result has the strides of ``torch.empty_like(x)``; ``out`` must not share memory with an input.

    Rounding: everything is computed in float32, with ``n = x * rsqrt(mean(x^2) + eps)`` and
    ``w = weight + weight_offset``; products and sums are rounded one by one. To storage dtypes:

    - ``"once"``: ``n * w + bias``, to the dtype of x, which the result has. ``torch.nn.RMSNorm``,
      gpt-oss, OLMo, Gemma (with ``weight_offset=1``).
    - ``"input_dtype"``: n to the dtype of x, then ``n * w``, then ``+ bias``, each to the result's,
      which is float32 if x and weight differ. Llama and most others.
    - ``"weight_dtype"``: the same with the dtype of weight throughout. T5, diffusers.

    Without weight n is rounded to the dtype of x. float32 values beyond 1.8e19 overflow when they
    are squared, as in the models; float16 and bfloat16 are squared in float32.

    Gradients: of x, weight and bias, reverse mode, first order; sums over rows in float32, in an
    order that depends on sizes and device alone. x, weight and one float32 per row are saved.
    Forward mode and ``torch.func`` transforms run the formula in plain torch. ``out`` cannot be
    combined with any of these.

    Errors: ``TypeError`` or ``ValueError`` for a bad number or keyword, ``RuntimeError`` for a bad
    tensor, before any launch; each names the argument, the rule and the value.

    Example::

        y = rms_norm(hidden, weight, 1e-5, rounding="input_dtype")     # LlamaRMSNorm
        y = rms_norm(hidden, weight, weight_offset=1.0)                # GemmaRMSNorm
        q = rms_norm(q)                                                # no weight
    """
    arguments = _arguments(weight, eps, rounding, weight_offset, bias)
    if out is not None:
        return _write_out(x, arguments, out)
    if forward_ad._current_level >= 0 or are_transforms_active():
        _check_tensors(x=x, weight=weight, bias=bias)
        _check_fake(x, weight, ROUNDINGS[rounding], bias)
        return rms_norm_reference(
            x, weight, eps, bias=bias, weight_offset=weight_offset, rounding=rounding
        )
    try:
        if is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return RMS_NORM_TRAIN(x, *arguments)[0]
        if is_compiling() and not is_exporting():  # guards on what requires a gradient
            return RMS_NORM(x, *arguments)
        if is_compiling() or is_tracing() or count_dispatch_modes() > 0:
            # A graph that is traced now may be differentiated later.
            return RMS_NORM_TRAIN(x, *arguments)[0]
        return RMS_NORM_EAGER(x, *arguments)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _explained(error, x=x, weight=weight, bias=bias) from None


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual_out = x + residual`` and ``y = rms_norm(residual_out, ...)`` in one pass.

    ``residual`` has the shape, dtype and device of x, and strides of its own. The sum is rounded to
    their dtype before it is normed. Both results have the strides of ``torch.empty_like(x)``.
    Everything else is as in :func:`rms_norm`; gradients flow through both results.

    Example::

        y, residual = fused_add_rms_norm(attention_output, residual, weight)
    """
    arguments = _arguments(weight, eps, rounding, weight_offset, bias)
    if forward_ad._current_level >= 0 or are_transforms_active():
        _check_tensors(x=x, residual=residual, weight=weight, bias=bias)
        _check_fake(x, weight, ROUNDINGS[rounding], bias)
        _check_like_x("residual", residual, x, x.dtype)
        return fused_add_rms_norm_reference(
            x, residual, weight, eps, bias=bias, weight_offset=weight_offset, rounding=rounding
        )
    try:
        if is_grad_enabled() and (
            x.requires_grad
            or residual.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return FUSED_ADD_TRAIN(x, residual, *arguments)[:2]
        if is_compiling() and not is_exporting():
            return FUSED_ADD(x, residual, *arguments)
        if is_compiling() or is_tracing() or count_dispatch_modes() > 0:
            return FUSED_ADD_TRAIN(x, residual, *arguments)[:2]
        return FUSED_ADD_EAGER(x, residual, *arguments)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _explained(error, x=x, residual=residual, weight=weight, bias=bias) from None


def fused_add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> None:
    """:func:`fused_add_rms_norm` in place: residual becomes the sum and x the norm of it.

    The two must not share memory, and the result must have the dtype of x. Not where a gradient is
    needed.

    Example::

        fused_add_rms_norm_(attention_output, residual, weight)   # the next layer's input: attention_output
    """
    arguments = _arguments(weight, eps, rounding, weight_offset, bias)
    written = {"x": x, "residual": residual}
    _check_writable(written, weight, bias)
    try:
        FUSED_ADD_IN_PLACE(x, residual, *arguments)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _explained(error, x=x, residual=residual, weight=weight, bias=bias) from None
    # Autograd must learn of the writes, or a graph that saved a tensor would use the new values.
    torch.autograd.graph.increment_version((x, residual))


def last_path() -> str:
    """What the last call of this thread ran: device, architecture, strategy, bytes per access."""
    return ops.last_path.default()


def _arguments(weight, eps, rounding, weight_offset, bias) -> tuple:
    """What the ops take after x, no more than needed: each argument takes 0.2 us to parse."""
    if type(rounding) is not str or rounding not in ROUNDINGS:
        raise ValueError(f"rounding: must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if type(eps) is not float or not 0.0 <= eps <= FLOAT32_MAX:
        eps = _checked_eps(eps)
    if bias is not None or type(weight_offset) is not float or weight_offset != 0.0:
        return (weight, eps, ROUNDINGS[rounding], _checked_offset(weight_offset), bias)
    if weight is None or rounding == "once":
        return (weight, eps)
    return (weight, eps, ROUNDINGS[rounding])


def _as_float(name: str, value) -> float:
    if isinstance(value, (bool, str, type(None))):
        raise TypeError(f"{name}: must be a float, got {value!r}")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise ValueError(f"{name}: has no gradient, got a tensor that requires one; detach it")
    try:
        return float(value)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: must be a float, got {value!r}") from None


def _checked_eps(eps) -> float:
    number = _as_float("eps", eps)
    # Written so that NaN fails.
    if not 0.0 <= number <= FLOAT32_MAX:
        raise ValueError(f"eps: must be finite in float32 and not negative, got {eps!r}")
    return number


def _checked_offset(weight_offset) -> float:
    number = _as_float("weight_offset", weight_offset)
    if not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        raise ValueError(f"weight_offset: must be finite in float32, got {weight_offset!r}")
    return number


def _write_out(x: torch.Tensor, arguments: tuple, out: torch.Tensor) -> torch.Tensor:
    weight, bias = arguments[0], arguments[4] if len(arguments) > 4 else None
    _check_writable({"out": out}, x, weight, bias)
    try:
        RMS_NORM_OUT(x, out, *arguments)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise _explained(error, x=x, weight=weight, bias=bias) from None
    torch.autograd.graph.increment_version(out)
    return out


def _check_writable(written: dict, *read: torch.Tensor | None) -> None:
    for name, tensor in written.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
        if is_grad_enabled() and any(
            getattr(other, "requires_grad", False) for other in (*written.values(), *read)
        ):
            raise ValueError(
                f"{name}: cannot be written where a gradient is needed; use the function that "
                "returns new tensors, or torch.no_grad()"
            )
        if forward_ad._current_level >= 0 or are_transforms_active():
            raise ValueError(
                f"{name}: cannot be written under forward-mode AD or torch.func transforms"
            )
        if is_compiling():  # which knows neither of the two below
            continue
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: is an inference tensor, which only torch.inference_mode() may write"
            )
        if tensor.is_neg():
            raise ValueError(f"{name}: must store its values, got a lazily negated view")


def _check_tensors(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        optional = name in ("weight", "bias")
        if not (isinstance(tensor, torch.Tensor) or (optional and tensor is None)):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")


def _explained(error: Exception, **tensors: torch.Tensor | None) -> Exception:
    try:
        _check_tensors(**tensors)
    except TypeError as explained:
        return explained
    # The stable ABI loses the type of this error, which callers catch to try smaller batches.
    if "CUDA out of memory" in str(error):
        return torch.OutOfMemoryError(str(error))
    return error


def _check_floats(name, tensor, x) -> None:
    torch._check(
        tensor.dtype in DTYPES,
        lambda: f"{name}: dtype must be float16, bfloat16 or float32, got {tensor.dtype}",
    )
    torch._check(
        tensor.device == x.device,
        lambda: f"{name}: must be on the device of x, {x.device}, got {tensor.device}",
    )


def _check_column(name, tensor, x) -> None:
    _check_floats(name, tensor, x)
    torch._check(
        tensor.dim() == 1 and tensor.shape[0] == x.shape[-1],
        lambda: f"{name}: must have shape [{x.shape[-1]}], got {list(tensor.shape)}",
    )


def _check_fake(x, weight, rounding, bias) -> torch.dtype:
    """Of the result."""
    torch._check(x.dim() >= 1, lambda: "x: must have at least 1 dim, got a scalar")
    _check_floats("x", x, x)
    if weight is not None:
        _check_column("weight", weight, x)
    if bias is not None:
        torch._check(weight is not None, lambda: "bias: needs a weight")
        _check_column("bias", bias, x)
        torch._check(
            bias.dtype == weight.dtype,
            lambda: f"bias: must have the dtype of weight, {weight.dtype}, got {bias.dtype}",
        )
    torch._check(rounding in (0, 1, 2), lambda: f"rounding: must be 0, 1 or 2, got {rounding}")
    if weight is None or rounding == 0:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype) if rounding == 1 else weight.dtype


def _check_like_x(name, tensor, x, dtype) -> None:
    torch._check(
        tensor.shape == x.shape,
        lambda: f"{name}: must have shape {list(x.shape)}, got {list(tensor.shape)}",
    )
    torch._check(
        tensor.dtype == dtype, lambda: f"{name}: must have dtype {dtype}, got {tensor.dtype}"
    )
    torch._check(
        tensor.device == x.device,
        lambda: f"{name}: must be on the device of x, {x.device}, got {tensor.device}",
    )


def _empty_rstd(x):
    row = x[..., 0] if x.shape[-1] > 0 else x.new_empty_strided(x.shape[:-1], x.stride()[:-1])
    return torch.empty_like(row, dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _fake(x, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    return torch.empty_like(x, dtype=_check_fake(x, weight, rounding, bias))


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_train"))
def _fake_train(x, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    return _fake(x, weight, eps, rounding, weight_offset, bias), _empty_rstd(x)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_out"))
def _fake_out(x, out, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    _check_like_x("out", out, x, _check_fake(x, weight, rounding, bias))


@torch.library.register_fake(add_op_namespace_prefix("fused_add_rms_norm"))
def _fake_fused(x, residual, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    _check_like_x("residual", residual, x, x.dtype)
    return _fake(x, weight, eps, rounding, weight_offset, bias), torch.empty_like(x)


@torch.library.register_fake(add_op_namespace_prefix("fused_add_rms_norm_train"))
def _fake_fused_train(x, residual, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    y, total = _fake_fused(x, residual, weight, eps, rounding, weight_offset, bias)
    return y, total, _empty_rstd(x)


@torch.library.register_fake(add_op_namespace_prefix("fused_add_rms_norm_"))
def _fake_in_place(x, residual, weight=None, eps=1e-6, rounding=0, weight_offset=0.0, bias=None):
    _check_like_x("residual", residual, x, x.dtype)
    _check_like_x("x", x, x, _check_fake(x, weight, rounding, bias))


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
def _fake_backward(
    dy,
    x,
    rstd,
    weight=None,
    weight_offset=0.0,
    needs_dweight=False,
    needs_dbias=False,
    dresidual=None,
):
    dtype = x.dtype if weight is None else weight.dtype
    dweight, dbias = (
        x.new_empty(x.shape[-1] if needed else 0, dtype=dtype)
        for needed in (needs_dweight, needs_dbias)
    )
    return torch.empty_like(x), dweight, dbias


def _setup_context(ctx, inputs, output):
    x, *options = inputs
    _save(ctx, x, output[-1], *options)


def _setup_fused_context(ctx, inputs, output):
    _, _, *options = inputs
    _save(ctx, output[1], output[-1], *options)


def _save(ctx, x, rstd, weight, eps, rounding, weight_offset, bias):
    ctx.save_for_backward(x, weight, rstd)
    ctx.weight_offset = weight_offset
    ctx.needs_dweight = weight is not None and weight.requires_grad
    ctx.needs_dbias = bias is not None and bias.requires_grad
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, dresidual):
    """Of x, weight and bias."""
    if dy is None:
        return dresidual, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dweight, dbias = RMS_NORM_BACKWARD(
        dy, x, rstd, weight, ctx.weight_offset, ctx.needs_dweight, ctx.needs_dbias, dresidual
    )
    return dx, dweight if ctx.needs_dweight else None, dbias if ctx.needs_dbias else None


def _backward(ctx, dy, _):
    dx, dweight, dbias = _gradients(ctx, dy, None)
    return dx, dweight, None, None, None, dbias


def _fused_backward(ctx, dy, dtotal, _):
    dx, dweight, dbias = _gradients(ctx, dy, dtotal)
    return dx, dx, dweight, None, None, None, dbias


def _second_backward(ctx, *_):
    raise RuntimeError(
        "rms_norm: a second derivative is not supported; use rms_norm_reference, or torch.func"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("rms_norm_train"), _backward, setup_context=_setup_context
)
torch.library.register_autograd(
    add_op_namespace_prefix("fused_add_rms_norm_train"),
    _fused_backward,
    setup_context=_setup_fused_context,
)
torch.library.register_autograd(add_op_namespace_prefix("rms_norm_backward"), _second_backward)
