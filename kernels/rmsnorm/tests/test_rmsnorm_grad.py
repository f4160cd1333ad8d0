"""Gradients against float64, what is kept for them, and none where none is asked for."""

import gc

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from rmsnorm_cases import (
    DTYPES,
    PAIRS,
    ROUNDINGS,
    Formula,
    in_float64,
    name,
    normals,
    pair_name,
    result_dtype,
    same_bytes,
    spacing,
    strided_copy,
    weights,
)
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

SHAPES = [(1, 1), (7, 64), (3, 5, 128), (1, 1000), (7, 4096), (2, 8200), (300, 96), (0, 64), (64,)]


def within_rounding(ours, exact, arithmetic):
    """One rounding to the dtype, and 8 roundings of float32 in terms of size `arithmetic`."""
    ours = ours.cpu()
    allowed = 0.5 * spacing(exact, ours.dtype) * (1 + 2.0**-10) + 8 * 2.0**-24 * arithmetic
    difference = (ours.double() - exact).abs()
    assert (difference <= allowed).all(), f"{(difference / allowed).max().item():.3g} of the limit"


def judge(tensors, dy, weight_offset=0.0, eps=1e-6, dresidual=None):
    """Exact gradients of x, weight and bias, each with the size of the terms that it sums."""
    leaves = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    x, weight, bias = leaves
    dy = dy.cpu().double()
    y = in_float64(x, weight, eps, bias, weight_offset)
    y.backward(dy)
    with torch.no_grad():
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        n = x * rstd
        g = dy if weight is None else dy * (weight + weight_offset)
        # g itself carries a rounding of w and of the product; the sum those of its terms.
        terms = rstd * (g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True))
        if dresidual is not None:
            x.grad += dresidual.cpu().double()
            terms = terms + dresidual.cpu().double().abs()
        rows = (dy * n).abs().reshape(-1, x.shape[-1]).sum(0)
        sums = dy.abs().reshape(-1, x.shape[-1]).sum(0)
    return [
        None if leaf is None else (leaf.grad, size)
        for leaf, size in zip(leaves, (terms, rows, sums))
    ]


def check_gradients(kernel, device, x, dy, weight, bias=None, residual=None, **options):
    """All of them at once, through the op, on that device and with the strides given."""
    leaves = [
        None if tensor is None else strided_copy(tensor, device).requires_grad_()
        for tensor in (x, weight, bias, residual)
    ]
    x_, weight_, bias_, residual_ = leaves
    dy_, dresidual = strided_copy(dy, device), None
    if residual is None:
        y = kernel.rms_norm(x_, weight_, bias=bias_, **options)
        y.backward(dy_)
        total = x
    else:
        dresidual = normals(x.shape, x.dtype, seed=77)
        y, total_ = kernel.fused_add_rms_norm(x_, residual_, weight_, bias=bias_, **options)
        torch.autograd.backward([y, total_], [dy_, dresidual.to(device)])
        assert same_bytes(residual_.grad, x_.grad)
        total = x + residual
    judged = judge(
        (total, weight, bias),
        dy,
        options.get("weight_offset", 0.0),
        options.get("eps", 1e-6),
        dresidual,
    )
    for leaf, exact in zip((x_, weight_, bias_), judged):
        if leaf is not None:
            assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
            within_rounding(leaf.grad, *exact)
    return leaves


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_gradients_of_every_dtype_and_mode(kernel, device, pair, rounding):
    x_dtype, weight_dtype = pair
    for shape in SHAPES:
        hidden = shape[-1]
        x, weight = normals(shape, x_dtype), weights(hidden, weight_dtype)
        dy = normals(shape, result_dtype(*pair, rounding), seed=3)
        bias = normals((hidden,), weight_dtype, seed=4)
        check_gradients(kernel, device, x, dy, weight, bias, rounding=rounding, weight_offset=0.5)
        residual = normals(shape, x_dtype, seed=5)
        check_gradients(kernel, device, x, dy, weight, bias, residual, rounding=rounding, eps=1e-3)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_gradients_of_odd_hidden_sizes(kernel, device, pair):
    x_dtype, weight_dtype = pair
    for hidden in (1, 2, 5, 63, 129, 257, 513, 1001, 1025, 2049, 4097, 8193, 20000):
        x, weight = normals((3, hidden), x_dtype), weights(hidden, weight_dtype)
        dy = normals((3, hidden), x_dtype, seed=1)
        check_gradients(kernel, device, x, dy, weight)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_nothing_is_left_over_from_the_call_before(kernel, device, pair):
    """Lanes past the end of a row hold whatever was there: NaNs, after a call that has only those."""
    for hidden in (1, 8, 9, 20, 40, 63, 100, 1001):
        results = []
        for first in (4096, 8200):
            for fill, size in ((torch.nan, first), (None, hidden)):
                x, weight = normals((1, size), pair[0]), weights(size, pair[1])
                if fill is not None:
                    x, weight = torch.full_like(x, fill), torch.full_like(weight, fill)
                x, weight = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
                y, total = kernel.fused_add_rms_norm(x, x.detach(), weight, weight_offset=0.5)
                dy, dtotal = torch.ones_like(y), torch.ones_like(total)
                gradients = torch.autograd.grad([y, total], [x, weight], [dy, dtotal])
            results.append([y, total, *gradients])
        for a, b in zip(*results):
            assert a.isfinite().all() and same_bytes(a, b)


