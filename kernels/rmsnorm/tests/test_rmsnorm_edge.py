"""Sizes, strides and refusals. Labels in test names are those of docs/failure-modes.md."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmsnorm_cases import (
    DTYPES,
    PAIRS,
    ROUNDINGS,
    Formula,
    integers,
    name,
    normals,
    pair_name,
    result_dtype,
    same_bytes,
    strided_copy,
    weights,
)

HIDDEN = [
    *(1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1001, 1023, 1024, 1025),
    *(2880, 3584, 4095, 4096, 4097, 5120, 7168, 8191, 8192, 8193, 16384, 32768, 32769),
    *(65536, 131072, 262144, 262145),
]


def free_memory(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def need_memory(device, gib):
    if free_memory(device) < gib << 30:
        pytest.skip(f"needs {gib} GiB of free memory")


def check(kernel, device, x, weight=None, eps=1e-6, bias=None, **options):
    """On that device, with the strides given; nothing that is read may change."""
    given = [
        None if tensor is None else strided_copy(tensor, device) for tensor in (x, weight, bias)
    ]
    y = kernel.rms_norm(given[0], given[1], eps, bias=given[2], **options)
    Formula(x, weight, eps, bias, **options).check(y)
    for tensor, original in zip(given, (x, weight, bias)):
        assert original is None or same_bytes(tensor, original)
    assert y.stride() == torch.empty_like(x).stride()
    return y


@pytest.mark.parametrize("device_name", ["cuda"])
def test_rms_01_rows_past_two_billion_elements(kernel, device_name):
    """The shape that was reported: x (1048641, 4096)."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    need_memory("cuda", 36)
    rows, weight = 1_048_641, weights(4096, torch.bfloat16)
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    places = [0, 524_287, 524_288, 524_289, 1_048_575, 1_048_576, rows - 1]
    filled = normals((len(places), 4096), torch.bfloat16)
    x[places] = filled.cuda()
    x.requires_grad_()
    y = kernel.rms_norm(x, weight.cuda())
    Formula(filled, weight).check(y.detach()[places])
    dy = torch.zeros_like(y)
    dy[places] = normals((len(places), 4096), torch.bfloat16, seed=1).cuda()
    expected = filled.cuda().requires_grad_()
    kernel.rms_norm(expected, weight.cuda()).backward(dy[places])
    y.backward(dy)
    assert same_bytes(x.grad[places], expected.grad)
    others = torch.ones(rows, dtype=torch.bool, device="cuda")
    others[places] = False
    # In parts: a mask over all of it would take as much memory again.
    for tensor in (y.detach(), x.grad):
        for part, mask in zip(tensor.split(1 << 16), others.split(1 << 16)):
            assert part[mask].count_nonzero() == 0


