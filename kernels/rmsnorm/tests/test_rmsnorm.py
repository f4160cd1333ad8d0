"""Values: against the classes that it replaces, against the formula, and against float64."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmsnorm_cases import (
    DTYPES,
    PAIRS,
    REPLACED,
    ROOT_ERROR,
    ROUNDINGS,
    Formula,
    assert_within,
    exact_rstd,
    in_float64,
    integers,
    name,
    normals,
    pair_name,
    replaced_with_dtypes,
    same_bytes,
    strided_copy,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def results(kernel, replaced, module, x):
    """Through the op, and through the layer bound to the module as `kernelize` does it."""
    layer = getattr(kernel.layers, replaced.layer)
    yield kernel.rms_norm(x, **replaced.keywords(module))
    yield types.MethodType(layer.forward, module)(x)


@pytest.mark.parametrize("replaced, x_dtype, weight_dtype", replaced_with_dtypes())
def test_integers_give_the_bytes_of_the_class(kernel, device, replaced, x_dtype, weight_dtype):
    for hidden in (1, 64, 256, 4096):
        module = replaced.make(hidden, weight_dtype, device=device)
        x = integers((2, 5, hidden), x_dtype).to(device)
        with torch.no_grad():
            expected = module(x)
            for y in results(kernel, replaced, module, x):
                assert same_bytes(y, expected)


@pytest.mark.parametrize("replaced, x_dtype, weight_dtype", replaced_with_dtypes())
def test_random_data_is_within_a_step_of_the_class(kernel, device, replaced, x_dtype, weight_dtype):
    for hidden, eps in ((1000, 1e-6), (2880, 1e-5)):
        module = replaced.make(hidden, weight_dtype, eps, device=device)
        x = normals((16, hidden), x_dtype, seed=3).to(device)
        formula = Formula(x, **replaced.keywords(module))
        share = None if formula.is_all_float32 else 0.999
        with torch.no_grad():
            expected = module(x)
            for y in results(kernel, replaced, module, x):
                assert_within(y, expected, formula.stated, share)


def error(y, exact):
    """Root mean square, and for half types the largest, which chance decides in float32."""
    difference = y.double() - exact
    mean = difference.square().mean().sqrt().item()
    return (mean,) if y.dtype == torch.float32 else (mean, difference.abs().max().item())


@pytest.mark.parametrize("replaced, x_dtype, weight_dtype", replaced_with_dtypes())
def test_error_is_at_most_that_of_the_class(kernel, device, replaced, x_dtype, weight_dtype):
    module = replaced.make(1024, weight_dtype, device=device)
    x = normals((128, 1024), x_dtype, seed=4).to(device)
    keywords = replaced.keywords(module)
    keywords.pop("rounding", None)
    exact = in_float64(x, **keywords).detach()
    with torch.no_grad():
        of_the_class = error(module(x), exact)
        for y in results(kernel, replaced, module, x):
            assert all(a <= 1.1 * b for a, b in zip(error(y, exact), of_the_class))


@pytest.mark.parametrize("hidden, rows", [(4096, 256), (16384, 128), (131072, 32)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_error_of_long_rows_is_at_most_that_of_the_class(kernel, device, hidden, rows, dtype):
    """A float32 weight shows the sums: nothing is rounded to a half type after them."""
    (replaced,) = (each for each in REPLACED if each.id == "t5")
    module = replaced.make(hidden, torch.float32, device=device)
    x = normals((rows, hidden), dtype, seed=4).to(device)
    exact = in_float64(x, module.weight).detach()
    with torch.no_grad():
        of_the_class = error(module(x), exact)
        for y in results(kernel, replaced, module, x):
            assert error(y, exact)[0] <= 1.1 * of_the_class[0]


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.id)
def test_gradients_are_those_of_the_class(kernel, device, replaced):
    """In float32, where the classes round nowhere: within what float32 sums of any order leave."""
    module = replaced.make(200, torch.float32, device=device)
    x = normals((7, 200), seed=5).to(device).requires_grad_()
    dy = normals((7, 200), seed=6).to(device)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x), inputs, dy)
    for y in results(kernel, replaced, module, x):
        for ours, theirs in zip(torch.autograd.grad(y, inputs, dy), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_torch_layer_without_eps_takes_that_of_the_class(kernel, device):
    for x_dtype in DTYPES:
        module = torch.nn.RMSNorm(64, dtype=x_dtype, device=device)
        x = normals((33, 64), x_dtype, scale=1e-3).to(device)
        y = types.MethodType(kernel.layers.TorchRMSNorm.forward, module)(x)
        formula = Formula(x, module.weight, torch.finfo(torch.float32).eps)
        assert_within(y, module(x), formula.slack)


@pytest.mark.parametrize("shape, x_shape", [((8,), (5, 9)), ((3, 8), (5, 8, 3))])
def test_torch_layer_refuses_other_trailing_dims(kernel, shape, x_shape):
    module = torch.nn.RMSNorm(shape, elementwise_affine=False)
    layer = types.MethodType(kernel.layers.TorchRMSNorm.forward, module)
    for forward in (module, layer):
        with pytest.raises(RuntimeError):
            forward(normals(x_shape))


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 4, 8)], ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_torch_layer_normalizes_several_dims(kernel, device, shape, dtype):
    module = torch.nn.RMSNorm(shape, eps=1e-6).to(device)
    with torch.no_grad():
        module.weight.copy_(weights(module.weight.numel()).view(shape))
    module = module.to(dtype)
    layer = types.MethodType(kernel.layers.TorchRMSNorm.forward, module)
    x = integers((5, 3, *shape), dtype).to(device)
    for view in (x, x.transpose(0, 1), x[:, 1:]):
        assert same_bytes(layer(view), module(view))
    without = torch.nn.RMSNorm(shape, eps=1e-6, elementwise_affine=False)
    assert same_bytes(types.MethodType(kernel.layers.TorchRMSNorm.forward, without)(x), without(x))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_every_mode_is_the_formula(kernel, device, pair, rounding):
    x_dtype, weight_dtype = pair
    for hidden in (64, 1000, 8200):
        x = normals((9, hidden), x_dtype, seed=hidden)
        weight, bias = weights(hidden, weight_dtype), normals((hidden,), weight_dtype, seed=2)
        for index, (offset, added) in enumerate(
            [(0.0, None), (1.0, None), (0.0, bias), (-0.25, bias)]
        ):
            options = dict(eps=10.0 ** -(4 + index), weight_offset=offset, rounding=rounding)
            y = kernel.rms_norm(
                x.to(device),
                weight.to(device),
                bias=None if added is None else added.to(device),
                **options,
            )
            formula = Formula(x, weight, bias=added, **options)
            formula.check(y)
        y = kernel.rms_norm(x.to(device), eps=1e-3, rounding=rounding)
        Formula(x, None, 1e-3).check(y)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_results_follow_from_the_root_bit_for_bit(kernel, device, pair, rounding):
    """Every rounding of the mode and no other one, no contraction to fused operations."""
    x_dtype, weight_dtype = pair
    for hidden in (64, 1000, 4096, 8200):
        x, weight = normals((5, hidden), x_dtype), weights(hidden, weight_dtype)
        bias = normals((hidden,), weight_dtype, seed=2)
        for added, offset in ((None, 0.0), (None, 1.0), (bias, 0.3)):
            rest = (weight, 1e-5, ROUNDINGS.index(rounding), offset, added)
            y, rstd = kernel._ops.ops.rms_norm_train(
                x.to(device), *(t.to(device) if isinstance(t, torch.Tensor) else t for t in rest)
            )
            options = dict(bias=added, weight_offset=offset, rounding=rounding)
            assert same_bytes(y.cpu(), Formula(x, weight, 1e-5, rstd=rstd, **options).y)
            options["bias"] = None if added is None else added.to(device)
            assert same_bytes(y, kernel.rms_norm(x.to(device), weight.to(device), 1e-5, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_root_is_that_of_the_exact_sum(kernel, device, dtype):
    for hidden in (1, 3, 64, 1000, 4096, 8200, 32768, 131072, 262144):
        x = normals((max(2, 65536 // hidden), hidden), dtype, seed=hidden)
        for spread in (x, x.abs() + 1, torch.full_like(x[:2], 1.1)):
            _, rstd = kernel._ops.ops.rms_norm_train(spread.to(device))
            exact = exact_rstd(spread, 1e-6)[..., 0]
            assert ((rstd.cpu().double() - exact).abs() <= ROOT_ERROR * exact).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_reference_is_the_formula(kernel, device, pair, rounding):
    x_dtype, weight_dtype = pair
    x, weight = normals((33, 1000), x_dtype), weights(1000, weight_dtype)
    bias, residual = normals((1000,), weight_dtype, seed=2), normals((33, 1000), x_dtype, seed=9)
    options = dict(eps=1e-5, weight_offset=0.5, rounding=rounding)
    on_device = [tensor.to(device) for tensor in (x, residual, weight, bias)]
    x_, residual_, weight_, bias_ = on_device
    Formula(x, weight, bias=bias, **options).check(
        kernel.rms_norm_reference(x_, weight_, bias=bias_, **options)
    )
    y, total = kernel.fused_add_rms_norm_reference(x_, residual_, weight_, bias=bias_, **options)
    assert same_bytes(total, (x_ + residual_))
    Formula(x + residual, weight, bias=bias, **options).check(y)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_result_is_rounded_once_and_half_to_even(rms_norm, device, dtype, rounding):
    """Rows of ones have n = 1, so that y is the weight after its rounding."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator)
    ties = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    weight = torch.cat([bits.to(torch.int32).view(torch.float32), ties, ties * (1 + 2.0**-8)])
    weight = torch.cat([weight, weight * 2.0**-20, normals((1 << 16,)) * 2.0**-12])
    x = torch.ones(2, weight.numel(), dtype=dtype)
    y = rms_norm(x.to(device), weight.to(device), 0.0, rounding=rounding).cpu()
    expected = weight.to(y.dtype).expand(2, -1)
    assert y.dtype == (dtype if rounding == "once" else torch.float32)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(7, torch.inf), expected.nan_to_num(7, torch.inf))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_every_finite_value_of_half_types(rms_norm, device, dtype):
    """All of them, subnormals too, in rows of neighbours and as weights."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    x = values[: values.numel() // 64 * 64].view(-1, 64)
    for eps in (1e-6, 1e-30):
        formula = Formula(x, None, eps)
        fits = x.float().square().sum(-1).isfinite()
        y = rms_norm(x.to(device), eps=eps).cpu()
        assert_within(y[fits], formula.y[fits], formula.slack[fits])
        assert y[~fits].eq(0).all()
    ones = torch.ones(1, values.numel(), dtype=dtype)
    for rounding in ROUNDINGS:
        y = rms_norm(ones.to(device), values.to(device), 0.0, rounding=rounding).cpu()
        assert torch.equal(y[0], values)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
@pytest.mark.kernels_ci
def test_fused_add_is_the_norm_of_the_rounded_sum(kernel, device, pair, rounding):
    x_dtype, weight_dtype = pair
    for hidden in (1, 65, 1024, 8200):
        x = normals((3, 5, hidden), x_dtype).to(device)
        residual = normals((3, 5, hidden), x_dtype, seed=1, scale=3.0).to(device)
        weight = weights(hidden, weight_dtype).to(device)
        bias = normals((hidden,), weight_dtype, seed=2).to(device)
        options = dict(bias=bias, weight_offset=0.5, rounding=rounding)
        for x_view, residual_view in (
            (x, residual),
            (x.transpose(0, 1), residual.transpose(0, 1)),
            (x[:, 1:], residual[:, :-1]),
            (x, residual[:1].expand_as(residual)),
            (x, residual.transpose(0, 1).contiguous().transpose(0, 1)),
        ):
            y, total = kernel.fused_add_rms_norm(x_view, residual_view, weight, 1e-5, **options)
            assert same_bytes(total, x_view + residual_view)
            assert same_bytes(y, kernel.rms_norm(total, weight, 1e-5, **options))
            assert total.stride() == y.stride() == torch.empty_like(x_view).stride()
        y, total = kernel.fused_add_rms_norm(x, residual, weight, 1e-5, **options)
        if y.dtype == x_dtype:
            assert kernel.fused_add_rms_norm_(x, residual, weight, 1e-5, **options) is None
            assert same_bytes(x, y) and same_bytes(residual, total)


def test_fused_add_without_weight(kernel, device):
    for dtype in DTYPES:
        x, residual = normals((7, 100), dtype).to(device), normals((7, 100), dtype, 2).to(device)
        y, total = kernel.fused_add_rms_norm(x, residual)
        assert same_bytes(total, x + residual) and same_bytes(y, kernel.rms_norm(total))
        kernel.fused_add_rms_norm_(x, residual)
        assert same_bytes(residual, total) and same_bytes(x, y)


def test_defaults_are_those_of_the_signature(kernel, device):
    """eps 1e-6, no weight, no bias, no offset, rounded once."""
    x, weight = normals((9, 333), torch.bfloat16, scale=1e-3), weights(333, torch.float32)
    x_, weight_ = x.to(device), weight.to(device)
    written_out = dict(eps=1e-6, bias=None, weight_offset=0.0, rounding="once", out=None)
    assert same_bytes(kernel.rms_norm(x_, weight_), kernel.rms_norm(x_, weight_, **written_out))
    assert same_bytes(kernel.rms_norm(x_), kernel.rms_norm(x_, None, 1e-6))
    Formula(x, weight, 1e-6).check(kernel.rms_norm(x_, weight_))


@st.composite
def strided(draw, shape, dtype, seed):
    """A tensor of that shape over a larger buffer: permuted, stepped, cut and expanded."""
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape]
    spare = [draw(st.sampled_from([0, 0, 1, 2])) for _ in shape]
    order = list(range(len(shape)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    sizes = [size * step + more for size, step, more in zip(shape, steps, spare)]
    buffer = normals([sizes[dim] for dim in order], dtype, seed)
    tensor = buffer.permute([order.index(dim) for dim in range(len(shape))])
    for dim, (size, step, more) in enumerate(zip(shape, steps, spare)):
        cut = tensor.narrow(dim, draw(st.integers(0, more)), size * step)
        tensor = cut[(slice(None),) * dim + (slice(None, None, step),)]
        if size > 1 and draw(st.integers(0, 7)) == 0:
            tensor = tensor.narrow(dim, 0, 1).expand(*tensor.shape)
    assert list(tensor.shape) == list(shape)
    return tensor


@st.composite
def call(draw):
    rows = draw(st.lists(st.integers(0, 4), max_size=5))
    hidden = draw(
        st.one_of(
            st.integers(1, 40), st.sampled_from([64, 96, 128, 255, 256, 1000, 1024, 2048, 8200])
        )
    )
    x_dtype, weight_dtype = draw(st.sampled_from(PAIRS))
    x = draw(strided([*rows, hidden], x_dtype, draw(st.integers(0, 99))))
    residual = draw(strided([*rows, hidden], x_dtype, 100)) if draw(st.booleans()) else None
    weight = bias = None
    if draw(st.integers(0, 4)) > 0:
        weight = draw(strided([hidden], weight_dtype, 101))
        if draw(st.booleans()):
            bias = draw(strided([hidden], weight_dtype, 102))
    return x, residual, weight, bias


@pytest.mark.kernels_ci
@pytest.mark.gpu
@settings(max_examples=200, deadline=None)
@given(
    drawn=call(),
    rounding=st.sampled_from(ROUNDINGS),
    weight_offset=st.sampled_from([0.0, 1.0, -0.3]),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2, 1.0]),
    use_out=st.booleans(),
)
def test_any_shape_stride_dtype_and_mode(kernel, drawn, rounding, weight_offset, eps, use_out):
    x, residual, weight, bias = drawn
    options = dict(eps=eps, weight_offset=weight_offset, rounding=rounding)
    total = x if residual is None else x + residual
    formula = Formula(total, weight, bias=bias, **options)
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        there = [
            None if tensor is None else strided_copy(tensor, device)
            for tensor in (x, residual, weight, bias)
        ]
        x_, residual_, weight_, bias_ = there
        before = [None if tensor is None else tensor.clone() for tensor in there]
        out = None
        if residual is not None:
            y, residual_out = kernel.fused_add_rms_norm(
                x_, residual_, weight_, bias=bias_, **options
            )
            assert same_bytes(residual_out.cpu(), total)
            assert x.numel() == 0 or residual_out.stride() == torch.empty_like(x_).stride()
        else:
            if use_out:  # every second column of a larger buffer
                buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, device=device)
                out = buffer.to(formula.y.dtype)[..., ::2]
            y = kernel.rms_norm(x_, weight_, bias=bias_, out=out, **options)
        formula.check(y)
        if out is None:
            assert x.numel() == 0 or y.stride() == torch.empty_like(x_).stride()
        else:
            assert y is out
            assert out.as_strided(out.shape, out.stride(), 1).eq(7).all()
        for tensor, copy in zip(there, before):
            assert tensor is None or same_bytes(tensor, copy)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_threads_do_not_change_bytes(kernel, pair):
    """Forward and backward, few and many rows, dense and strided."""
    x_dtype, weight_dtype = pair
    for shape in ((257, 1000), (5, 40000), (3, 700, 65)):
        weight = weights(shape[-1], weight_dtype).requires_grad_()
        bias = normals(shape[-1:], weight_dtype, seed=2).requires_grad_()
        dense = normals(shape, x_dtype)
        for x in (dense, dense.transpose(0, -1).contiguous().transpose(0, -1)):
            runs = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                try:
                    leaf = strided_copy(x, "cpu").requires_grad_()
                    y, total = kernel.fused_add_rms_norm(leaf, x, weight, bias=bias)
                    dy, dtotal = torch.ones_like(y), torch.ones_like(total)
                    inputs = [leaf, weight, bias]
                    gradients = torch.autograd.grad([y, total], inputs, [dy, dtotal])
                finally:
                    torch.set_num_threads(1)
                runs.append([y, total, *gradients])
            for run in runs[1:]:
                assert all(same_bytes(a, b) for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rows_do_not_depend_on_their_neighbours(kernel, device, dtype):
    """A row alone, in a batch and at another place has the same bytes."""
    for hidden in (64, 1000, 8200):
        x, weight = normals((70, hidden), dtype).to(device), weights(hidden, dtype).to(device)
        y = kernel.rms_norm(x, weight)
        for row in (0, 1, 37, 69):
            assert same_bytes(kernel.rms_norm(x[row], weight), y[row])
            assert same_bytes(kernel.rms_norm(x[row:], weight), y[row:])
