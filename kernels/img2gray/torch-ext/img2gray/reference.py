"""The formulas in plain torch: slow, any device, the same bytes as the kernel."""

import torch

from .op import BT601, FORMULAS, OPENCV, PILLOW, Weights, _custom_formula


def fma_float32(a: torch.Tensor, b: float, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 values held in float64, rounded once to float32, held in float64.

    The product of two 24-bit numbers is exact in float64. The sum is rounded to odd (Boldo and
    Melquiond): where it is inexact and its last bit even, it moves to the neighbour on the side of
    the error, so that the second rounding, to float32, sees on which side the exact value lies.
    """
    product = a * b
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    even = total.view(torch.int64).bitwise_and(1) == 0
    towards = torch.where(
        error > 0, torch.full_like(total, torch.inf), torch.full_like(total, -torch.inf)
    )
    odd = torch.nextafter(total, towards)
    # The error of an infinite total is NaN, which is not above 0.
    total = torch.where((error.abs() > 0) & even, odd, total)
    return total.float().double()


def img2gray_reference(
    image: torch.Tensor,
    *,
    layout: str = "CHW",
    weights: Weights = "bt601",
    channel_order: str = "RGB",
    keepdim: bool = True,
) -> torch.Tensor:
    """What :func:`img2gray` computes, except that float64 multiplies and adds separately."""
    dim = -1 if layout == "HWC" else -3
    if image.shape[dim] == 1:
        return image.clone() if keepdim else image.squeeze(dim).clone()
    channels = image.unbind(dim)
    red, green, blue = channels[:3] if channel_order == "RGB" else reversed(channels[:3])
    wr, wg, wb, formula = (
        FORMULAS[weights] if isinstance(weights, str) else _custom_formula(weights)
    )
    if image.dtype.is_floating_point or formula not in (PILLOW, OPENCV):
        gray = _chain(red, green, blue, wr, wg, wb)
        if not image.dtype.is_floating_point:
            gray = gray.trunc() if formula == BT601 else gray.round()
            gray = gray.clamp(0, torch.iinfo(image.dtype).max)
        gray = gray.to(torch.float32 if image.dtype != torch.float64 else torch.float64).to(
            image.dtype
        )
    else:
        ir, ig, ib, shift = (
            (19595, 38470, 7471, 16) if formula == PILLOW else (9798, 19235, 3735, 15)
        )
        total = red.long() * ir + green.long() * ig + blue.long() * ib + (1 << (shift - 1))
        gray = (total >> shift).to(image.dtype)
    if image.dtype.is_floating_point:
        gray = torch.where(gray.isnan(), torch.full_like(gray, torch.nan), gray)
    return gray.unsqueeze(dim) if keepdim else gray.contiguous()


def _chain(red, green, blue, wr, wg, wb):
    if red.dtype == torch.float64:
        return red * wr + green * wg + blue * wb
    wr, wg, wb = torch.tensor([wr, wg, wb], dtype=torch.float32).tolist()
    first = (red.double() * wr).float().double()
    return fma_float32(blue.double(), wb, fma_float32(green.double(), wg, first))
