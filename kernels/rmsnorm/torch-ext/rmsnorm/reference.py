"""The formulas in plain torch: slow, any device, differentiable to any order."""

import torch


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> torch.Tensor:
    """What :func:`rms_norm` computes, up to the order of sums; float64 computes in float64."""
    if rounding not in ("once", "input_dtype", "weight_dtype"):
        raise ValueError(
            f"rounding: must be one of once, input_dtype, weight_dtype, got {rounding!r}"
        )
    if bias is not None and weight is None:
        raise ValueError("bias: needs a weight")
    compute = torch.promote_types(x.dtype, torch.float32)
    n = x.to(compute)
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return n.to(x.dtype)
    scale = weight.to(compute) + weight_offset
    if rounding == "once":
        y = n * scale
        return (y if bias is None else y + bias.to(compute)).to(x.dtype)
    if rounding == "input_dtype":
        dtype = torch.promote_types(x.dtype, weight.dtype)
        n = n.to(x.dtype).to(compute)
    else:
        dtype = weight.dtype
        n = n.to(dtype).to(compute)
    y = (scale * n).to(dtype)
    return y if bias is None else (y.to(compute) + bias.to(compute)).to(dtype)


def fused_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`fused_add_rms_norm` computes: the norm of the sum, and the sum."""
    total = x + residual
    y = rms_norm_reference(
        total, weight, eps, bias=bias, weight_offset=weight_offset, rounding=rounding
    )
    return y, total