@pytest.mark.parametrize("device_name", ["cuda"])
@pytest.mark.parametrize("shape", [(65535, 32768, 1), (65537, 32771, 1)], ids=["below", "above"])
def test_rms_01_two_billion_rows(kernel, device_name, shape):
    """In two dims that do not merge; the inner one repeats the outer's values."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    need_memory("cuda", 34)
    values = normals((shape[0], 1, 1), torch.bfloat16)
    x = values.cuda().expand(shape).requires_grad_()
    y = kernel.rms_norm(x, eps=0.5)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y[:, :1]).expand(shape))
    y = y.detach()
    few = values.cuda().requires_grad_()
    wanted = kernel.rms_norm(few, eps=0.5)
    (wanted_dx,) = torch.autograd.grad(wanted, few, torch.ones_like(wanted))
    for result, expected in ((y, wanted.detach()), (dx, wanted_dx)):
        for extreme in (result.amin(1, keepdim=True), result.amax(1, keepdim=True)):
            assert torch.equal(extreme, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda flat, offset: flat.as_strided((3, 2, 64), (1 << 30, 1 << 29, 1), offset),
        lambda flat, offset: flat.as_strided((2, 6), (1, 1 << 29), offset),
        lambda flat, offset: flat.as_strided((2, 2, 70), ((1 << 31) + 5, 100, 1), offset),
    ],
    ids=["rows", "columns", "odd_rows"],
)
def test_rms_01_strides_past_two_billion_elements(kernel, device, view):
    """Views whose last elements are over 2^31 away, in a buffer of which few pages are touched."""
    need_memory(device, 7 if device == "cuda" else 1)
    flat = torch.empty((1 << 31) + (1 << 29) + 1024, dtype=torch.float16, device=device)
    x, out = view(flat, 0), view(flat, 256)
    values = normals(x.shape, torch.float16)
    x.copy_(values)
    weight = weights(x.shape[-1])
    kernel.rms_norm(x, weight.to(device), out=out)
    Formula(values, weight).check(out)
    assert same_bytes(x.cpu(), values)
    total, residual = values.to(device), normals(x.shape, torch.float16, seed=1)
    y, residual_out = kernel.fused_add_rms_norm(total, view(flat, 0), weight.to(device))
    assert same_bytes(residual_out.cpu(), values + values)
    x_in_place, residual_in_place = x, out
    residual_in_place.copy_(residual)
    kernel.fused_add_rms_norm_(x_in_place, residual_in_place, weight.to(device))
    assert same_bytes(residual_in_place.cpu(), values + residual)
    Formula(values + residual, weight).check(x_in_place)
    x.copy_(values)
    wanted = x.detach().requires_grad_()
    dy = normals(x.shape, torch.float16, seed=2).to(device)
    kernel.rms_norm(wanted, weight.to(device)).backward(dy)
    dense = values.to(device).requires_grad_()
    kernel.rms_norm(dense, weight.to(device)).backward(dy)
    torch.testing.assert_close(wanted.grad, dense.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("hidden", [3584, 5120, 7168])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_02_fused_add_at_every_hidden_size(kernel, device, hidden, dtype):
    x, residual = normals((5, hidden), dtype), normals((5, hidden), dtype, seed=1)
    weight = weights(hidden, dtype)
    y, total = kernel.fused_add_rms_norm(x.to(device), residual.to(device), weight.to(device))
    assert same_bytes(total.cpu(), x + residual)
    Formula(x + residual, weight).check(y)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_rms_03_weight_of_zeros_with_offset_one(kernel, device, pair):
    x_dtype, weight_dtype = pair
    x = normals((9, 640), x_dtype)
    zeros = torch.zeros(640, dtype=weight_dtype)
    for rounding in ROUNDINGS:
        y = check(kernel, device, x, zeros, weight_offset=1.0, rounding=rounding)
        ones = check(kernel, device, x, torch.ones_like(zeros), rounding=rounding)
        assert same_bytes(y, ones) and y.count_nonzero() > 5000
        assert check(kernel, device, x, zeros, rounding=rounding).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_rms_04_roundings_of_both_modes(kernel, device, dtype):
    """Exact rows, so that the bytes of each mode are known, and they differ."""
    x, weight = integers((64, 4096), dtype), weights(4096, dtype)
    x_, weight_ = x.to(device), weight.to(device)
    n = x_.float() * torch.rsqrt(x_.float().square().mean(-1, keepdim=True) + 1e-6)
    once = (n * weight_.float()).to(dtype)
    twice = weight_ * n.to(dtype)
    assert same_bytes(kernel.rms_norm(x_, weight_), once)
    for rounding in ("input_dtype", "weight_dtype"):
        assert same_bytes(kernel.rms_norm(x_, weight_, rounding=rounding), twice)
    assert (once != twice).float().mean() > 0.05


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_rms_05_rows_on_both_sides_of_the_limit_of_a_grid_axis(kernel, device, rows):
    base = normals((61, 64), torch.bfloat16)
    weight = weights(64, torch.bfloat16)
    x = base.repeat(rows // 61 + 1, 1)[:rows]
    y = kernel.rms_norm(x.to(device), weight.to(device))
    first = kernel.rms_norm(base.to(device), weight.to(device))
    Formula(base, weight).check(first)
    assert torch.equal(y, first.repeat(rows // 61 + 1, 1)[:rows])
    z = x.to(device).view(rows, 1, 64).expand(rows, 2, 64)
    assert torch.equal(kernel.rms_norm(z, weight.to(device))[:, 1], y)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_rms_06_rms_07_result_dtype_of_every_pair(kernel, device, pair, rounding):
    """The rule of the mode, and weights in full: an fp32 one is never rounded to a half type."""
    x_dtype, weight_dtype = pair
    x, weight = torch.ones(3, 256, dtype=x_dtype), (1 + torch.arange(256) * 2.0**-14)
    weight = weight.to(weight_dtype)
    y = check(kernel, device, x, weight, 0.0, bias=weight, rounding=rounding)
    assert y.dtype == result_dtype(x_dtype, weight_dtype, rounding)
    if y.dtype == torch.float32 and weight_dtype == torch.float32:
        assert y[0].unique().numel() == 256


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.t()[1:],
        lambda x: x.view(4, -1, 8).permute(2, 0, 1),
        lambda x: x.view(4, -1, 8).permute(1, 2, 0),
        lambda x: x[::3, ::3],
    ],
    ids=["transposed", "step2", "offset", "middle", "outer", "step3"],
)
def test_rms_08_last_stride_is_not_one(kernel, device, dtype, view):
    x = view(normals((4096, 8), dtype))
    assert x.stride(-1) != 1
    check(kernel, device, x, weights(x.shape[-1], dtype))
    out = strided_copy(torch.zeros_like(x), device)
    kernel.rms_norm(strided_copy(x, device), out=out)
    Formula(x).check(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_09_transposed_heads(kernel, device, dtype):
    """[B, S, H, D] seen as [B, H, S, D], of which the leading dims do not merge."""
    heads = normals((2, 64, 8, 128), dtype)
    weight = weights(128, dtype)
    for x in (
        heads.transpose(1, 2),
        heads.transpose(1, 2)[:, 1:, 3:],
        heads.permute(2, 0, 1, 3),
        normals((2, 33, 3, 8, 128), dtype)[:, :, 1].transpose(1, 2),  # q, k, v in one buffer
        heads.reshape(2, 64, 1024)[..., 128:640].unflatten(-1, (4, 128)).transpose(1, 2),
    ):
        check(kernel, device, x, weight)


@pytest.mark.parametrize(
    "shape", [(0, 7168), (0,), (3, 0), (2, 0, 64), (0, 0), (4, 0, 2, 0)], ids=name
)
def test_rms_10_empty_inputs(kernel, device, shape):
    for x_dtype, weight_dtype in PAIRS:
        x = torch.empty(shape, dtype=x_dtype, device=device, requires_grad=True)
        weight = torch.ones(shape[-1], dtype=weight_dtype, device=device, requires_grad=True)
        bias = torch.zeros_like(weight, requires_grad=True)
        for rounding in ROUNDINGS:
            y = kernel.rms_norm(x, weight, bias=bias, rounding=rounding)
            assert y.shape == shape
            assert y.dtype == result_dtype(x_dtype, weight_dtype, rounding)
            y.sum().backward()
        assert x.grad.shape == shape
        assert weight.grad.eq(0).all() and bias.grad.eq(0).all()
        y, total = kernel.fused_add_rms_norm(x, x)
        assert y.shape == total.shape == shape
        (y.sum() + total.sum()).backward()
        with torch.no_grad():
            out = torch.empty_like(x)
            assert kernel.rms_norm(x, weight, out=out) is out
            kernel.fused_add_rms_norm_(x.detach(), out, weight)
    if device == "cuda":
        torch.cuda.synchronize()
    later = normals((3, 64)).to(device)
    Formula(later.cpu()).check(kernel.rms_norm(later))


def test_rms_11_default_eps_is_one_number(kernel, device):
    """Whatever the dtype; and there is no None that would depend on it."""
    for dtype in DTYPES:
        x = normals((64, 32), dtype, scale=0.05).to(device)
        assert same_bytes(kernel.rms_norm(x), kernel.rms_norm(x, eps=1e-6))
        assert not torch.equal(kernel.rms_norm(x), kernel.rms_norm(x, eps=1e-3))
        with pytest.raises((TypeError, ValueError), match="eps: .*None"):
            kernel.rms_norm(x, eps=None)
        with pytest.raises((TypeError, ValueError), match="eps: .*None"):
            kernel.fused_add_rms_norm(x, x, eps=None)


def test_rms_12_eps_is_under_the_root(kernel, device):
    x = torch.full((2, 64), 1e-4)
    y = check(kernel, device, x, eps=1e-5)
    expected = 1e-4 / (1e-8 + 1e-5) ** 0.5
    torch.testing.assert_close(y.cpu(), torch.full((2, 64), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_14_without_weight(kernel, device, dtype):
    x = normals((5, 100), dtype)
    for rounding in ROUNDINGS:
        y = check(kernel, device, x, rounding=rounding, weight_offset=1.0)
        assert y.dtype == dtype
    gradients = []
    for offset in (0.0, 1.0):
        x_ = x.to(device).requires_grad_()
        kernel.rms_norm(x_, weight_offset=offset).sum().backward()
        gradients.append(x_.grad)
    assert gradients[0].isfinite().all() and same_bytes(*gradients)
    assert (x_.to(device) + 1).isfinite().all()


@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_15_every_hidden_size(kernel, device, hidden):
    """Dense rows, rows that other values follow, and rows that start anywhere."""
    rows = 3 if hidden < 10000 else 2
    for index, (x_dtype, weight_dtype) in enumerate(PAIRS if hidden < 5000 else PAIRS[::4]):
        wide = normals((rows, hidden + 9), x_dtype, seed=hidden)
        weight = weights(hidden, weight_dtype)
        rounding = ROUNDINGS[index % 3]
        check(kernel, device, wide[:, :hidden].contiguous(), weight, rounding=rounding)
        wide[:, hidden:] = torch.nan
        check(kernel, device, wide[:, :hidden], weight, rounding=rounding)
        wide[:, :1], wide[:, -8:] = torch.nan, 1.0
        check(kernel, device, wide[:, 1 : hidden + 1], weight, rounding=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_16_squares_of_large_values(kernel, device, dtype):
    """Squares are taken in fp32: half types never overflow there, fp32 beyond 1.8e19 gives zeros."""
    largest = 1e4 if dtype == torch.float16 else 1e16
    x = normals((4, 64), dtype, scale=largest).clamp(-6 * largest, 6 * largest)
    assert x.isfinite().all()
    for hidden in (64, 16384):
        row = x.repeat(1, hidden // 64)
        y = check(kernel, device, row, weights(hidden, dtype))
        assert y.isfinite().all() and y.count_nonzero() > 0
    if dtype != torch.float16:
        huge = torch.full((2, 64), 1e30, dtype=dtype)
        assert check(kernel, device, huge).eq(0).all()
    top = torch.full((2, 64), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert check(kernel, device, top).eq(1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_17_odd_rows(kernel, device, dtype):
    for hidden in (1001, 999, 7, 4099):
        x, weight = normals((6, hidden), dtype), weights(hidden, dtype)
        check(kernel, device, x, weight)
        check(kernel, device, x[1:], weight)
        y, total = kernel.fused_add_rms_norm(x.to(device), x.to(device), weight.to(device))
        assert same_bytes(total.cpu(), x + x)
        Formula(x + x, weight).check(y)


@pytest.mark.sanitizer
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_every_offset_and_row_stride(kernel, device, pair):
    """x, out, residual, weight and bias at every offset from 16 bytes; rows apart by every width."""
    x_dtype, weight_dtype = pair
    hidden = 136
    per_access = 16 // x_dtype.itemsize
    flat = normals((3 * (hidden + 16) + 16,), x_dtype)
    flat_weight = weights(hidden + 16, weight_dtype)
    for index, (offset, more) in enumerate(
        itertools.product(range(per_access), (0, 1, 2, 4, 8, 16))
    ):
        rounding = ROUNDINGS[index % 3]
        x = flat.as_strided((3, hidden), (hidden + more, 1), offset)
        start = index % (16 // weight_dtype.itemsize)
        weight = flat_weight[start : start + hidden]
        y_dtype = result_dtype(x_dtype, weight_dtype, rounding)
        buffer = torch.full_like(flat, 7.0, dtype=y_dtype)
        on_device = [tensor.to(device) for tensor in (flat, flat_weight, buffer)]
        x_ = on_device[0].as_strided(x.shape, x.stride(), offset)
        weight_ = on_device[1][start : start + hidden]
        # The result starts and steps elsewhere than x.
        out_offset, out_more = (offset * 3 + 1) % 8, (more * 2 + index) % 16
        out = on_device[2].as_strided(x.shape, (hidden + out_more, 1), out_offset)
        kernel.rms_norm(x_, weight_, out=out, rounding=rounding)
        # Read on the CPU: a copy on the device would be a kernel that the sanitizer does not follow.
        whole = on_device[2].cpu()
        result = whole.as_strided(out.shape, out.stride(), out_offset)
        Formula(x, weight, rounding=rounding).check(result)
        result.fill_(7.0)
        assert whole.eq(7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_fused_operands_with_other_strides_each(kernel, device, dtype):
    """Operands agree in no alignment and no order of memory."""
    shape = (3, 5, 72)
    x = normals((5, 3, 73), dtype)[..., 1:].transpose(0, 1)
    residual = normals((3, 5, 72 * 2), dtype, seed=1)[..., ::2]
    weight, bias = weights(216, dtype)[::3], normals((72, 2), dtype, seed=2)[:, 1]
    on_device = [strided_copy(tensor, device) for tensor in (x, residual, weight, bias)]
    x_, residual_, weight_, bias_ = on_device
    y, total = kernel.fused_add_rms_norm(x_, residual_, weight_, bias=bias_)
    assert same_bytes(total.cpu(), x + residual)
    Formula(x + residual, weight, bias=bias).check(y)
    assert y.stride() == total.stride() == torch.empty_like(x).stride() and y.shape == shape
    for tensor, original in zip(on_device, (x, residual, weight, bias)):
        assert same_bytes(tensor, original)
    kernel.fused_add_rms_norm_(x_, residual_, weight_, bias=bias_)
    assert same_bytes(residual_, total) and same_bytes(x_, y)


@pytest.mark.parametrize(
    "shape",
    [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64), (2, 2, 1, 3, 64), (2, 1, 2, 1, 2, 1, 2, 64)],
    ids=name,
)
def test_ranks(kernel, device, shape):
    x, weight = normals(shape, torch.bfloat16), weights(64)
    check(kernel, device, x, weight)
    if len(shape) > 2:
        check(kernel, device, normals(shape[-2::-1] + (64,)).movedim(0, -2), weight)
    dims = list(range(len(shape) - 1))
    scrambled = normals((*shape[:-1][::-1], 64)).permute(*dims[::-1], len(dims))
    check(kernel, device, scrambled, weight)


def test_eight_dims_that_do_not_merge(kernel, device):
    x = normals((3, 3, 3, 3, 3, 3, 3, 17))[::2, ::2, ::2, ::2, ::2, ::2, ::2]
    check(kernel, device, x[..., :16], weights(16))
    check(kernel, device, x[..., :16].permute(3, 1, 0, 2, 6, 4, 5, 7), weights(16))


def test_more_dims_than_a_kernel_takes(kernel, device):
    """Ten that do not merge: right, or refused by name."""
    x = normals((3,) * 9 + (5,))[(slice(None, None, 2),) * 9]
    try:
        y = kernel.rms_norm(strided_copy(x, device))
    except RuntimeError as error:
        assert "x: " in str(error) and "dims" in str(error)
    else:
        Formula(x).check(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_expanded_inputs(kernel, device, dtype):
    row = normals((1, 96), dtype)
    check(kernel, device, row.expand(7, 96), weights(96, dtype))
    check(kernel, device, row.expand(2, 7, 96), weights(96, dtype))
    check(kernel, device, normals((5, 1, 96), dtype).expand(5, 4, 96), weights(96, dtype))
    check(kernel, device, normals((5, 1), dtype).expand(5, 96), weights(96, dtype))
    check(kernel, device, normals((1, 1), dtype).expand(5, 96))
    x, one = normals((4, 96), dtype), torch.full((1,), 1.5, dtype=dtype)
    check(kernel, device, x, one.expand(96), bias=one.expand(96))
    x_, residual = x.to(device), row.to(device).expand(4, 96)
    y, total = kernel.fused_add_rms_norm(x_, residual)
    assert same_bytes(total, x_ + residual)
    y, total = kernel.fused_add_rms_norm(residual, x_)
    assert (
        same_bytes(total, residual + x_) and total.stride() == torch.empty_like(residual).stride()
    )


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_strided_weight_and_bias(kernel, device, pair):
    x_dtype, weight_dtype = pair
    x, table = normals((5, 200), x_dtype), normals((200, 7), weight_dtype, seed=1)
    for weight, bias in (
        (table[:, 2], table[:, 5]),
        (table[:, 0], table.t().contiguous()[3]),
        (table.flatten()[1:201], table.flatten()[:600:3]),
    ):
        for rounding in ROUNDINGS:
            check(kernel, device, x, weight, bias=bias, rounding=rounding)


def orders():
    x = normals((2, 6, 4, 8))
    return {
        "dense": x,
        "transposed": x.transpose(1, 2),
        "channels_last": x.to(memory_format=torch.channels_last),
        "reversed": normals((8, 4, 6, 2)).permute(3, 2, 1, 0),
        "sliced": x[:, 1:5],
        "rows_cut": x[..., :5],
        "stepped": x[:, ::2],
        "expanded": x[:, :1].expand(2, 6, 4, 8),
        "expanded_and_transposed": x[:, :1].expand(2, 6, 4, 8).transpose(1, 2),
        "ones": normals((1, 5, 1, 8)).transpose(1, 2),
        "odd_strides_of_ones": x[:1].as_strided((1, 6, 1, 8), (7, 32, 3, 1)),
        "one_row": normals((8, 1)).t(),
    }


@pytest.mark.parametrize("order", orders())
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_memory_order_of_results_is_that_of_elementwise_ops(kernel, device, order, rounding):
    x = strided_copy(orders()[order], device)
    expected = torch.empty_like(x).stride()
    for dtype in DTYPES:
        weight = torch.ones(x.shape[-1], dtype=dtype, device=device)
        assert kernel.rms_norm(x, weight, rounding=rounding).stride() == expected
        y, total = kernel.fused_add_rms_norm(x, x.contiguous(), weight, rounding=rounding)
        assert y.stride() == total.stride() == expected
    wanted = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(kernel.rms_norm(wanted).sum(), wanted)
    assert dx.stride() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("hidden", [64, 1000, 8200])
def test_nan_and_infinity_stay_in_their_rows(kernel, device, dtype, hidden):
    x, weight = normals((6, hidden), dtype), weights(hidden, dtype)
    clean = kernel.rms_norm(x.to(device), weight.to(device)).cpu()
    x[1, hidden // 2] = torch.nan
    x[3, hidden - 1] = torch.inf
    x[4, 0] = -torch.inf
    y = kernel.rms_norm(x.to(device), weight.to(device)).cpu()
    expected = kernel.rms_norm_reference(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[3, :-1].eq(0).all() and y[4, 1:].eq(0).all()
    for row in (0, 2, 5):
        assert same_bytes(y[row], clean[row])
    weight[3], weight[5] = torch.nan, torch.inf
    y = kernel.rms_norm(normals((6, hidden), dtype).to(device), weight.to(device)).cpu()
    assert y[:, 3].isnan().all() and y[:, 5].isinf().all()
    others = [column for column in range(hidden) if column not in (3, 5)]
    assert same_bytes(y[0][others], clean[0][others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_results_beyond_half_types_are_infinite(kernel, device, dtype):
    weight = torch.tensor([3e38, -3e38, 1.0, 0.0] * 16)
    x = torch.full((2, 64), 2.0, dtype=dtype)
    y = kernel.rms_norm(x.to(device), weight.to(device), weight_offset=0.0).cpu()
    expected = (weight * kernel.rms_norm_reference(x.float())).to(dtype)
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_zeros_and_eps_of_zero(kernel, device, dtype):
    zeros = torch.zeros(3, 64, dtype=dtype)
    assert check(kernel, device, zeros).eq(0).all()
    assert check(kernel, device, zeros, weights(64, dtype), 1e-30).eq(0).all()
    # As the classes do: 0 * rsqrt(0).
    assert kernel.rms_norm(zeros.to(device), eps=0.0).isnan().all()
    x = normals((5, 64), dtype)
    check(kernel, device, x, weights(64, dtype), 0.0)
    mixed = x.clone()
    mixed[2] = 0
    y = kernel.rms_norm(mixed.to(device), eps=0.0)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1.0, 1e3, 3e4])
def test_magnitudes(kernel, device, dtype, scale):
    x = normals((16, 257), torch.float32).clamp(-2, 2).mul(scale).to(dtype)
    for eps in (0.0, 1e-12, 1e-6, 1.0, 1e6):
        check(kernel, device, x, weights(257), eps)


@pytest.mark.parametrize("hidden", [1 << 10, 1 << 14, 1 << 18])
def test_long_sums_keep_their_precision(kernel, device, hidden):
    """A sum of equal terms in one running float32 would be off by far more than four steps."""
    x = torch.full((2, hidden), 1.1) + 0.01 * normals((2, hidden))
    check(kernel, device, x)


@pytest.mark.parametrize("eps, error", [(-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_eps_is_checked(kernel, device, eps, error):
    x = torch.ones(2, 4, device=device)
    for call in (
        lambda: kernel.rms_norm(x, eps=eps),
        lambda: kernel.fused_add_rms_norm(x, x.clone(), eps=eps),
        lambda: kernel.fused_add_rms_norm_(x, x.clone(), eps=eps),
    ):
        with pytest.raises(
            ValueError, match=f"eps: must be finite in float32 and not negative, got {error}"
        ):
            call()


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


HALF = torch.float16
REFUSALS = [
    (dict(rounding="x"), ValueError, ["rounding: must be one of once, input_dtype, weight_dtype, got 'x'"]),
    (dict(rounding=None), (TypeError, ValueError), ["rounding: ", "None"]),
    (dict(rounding=["once"]), (TypeError, ValueError), ["rounding: ", "['once']"]),
    (dict(eps="a"), (TypeError, ValueError), ["eps: ", "a"]),
    (dict(weight_offset=float("nan")), ValueError, ["weight_offset: ", "finite", "nan"]),
    (dict(weight_offset=float("inf")), ValueError, ["weight_offset: ", "finite", "inf"]),
    (dict(x=[1.0, 2.0]), TypeError, ["x: ", "Tensor", "list"]),
    (dict(x=zeros(4, 64, dtype=torch.float64)), RuntimeError, ["x: dtype must be float16, bfloat16 or float32, got float64"]),
    (dict(x=zeros(4, 64, dtype=torch.int32)), RuntimeError, ["x: dtype must be", "int32"]),
    (dict(x=zeros(4, 64, dtype=torch.complex64)), RuntimeError, ["x: dtype must be", "omplex"]),
    (dict(x=torch.tensor(1.0), weight=None), RuntimeError, ["x: ", "dim"]),
    (dict(weight=zeros(32)), RuntimeError, ["weight: must have shape [64], got [32]"]),
    (dict(weight=zeros(1)), RuntimeError, ["weight: must have shape [64], got [1]"]),
    (dict(weight=zeros(4, 64)), RuntimeError, ["weight: must have shape [64], got [4, 64]"]),
    (dict(weight=zeros(1, 64)), RuntimeError, ["weight: must have shape [64], got [1, 64]"]),
    (dict(weight=zeros(64, dtype=torch.float64)), RuntimeError, ["weight: dtype must be", "float64"]),
    (dict(weight=zeros(64, dtype=torch.int64)), RuntimeError, ["weight: dtype must be", "int64"]),
    (dict(weight=3.0), TypeError, ["weight: ", "Tensor", "float"]),
    (dict(bias=zeros(32)), RuntimeError, ["bias: must have shape [64], got [32]"]),
    (dict(bias=zeros(64, dtype=HALF)), RuntimeError, ["bias: must have the dtype of weight, float32, got float16"]),
    (dict(bias=zeros(64), weight=None), (RuntimeError, ValueError), ["bias: ", "weight"]),
    (dict(bias="b"), TypeError, ["bias: ", "Tensor", "str"]),
]  # fmt: skip
OUT_REFUSALS = [
    (dict(out=zeros(4, 32)), RuntimeError, ["out: must have shape [4, 64], got [4, 32]"]),
    (dict(out=zeros(256)), RuntimeError, ["out: must have shape [4, 64], got [256]"]),
    (dict(out=zeros(4, 64, dtype=HALF)), RuntimeError, ["out: must have dtype", "float32", "float16"]),
    (dict(out="buffer"), TypeError, ["out: ", "Tensor", "str"]),
]  # fmt: skip
RESIDUAL_REFUSALS = [
    (dict(residual=zeros(4, 32)), RuntimeError, ["residual: must have shape [4, 64], got [4, 32]"]),
    (dict(residual=zeros(64)), RuntimeError, ["residual: must have shape [4, 64], got [64]"]),
    (dict(residual=zeros(4, 64, dtype=HALF)), RuntimeError, ["residual: must have the dtype of x, float32, got float16"]),
    (dict(residual=None), TypeError, ["residual: ", "Tensor", "None"]),
]  # fmt: skip


def refuses(function, arguments, error, words, device):
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in arguments.items()
    }
    with pytest.raises(error) as caught:
        function(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "arguments, error, words",
    REFUSALS + OUT_REFUSALS,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_name_argument_rule_and_value(kernel, device, arguments, error, words):
    arguments = dict(x=zeros(4, 64), weight=zeros(64)) | arguments
    refuses(kernel.rms_norm, arguments, error, words, device)


@pytest.mark.parametrize(
    "arguments, error, words",
    REFUSALS + RESIDUAL_REFUSALS,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_of_the_fused_functions(kernel, device, arguments, error, words):
    arguments = dict(x=zeros(4, 64), weight=zeros(64)) | arguments
    if "residual" not in arguments:
        arguments["residual"] = torch.zeros_like(torch.as_tensor(arguments["x"]))
    refuses(kernel.fused_add_rms_norm, arguments, error, words, device)
    refuses(kernel.fused_add_rms_norm_, arguments, error, words, device)


def test_out_has_the_dtype_of_the_mode(kernel, device):
    x, weight = torch.ones(4, 64, dtype=HALF, device=device), torch.ones(64, device=device)
    for rounding, right, wrong in (
        ("once", HALF, torch.float32),
        ("input_dtype", torch.float32, HALF),
        ("weight_dtype", torch.float32, HALF),
    ):
        with pytest.raises(RuntimeError, match="out: must have dtype"):
            kernel.rms_norm(x, weight, rounding=rounding, out=torch.empty_like(x, dtype=wrong))
        out = torch.empty_like(x, dtype=right)
        assert kernel.rms_norm(x, weight, 0.0, rounding=rounding, out=out) is out
        assert out.eq(1).all()


def test_in_place_needs_the_dtype_of_x(kernel, device):
    """The result of the mode would not fit into x."""
    x = torch.ones(4, 64, dtype=HALF, device=device)
    for rounding in ("input_dtype", "weight_dtype"):
        with pytest.raises(RuntimeError, match="(x|weight): .*dtype.*float16"):
            kernel.fused_add_rms_norm_(
                x, x.clone(), torch.ones(64, device=device), rounding=rounding
            )
    assert x.eq(1).all()


def test_out_is_written_in_full_and_nowhere_else(kernel, device):
    for dtype in DTYPES:
        x, weight = normals((37, 53), dtype), weights(53, dtype)
        for rows, columns in ((slice(1, 38), slice(5, 58)), (slice(0, 74, 2), slice(3, 109, 2))):
            buffer = torch.full((80, 120), 7.0, dtype=dtype, device=device)
            out = buffer[rows, columns]
            assert kernel.rms_norm(x.to(device), weight.to(device), out=out) is out
            Formula(x, weight).check(out)
            out.fill_(7.0)
            assert buffer.eq(7).all()


def test_out_and_in_place_operands_need_memory_of_their_own(kernel, device):
    x, other = torch.ones(4, 64, device=device), torch.ones(4, 64, device=device)
    expanded = torch.ones(1, 64, device=device).expand(4, 64)
    overlapping = torch.ones(400, device=device).as_strided((4, 64), (63, 1))
    for tensor in (expanded, overlapping):
        with pytest.raises(RuntimeError, match="out: every element must have memory of its own"):
            kernel.rms_norm(x, out=tensor)
        with pytest.raises(RuntimeError, match="x: every element must have memory of its own"):
            kernel.fused_add_rms_norm_(tensor, other)
        with pytest.raises(
            RuntimeError, match="residual: every element must have memory of its own"
        ):
            kernel.fused_add_rms_norm_(x, tensor)
    assert x.eq(1).all() and other.eq(1).all()


def test_written_tensors_must_not_share_memory_with_others(kernel, device):
    flat = torch.arange(2048.0, device=device)
    before = flat.clone()
    x, shifted = flat[:256].view(4, 64), flat[1:257].view(4, 64)
    row, inside = flat[64:128], flat[256:512].view(4, 64)
    for call, words in (
        (lambda: kernel.rms_norm(x, out=shifted), "out: must not share memory with x"),
        (lambda: kernel.rms_norm(shifted, out=x), "out: must not share memory with x"),
        (lambda: kernel.rms_norm(inside, row, out=x), "out: must not share memory with weight"),
        (
            lambda: kernel.rms_norm(inside, flat[1024:1088], bias=row, out=x),
            "out: must not share memory with bias",
        ),
        (lambda: kernel.fused_add_rms_norm_(x, x), "must not share memory"),
        (lambda: kernel.fused_add_rms_norm_(x, shifted), "must not share memory"),
        (lambda: kernel.fused_add_rms_norm_(x, inside, row), "must not share memory with weight"),
        (
            lambda: kernel.fused_add_rms_norm_(inside, x, flat[1024:1088], bias=row),
            "must not share memory with bias",
        ),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
        assert torch.equal(flat, before)
    kernel.rms_norm(x, flat[1024:1088], out=inside)
    kernel.fused_add_rms_norm_(x, inside, flat[1024:1088])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_overlap_is_never_missed(kernel, data):
    """Random views of one buffer: whenever an element is shared, the call is refused."""
    rows, hidden = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    buffer = torch.ones(200)

    def view(name):
        strides = [data.draw(st.integers(0, 12), label=f"{name} stride") for _ in range(2)]
        return buffer.as_strided((rows, hidden), strides, data.draw(st.integers(0, 60), label=name))

    def places(tensor):
        offsets = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(tensor.shape, tensor.stride()):
            offsets = offsets[..., None] + torch.arange(size) * stride
        return (offsets + tensor.storage_offset()).flatten().tolist()

    x, other = view("x"), view("other")
    shared = set(places(x)) & set(places(other))
    itself = {name: len(set(places(t))) < rows * hidden for name, t in (("x", x), ("other", other))}
    identical = sorted(places(x)) == sorted(places(other)) and places(x) == places(other)
    for call, bad in (
        # Overwriting x exactly is the one overlap that may be allowed.
        (lambda: kernel.rms_norm(x, out=other), (shared and not identical) or itself["other"]),
        (lambda: kernel.fused_add_rms_norm_(x, other), shared or itself["x"] or itself["other"]),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "share memory" in str(error) or "memory of its own" in str(error)
        else:
            assert not bad


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_negative_bit_is_resolved(kernel, device, dtype):
    x, weight = normals((4, 64), dtype), weights(64, dtype)
    y = kernel.rms_norm(torch._neg_view(x.to(device)), torch._neg_view(weight.to(device)))
    Formula(x, weight).check(y)


def test_out_and_in_place_operands_must_store_their_values(kernel, device):
    negated = torch.empty(4, 64, dtype=torch.complex64, device=device).conj().imag
    assert negated.is_neg()
    x = torch.ones(4, 64, device=device)
    with pytest.raises(ValueError, match="out: must store its values"):
        kernel.rms_norm(x, out=negated)
    with pytest.raises(ValueError, match="x: must store its values"):
        kernel.fused_add_rms_norm_(negated, x)
    with pytest.raises(ValueError, match="residual: must store its values"):
        kernel.fused_add_rms_norm_(x, negated)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_memory_that_is_not_aligned_to_elements_is_refused(kernel, dtype):
    """torch.frombuffer and DLPack make such tensors; no device reads them as elements."""
    storage = bytearray(1 + 64 * dtype.itemsize)
    odd = torch.frombuffer(storage, dtype=dtype, offset=1)
    fine = torch.ones(64, dtype=dtype)
    rule = "must start at a multiple of its element size"
    for argument, call in (
        ("x", lambda: kernel.rms_norm(odd)),
        ("weight", lambda: kernel.rms_norm(fine, odd)),
        ("bias", lambda: kernel.rms_norm(fine, fine, bias=odd)),
        ("out", lambda: kernel.rms_norm(fine, out=odd)),
        ("residual", lambda: kernel.fused_add_rms_norm(fine, odd)),
        ("x", lambda: kernel.fused_add_rms_norm_(odd, fine)),
        ("residual", lambda: kernel.fused_add_rms_norm_(fine, odd)),
    ):
        with pytest.raises(RuntimeError, match=f"{argument}: {rule}"):
            call()


def test_a_result_too_large_for_memory_says_so(kernel, device):
    x = torch.zeros(1, 64, device=device).expand(1 << 45, 64)
    error = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    for needs_grad in (False, True):
        with pytest.raises(error, match=r"shape \[.*, 64\] .*: .*(out of|allocate) memory"):
            kernel.rms_norm(x.detach().requires_grad_(needs_grad))


@pytest.mark.parametrize("hidden", [64, 999, 1001, 4096, 70000])
def test_rms_16_overflow_of_the_sum_gives_zeros(kernel, device, hidden):
    y = kernel.rms_norm(torch.full((2, hidden), 1e30, device=device))
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("hidden", [64, 1001, 8200])
def test_an_infinite_gradient_stays_infinite_in_its_column(kernel, device, hidden):
    x, dy = normals((40, hidden)).to(device), normals((40, hidden), seed=1).to(device)
    dy[3, 5] = torch.inf
    weight, bias = (torch.ones(hidden, device=device, requires_grad=True) for _ in range(2))
    kernel.rms_norm(x, weight, bias=bias).backward(dy)
    assert bias.grad[5] == torch.inf and weight.grad[5].isinf()
    assert bias.grad.isfinite().sum() == hidden - 1 == weight.grad.isfinite().sum()


def test_reference_refuses_what_the_op_refuses(kernel):
    x = normals((2, 8))
    with pytest.raises(ValueError, match="rounding: must be one of"):
        kernel.rms_norm_reference(x, x[0], rounding="foo")
    with pytest.raises(ValueError, match="bias: needs a weight"):
        kernel.rms_norm_reference(x, bias=x[0])


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize(
    "value, error",
    [(True, TypeError), ("1.0", TypeError), (10**400, ValueError)],
    ids=["bool", "str", "huge"],
)
def test_numbers_are_numbers(kernel, name, value, error):
    with pytest.raises(error, match=f"{name}: must be"):
        kernel.rms_norm(normals((2, 8)), normals((8,)), **{name: value})