@pytest.mark.parametrize("hidden", [40000, 131072, 262145])
def test_gradients_of_long_rows(kernel, device, hidden):
    x, weight = normals((2, hidden), torch.bfloat16), weights(hidden)
    check_gradients(kernel, device, x, normals((2, hidden), torch.bfloat16, seed=1), weight)


@pytest.mark.parametrize("rows", [1, 2, 63, 1000, 8192, 40000])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_gradients_of_many_rows(kernel, device, dtype, rows):
    x, weight = normals((rows, 64), dtype), weights(64, dtype)
    bias = normals((64,), dtype, seed=2)
    check_gradients(kernel, device, x, normals((rows, 64), dtype, seed=1), weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_rms_13_weight_gradient_is_summed_in_float32(kernel, device, dtype):
    rows, hidden = 8192, 1024
    x, dy = normals((rows, hidden), dtype), normals((rows, hidden), dtype, seed=1)
    dy += 0.25  # the sum of dbias grows far beyond its terms
    weight, bias = weights(hidden, dtype), torch.zeros(hidden, dtype=dtype)
    leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight, bias)]
    x_, weight_, bias_ = leaves
    kernel.rms_norm(x_, weight_, bias=bias_).backward(dy.to(device))
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    for gradient, terms in ((weight_.grad, dy.float() * n), (bias_.grad, dy.float())):
        expected = terms.double().sum(0)
        far = (gradient.cpu().double() - expected).abs() / spacing(expected, dtype)
        assert far.max() <= 2, f"{far.max().item()} steps"


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_gradients_of_views(kernel, device, dtype):
    """x, dy and weight of any strides."""
    heads = normals((2, 16, 3, 72), dtype)
    dy = normals((2, 3, 16, 72 * 2), dtype, seed=1)
    weight, bias = weights(72 * 3, dtype)[::3], normals((72, 2), dtype, seed=2)[:, 1]
    for x in (
        heads.transpose(1, 2),
        normals((2, 3, 17, 73), dtype)[:, :, 1:, 1:],
        normals((3, 2, 72, 16), dtype).permute(1, 0, 3, 2),
        normals((2, 3, 1, 72), dtype).expand(2, 3, 16, 72),
        normals((2, 3, 16, 1), dtype).expand(2, 3, 16, 72),
    ):
        for incoming in (
            dy[..., ::2],
            dy[..., :72],
            dy[..., 1:73],
            dy[..., :72].transpose(1, 2).contiguous().transpose(1, 2),
            normals((1, 1, 1, 72), dtype).expand(2, 3, 16, 72),
            normals((2, 3, 16, 1), dtype).expand(2, 3, 16, 72),
        ):
            x_, *_ = check_gradients(kernel, device, x, incoming, weight, bias)
            check_gradients(kernel, device, x, incoming, weight, residual=heads.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_expanded_gradient_of_a_sum(kernel, device, dtype):
    """sum().backward() gives a dy of stride 0 everywhere."""
    for shape in ((5, 64), (3, 1001), (64,)):
        x, weight = normals(shape, dtype), weights(shape[-1], dtype)
        x_, weight_ = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
        kernel.rms_norm(x_, weight_).sum().backward()
        exact = judge((x, weight, None), torch.ones(shape))
        within_rounding(x_.grad, *exact[0])
        within_rounding(weight_.grad, *exact[1])


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_gradients_at_every_offset(kernel, device, dtype):
    hidden = 136
    for offset in range(16 // dtype.itemsize):
        flat, incoming = normals((3 * 144,), dtype), normals((3 * 144,), dtype, seed=1)
        x = flat.as_strided((3, hidden), (hidden + offset % 3, 1), offset % 5)
        dy = incoming.as_strided((3, hidden), (hidden + offset % 2, 1), offset)
        x_ = flat.to(device).as_strided(x.shape, x.stride(), offset % 5).requires_grad_()
        dy_ = incoming.to(device).as_strided(dy.shape, dy.stride(), offset)
        table = weights(hidden + 8, dtype)
        weight = table[offset % 4 :][:hidden]
        weight_ = table.to(device)[offset % 4 :][:hidden].requires_grad_()
        kernel.rms_norm(x_, weight_).backward(dy_)
        exact = judge((x, weight, None), dy)
        within_rounding(x_.grad, *exact[0])
        within_rounding(weight_.grad, *exact[1])


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_gradients_are_deterministic(kernel, device, pair):
    x_dtype, weight_dtype = pair
    for shape in ((1000, 64), (333, 1000), (5, 8200)):
        x, residual = normals(shape, x_dtype).to(device), normals(shape, x_dtype, 1).to(device)
        weight = weights(shape[-1], weight_dtype).to(device)
        bias, dy = torch.zeros_like(weight), normals(shape, x_dtype, 2).to(device)
        inputs = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]

        def run(inputs=inputs, dy=dy):
            x, residual, weight, bias = inputs
            y, total = kernel.fused_add_rms_norm(x, residual, weight, bias=bias)
            return torch.autograd.grad([y, total], inputs, [dy, dy])

        for first, second in zip(run(), run()):
            assert same_bytes(first, second)


WANTED = [("x",), ("weight",), ("bias",), ("residual",), ("x", "weight"), ("residual", "bias")]


@pytest.mark.parametrize("wanted", WANTED, ids="_".join)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_only_the_gradients_asked_for(kernel, device, wanted, fused):
    """Each equals the one that comes when all are asked for; on CUDA the bias takes other kernels."""
    if "residual" in wanted and not fused:
        pytest.skip("has no residual")
    tensors = dict(
        x=normals((9, 200)),
        residual=normals((9, 200), seed=1),
        weight=weights(200),
        bias=normals((200,), seed=2),
    )
    dy = normals((9, 200), seed=3).to(device)

    def run(wanted):
        leaves = {
            key: strided_copy(tensor, device).requires_grad_(key in wanted)
            for key, tensor in tensors.items()
        }
        residual = leaves.pop("residual")
        if fused:
            y, _ = kernel.fused_add_rms_norm(residual=residual, **leaves)
        else:
            y = kernel.rms_norm(**leaves)
        y.backward(dy)
        return {key: tensor.grad for key, tensor in {**leaves, "residual": residual}.items()}

    everything, some = run(tensors), run(wanted)
    for key, gradient in some.items():
        if key not in wanted:
            assert gradient is None
        elif device == "cpu":
            assert same_bytes(gradient, everything[key])
        else:
            torch.testing.assert_close(gradient, everything[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["y", "total", "neither"])
def test_fused_results_may_be_used_alone(kernel, device, which):
    x, residual, weight = normals((5, 96)), normals((5, 96), seed=1), weights(96)
    leaves = [tensor.to(device).requires_grad_() for tensor in (x, residual, weight)]
    y, total = kernel.fused_add_rms_norm(*leaves)
    dy = normals((5, 96), seed=2).to(device)
    if which == "neither":
        (total.detach() + y.detach()).sum()
        assert all(leaf.grad is None for leaf in leaves)
        return
    (y if which == "y" else total).backward(dy)
    if which == "total":
        assert same_bytes(leaves[0].grad, dy) and same_bytes(leaves[1].grad, dy)
        assert leaves[2].grad is None or leaves[2].grad.eq(0).all()
    else:
        within_rounding(leaves[0].grad, *judge((x + residual, weight, None), dy)[0])
        assert same_bytes(leaves[1].grad, leaves[0].grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_x_as_its_own_residual(kernel, device, dtype):
    """Both gradients arrive at the one tensor."""
    x = normals((5, 96), dtype)
    x_ = x.to(device).requires_grad_()
    y, _ = kernel.fused_add_rms_norm(x_, x_)
    dy = normals((5, 96), dtype, seed=1)
    y.backward(dy.to(device))
    (exact, terms), *_ = judge((x + x, None, None), dy)
    allowed = 2 * spacing(2 * exact, dtype) + 2.0**-20 * terms
    assert ((x_.grad.cpu().double() - 2 * exact).abs() <= allowed).all()


def saved_by(run):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        result = run()
    return saved, result


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_x_rstd_and_weight_are_all_that_is_kept(kernel, device, pair):
    x = normals((6, 5, 64), pair[0]).to(device).requires_grad_()
    residual = normals((6, 5, 64), pair[0], seed=1).to(device)
    weight = weights(64, pair[1]).to(device).requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    saved, _ = saved_by(lambda: kernel.rms_norm(x, weight, bias=bias))
    assert sorted(tensor.numel() for tensor in saved) == [30, 64, x.numel()]
    pointers = {tensor.numel(): tensor.data_ptr() for tensor in saved}
    assert pointers[64] == weight.data_ptr() and pointers[x.numel()] == x.data_ptr()
    assert next(tensor for tensor in saved if tensor.numel() == 30).dtype == torch.float32
    saved, (_, total) = saved_by(lambda: kernel.fused_add_rms_norm(x, residual, weight))
    assert sorted(tensor.numel() for tensor in saved) == [30, 64, x.numel()]
    assert total.data_ptr() in [tensor.data_ptr() for tensor in saved]
    saved, _ = saved_by(lambda: kernel.rms_norm(x))
    assert sorted(tensor.numel() for tensor in saved) == [30, x.numel()]


def test_autograd_sees_when_what_it_kept_is_overwritten(kernel, device):
    x = normals((4, 64)).to(device).requires_grad_()
    y, total = kernel.fused_add_rms_norm(x, torch.zeros_like(x))
    with torch.no_grad():
        total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    other = normals((4, 64)).to(device)
    product = (normals((4, 64)).to(device).requires_grad_() * other).sum()
    kernel.rms_norm(x.detach(), out=other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    first, second = normals((4, 64)).to(device), normals((4, 64)).to(device)
    product = (x * first).sum() + (x * second).sum()
    kernel.fused_add_rms_norm_(first, second)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_all_04_no_grad_keeps_nothing(kernel, device):
    x = normals((64, 512)).to(device).requires_grad_()
    weight = weights(512).to(device).requires_grad_()
    with torch.no_grad():
        assert kernel.rms_norm(x, weight).grad_fn is None
        assert all(y.grad_fn is None for y in kernel.fused_add_rms_norm(x, x, weight))
        if device == "cuda":
            used = torch.cuda.memory_allocated()
            for _ in range(100):
                kernel.rms_norm(x, weight)
                kernel.fused_add_rms_norm(x, x, weight)
            assert torch.cuda.memory_allocated() == used
    without = [tensor.detach() for tensor in (x, weight)]
    saved, y = saved_by(lambda: kernel.rms_norm(*without))
    assert not saved and y.grad_fn is None
    gc.collect()
    before = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
    for _ in range(20):
        kernel.rms_norm(x, weight).sum().backward()
    gc.collect()
    # x and weight have a gradient now.
    assert sum(type(thing) is torch.Tensor for thing in gc.get_objects()) <= before + 2


def test_all_05_gradient_depends_on_the_inputs(kernel, device):
    x, weight = normals((3, 64)).to(device), weights(64).to(device)
    assert not kernel.rms_norm(x, weight).requires_grad
    assert kernel.rms_norm(x, weight.clone().requires_grad_()).requires_grad
    assert kernel.rms_norm(x.clone().requires_grad_(), weight).requires_grad
    y, total = kernel.fused_add_rms_norm(x, x.clone().requires_grad_(), weight)
    assert y.requires_grad and total.requires_grad
    assert kernel.fused_add_rms_norm(x, x, weight.clone().requires_grad_())[0].requires_grad
    with torch.inference_mode():
        assert not kernel.rms_norm(x.clone().requires_grad_(), weight).requires_grad
        inference = kernel.rms_norm(x, weight)
    assert same_bytes(kernel.rms_norm(inference), kernel.rms_norm(inference.clone()))


def test_all_06_training_never_loses_the_gradient(kernel, device):
    """Below and above the norm, through every function that takes part in training."""
    below, above = torch.nn.Linear(8, 64).to(device), torch.nn.Linear(64, 8).to(device)
    weight = torch.nn.Parameter(weights(64).to(device))
    x = normals((5, 8)).to(device)
    y = kernel.rms_norm(below(x), weight)
    y, total = kernel.fused_add_rms_norm(y, below(x), weight)
    (above(y) + above(total)).sum().backward()
    for parameter in (*below.parameters(), *above.parameters(), weight):
        assert parameter.grad.abs().sum() > 0


def test_what_writes_refuses_to_lose_a_gradient(kernel, device):
    x, other = normals((3, 64)).to(device), normals((3, 64)).to(device)
    weight, leaf = weights(64).to(device).requires_grad_(), x.clone().requires_grad_()
    out = torch.empty_like(x)
    for call in (
        lambda: kernel.rms_norm(leaf, out=out),
        lambda: kernel.rms_norm(x, weight, out=out),
        lambda: kernel.rms_norm(x, out=leaf),
    ):
        with pytest.raises((RuntimeError, ValueError), match="out: .*gradient"):
            call()
    for call in (
        lambda: kernel.fused_add_rms_norm_(leaf, other),
        lambda: kernel.fused_add_rms_norm_(x, leaf),
        lambda: kernel.fused_add_rms_norm_(x, other, weight),
        lambda: kernel.fused_add_rms_norm_(x, other, weight.detach(), bias=weight),
    ):
        with pytest.raises((RuntimeError, ValueError), match="gradient"):
            call()
    with torch.no_grad():
        assert kernel.rms_norm(leaf, weight, out=out) is out
        kernel.fused_add_rms_norm_(x, other, weight)
    with torch.inference_mode():
        inference = torch.empty(3, 64, device=device)
        assert kernel.rms_norm(x, out=inference) is inference
    with pytest.raises((RuntimeError, ValueError), match="out: .*inference tensor"):
        kernel.rms_norm(x, out=inference)
    with pytest.raises((RuntimeError, ValueError), match="x: .*inference tensor"):
        kernel.fused_add_rms_norm_(inference, other)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="out: .*forward-mode"):
        kernel.rms_norm(x, out=out)


def test_second_derivative_is_refused_with_its_reason(kernel, device):
    x = normals((3, 64)).to(device).requires_grad_()
    weight = weights(64).to(device).requires_grad_()
    for leaf in (x, weight):
        with pytest.raises(RuntimeError, match="rms_norm: a second derivative is not supported"):
            (gradient,) = torch.autograd.grad(
                kernel.rms_norm(x, weight).square().sum(), leaf, create_graph=True
            )
            gradient.square().sum().backward()
    y, total = kernel.fused_add_rms_norm(x, x.detach(), weight)
    with pytest.raises(RuntimeError, match="a second derivative is not supported"):
        (gradient,) = torch.autograd.grad((y * total).sum(), x, create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_transforms_are_those_of_the_reference(kernel, device, dtype, rounding):
    x, tangent = normals((4, 32), dtype).to(device), normals((4, 32), dtype, seed=1).to(device)
    weight, bias = weights(32).to(device), normals((32,), seed=2).to(device)
    options = dict(bias=bias, weight_offset=0.5, rounding=rounding)

    def ours(x, weight=weight):
        return kernel.rms_norm(x, weight, 1e-5, **options)

    def reference(x, weight=weight):
        return kernel.rms_norm_reference(x, weight, 1e-5, **options)

    def loss(function):
        return lambda x, weight: function(x, weight).float().square().sum()

    for got, expected in zip(
        torch.func.grad(loss(ours), argnums=(0, 1))(x, weight),
        torch.func.grad(loss(reference), argnums=(0, 1))(x, weight),
    ):
        assert same_bytes(got, expected)
    for got, expected in zip(
        torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(reference, (x,), (tangent,))
    ):
        assert same_bytes(got, expected)
    batch = torch.stack([x, tangent], 1)
    mapped = torch.vmap(ours, in_dims=1)(batch)
    assert same_bytes(mapped, torch.vmap(reference, in_dims=1)(batch))
    Formula(x, weight, 1e-5, **options).check(mapped[0])
    per_sample = torch.vmap(torch.func.grad(loss(ours), argnums=1), in_dims=(0, None))(x, weight)
    assert per_sample.shape == (4, 32)
    expected = torch.func.jvp(reference, (x,), (tangent,))[1]
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, tangent)))
        assert same_bytes(result.tangent, expected)


def test_transforms_of_the_fused_function(kernel, device):
    x, residual = normals((4, 32)).to(device), normals((4, 32), seed=1).to(device)

    def loss(function):
        return lambda x, residual: sum(part.square().sum() for part in function(x, residual))

    ours = torch.func.grad(loss(kernel.fused_add_rms_norm), argnums=(0, 1))(x, residual)
    expected = torch.func.grad(loss(kernel.fused_add_rms_norm_reference), argnums=(0, 1))
    for got, wanted in zip(ours, expected(x, residual)):
        assert same_bytes(got, wanted)
    hessian = torch.func.hessian(lambda x: kernel.rms_norm(x).square().sum())(x[0])
    wanted = torch.func.hessian(lambda x: kernel.rms_norm_reference(x).square().sum())(x[0])
    torch.testing.assert_close(hessian, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
def test_gradient_checkpointing(kernel, device, use_reentrant):
    x, weight = normals((5, 64), torch.bfloat16), weights(64)

    def run(wrap):
        leaves = [strided_copy(tensor, device).requires_grad_() for tensor in (x, weight)]

        def block(x, weight):
            y, total = kernel.fused_add_rms_norm(kernel.rms_norm(x, weight), x, weight)
            return y * total

        wrap(block, *leaves).float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    plain = run(lambda block, *leaves: block(*leaves))
    kept = run(lambda block, *leaves: checkpoint(block, *leaves, use_reentrant=use_reentrant))
    assert all(same_bytes(a, b) for a, b in zip(plain, kept))


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=name)
def test_autocast_takes_inputs_as_they_are(kernel, device, to):
    """Neither the inputs nor the result are cast, on any device."""
    x, weight = normals((5, 64)).to(device).requires_grad_(), weights(64).to(device)
    y = kernel.rms_norm(x, weight)
    with torch.autocast(device, to):
        inside = kernel.rms_norm(x, weight)
        half = kernel.rms_norm(x.to(to), weight)
        after_linear = kernel.rms_norm(torch.nn.functional.linear(x, torch.eye(64, device=device)))
    assert same_bytes(inside, y) and half.dtype == after_linear.dtype == to
    assert same_bytes(half, kernel.rms_norm(x.to(to), weight))
    (inside.sum() + half.float().sum()).backward()
    assert x.grad.isfinite().all()


def test_gradients_accumulate_and_flow_into_views(kernel, device):
    buffer = normals((5, 6, 64)).to(device).requires_grad_()
    kernel.rms_norm(buffer[1:4].transpose(0, 1)).square().sum().backward()
    assert buffer.grad[0].eq(0).all() and buffer.grad[1:4].ne(0).any(-1).all()
    once = buffer.grad.clone()
    kernel.rms_norm(buffer[1:4].transpose(0, 1)).square().sum().backward()
    torch.testing.assert_close(buffer.grad, 2 * once)


def test_hooks_and_backward_with_inputs(kernel, device):
    x, weight = normals((5, 64)).to(device).requires_grad_(), weights(64).to(device)
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    y = kernel.rms_norm(x, weight.requires_grad_())
    y.square().sum().backward(inputs=[x], retain_graph=True)
    assert weight.grad is None and same_bytes(seen[0], x.grad)
    y.square().sum().backward(inputs=[weight])
    assert weight.grad is not None


def test_graphs_of_make_fx_keep_gradients(kernel, device):
    """The graph may be differentiated later, though its example needs no gradient."""
    x, weight = normals((5, 64)).to(device), weights(64).to(device)
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    graph = make_fx(lambda x, weight: kernel.rms_norm(x, weight))(x, weight)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    gradients = torch.autograd.grad(graph(*leaves).square().sum(), leaves)
    expected = torch.autograd.grad(kernel.rms_norm(*leaves).square().sum(), leaves)
    assert all(same_bytes(a, b) for a, b in zip(gradients, expected))


@pytest.mark.parametrize("strict", [False, True])
def test_all_06_exported_without_gradients_has_them(kernel, strict):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(weights(64))

        def forward(self, x):
            return kernel.rms_norm(x, self.weight)

    x = normals((3, 64))
    with torch.no_grad():
        exported = torch.export.export(Norm(), (x,), strict=strict).module()
    exported(x).sum().backward()
    expected = weights(64).requires_grad_()
    kernel.rms_norm(x, expected).sum().backward()
    assert same_bytes(exported.weight.grad, expected.grad)


def test_transforms_refuse_what_the_op_refuses(kernel):
    x = normals((2, 3, 8))
    for call, words in (
        (lambda a: kernel.rms_norm(a, bias=x[0, 0]), "bias: needs a weight"),
        (lambda a: kernel.rms_norm(a.double()), "x: dtype"),
        (lambda a: kernel.rms_norm(a, x[0]), "weight: must have shape"),
        (lambda a: kernel.fused_add_rms_norm(a, a.half()), "residual: must have dtype"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.func.vmap(call)(x)
    with pytest.raises(TypeError, match="weight: must be a torch.Tensor, got list"):
        torch.func.vmap(lambda a: kernel.rms_norm(a, [1.0] * 8))(x)
