"""Which code ran: instruction sets, architecture paths, strategies, devices and streams."""

import os

import pytest
import torch
from rmsnorm_cases import (
    DTYPES,
    PAIRS,
    ROUNDINGS,
    Formula,
    integers,
    name,
    normals,
    pair_name,
    same_bytes,
    strided_copy,
    weights,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ISAS = ["baseline", "avx2", "avx512"]
ARCHS = ["75", "80", "90"]


def force_isa(kernel, monkeypatch, isa):
    monkeypatch.setenv("WARPSMITH_CPU_ISA", isa)
    try:
        kernel.rms_norm(torch.zeros(1, 1))
    except RuntimeError as error:
        assert "this machine has up to" in str(error) and f"got {isa}" in str(error)
        pytest.skip(f"this machine has no {isa}")


def force_arch(kernel, monkeypatch, arch):
    monkeypatch.setenv("WARPSMITH_ARCH", arch)
    try:
        kernel.rms_norm(torch.zeros(1, 1, device="cuda"))
    except RuntimeError as error:
        assert "paths up to" in str(error)
        pytest.skip(f"this device or build has no path {arch}")


def inputs(x_dtype, weight_dtype):
    """Rows of every length class and every kind of stride, with weight, bias and residual."""
    for hidden in (1, 7, 64, 100, 257, 1024, 4096, 4100, 8200, 33000):
        x = normals((3, 2, hidden + 3), x_dtype, seed=hidden)
        weight, bias = weights(hidden, weight_dtype), normals((hidden,), weight_dtype, seed=1)
        for view in (x[..., :hidden].contiguous(), x[..., 1 : hidden + 1].transpose(0, 1)):
            yield view, weight, bias, normals(view.shape, x_dtype, seed=2)
    x = normals((2, 64, 9), x_dtype).transpose(1, 2)
    yield x, weights(128, weight_dtype)[::2], normals((64,), weight_dtype, seed=1), x.flip(0)


def everything(kernel, device, tensors, rounding):
    """All results and gradients there are, of tensors that come from the CPU."""
    x, weight, bias, residual = (
        strided_copy(tensor, device).requires_grad_() for tensor in tensors
    )
    options = dict(bias=bias, weight_offset=0.25, rounding=rounding)
    y = kernel.rms_norm(x, weight, 1e-5, **options)
    path = kernel.last_path()
    z, total = kernel.fused_add_rms_norm(x, residual, weight, 1e-5, **options)
    dy = normals(y.shape, y.dtype, seed=4).to(device)
    dtotal = normals(y.shape, total.dtype, seed=5).to(device)
    gradients = torch.autograd.grad([y], [x, weight, bias], dy)
    fused = torch.autograd.grad([z, total], [x, residual, weight, bias], [dy, dtotal])
    return path, [y, z, total, *gradients, *fused]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_all_19_forced_isas_give_the_same_bytes(kernel, monkeypatch, isa, pair):
    monkeypatch.delenv("WARPSMITH_CPU_ISA", raising=False)
    cases = list(inputs(*pair))
    expected = [
        everything(kernel, "cpu", tensors, ROUNDINGS[index % 3])[1]
        for index, tensors in enumerate(cases)
    ]
    force_isa(kernel, monkeypatch, isa)
    for index, (tensors, wanted) in enumerate(zip(cases, expected)):
        path, results = everything(kernel, "cpu", tensors, ROUNDINGS[index % 3])
        assert path.split()[:2] == ["cpu", isa]
        assert all(same_bytes(a, b) for a, b in zip(results, wanted))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_every_isa_is_the_formula(kernel, monkeypatch, isa, pair):
    force_isa(kernel, monkeypatch, isa)
    for index, (x, weight, bias, _) in enumerate(inputs(*pair)):
        options = dict(eps=1e-5, bias=bias, weight_offset=0.25, rounding=ROUNDINGS[index % 3])
        Formula(x, weight, **options).check(kernel.rms_norm(x, weight, **options))


@pytest.mark.parametrize(
    "variable, device", [("WARPSMITH_CPU_ISA", "cpu"), ("WARPSMITH_ARCH", "cuda")]
)
def test_unknown_forced_path_is_refused(kernel, monkeypatch, variable, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.zeros(3, 8, device=device)
    _, rstd = kernel._ops.ops.rms_norm_train(x)
    monkeypatch.setenv(variable, "sse9")
    for call in (
        lambda: kernel.rms_norm(x),
        lambda: kernel.fused_add_rms_norm(x, x),
        lambda: kernel._ops.ops.rms_norm_backward(x, x, rstd),
    ):
        with pytest.raises(RuntimeError, match=f"{variable}: must be .* got sse9"):
            call()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("arch", ["75", "90"])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_rows_of_every_length_class(kernel, monkeypatch, arch, pair):
    """Few launches, for the sanitizer; what they compute others check."""
    force_arch(kernel, monkeypatch, arch)
    rows = list(inputs(*pair))
    for index, tensors in enumerate(rows[index] for index in (0, 3, 4, 7, 9, 13, 14, 17, 18, 20)):
        x, weight, bias, residual = (strided_copy(tensor, "cuda") for tensor in tensors)
        leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]
        bias = bias if index % 2 else None
        y, total = kernel.fused_add_rms_norm(
            *leaves, 1e-5, bias=bias, rounding=ROUNDINGS[index % 3]
        )
        dy, dtotal = (normals(y.shape, t.dtype, seed=4).to("cuda") for t in (y, total))
        gradients = torch.autograd.grad([y, total], leaves, [dy, dtotal])
        assert all(tensor.detach().cpu().isfinite().all() for tensor in (y, total, *gradients))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_all_17_all_18_forced_arch_paths(kernel, monkeypatch, arch, pair):
    """Same results for every path up to the order of sums, which are also those of the formula."""
    force_arch(kernel, monkeypatch, arch)
    for index, tensors in enumerate(inputs(*pair)):
        rounding = ROUNDINGS[index % 3]
        path, results = everything(kernel, "cuda", tensors, rounding)
        assert path.split()[:2] == ["cuda", f"sm{arch}"]
        x, weight, bias, residual = tensors
        options = dict(eps=1e-5, bias=bias, weight_offset=0.25, rounding=rounding)
        Formula(x, weight, **options).check(results[0])
        Formula(x + residual, weight, **options).check(results[1])
        assert same_bytes(results[2].cpu(), x + residual)
        assert all(result.isfinite().all() for result in results)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_arch_paths_have_the_same_bytes(kernel, monkeypatch, arch, pair):
    if "RMSNORM_TEST_ARCH" in os.environ:
        pytest.skip("the build holds code of one arch")
    monkeypatch.delenv("WARPSMITH_ARCH", raising=False)
    cases = list(inputs(*pair))
    expected = [everything(kernel, "cuda", tensors, "once")[1] for tensors in cases]
    force_arch(kernel, monkeypatch, arch)
    for tensors, wanted in zip(cases, expected):
        results = everything(kernel, "cuda", tensors, "once")[1]
        assert all(same_bytes(a, b) for a, b in zip(results, wanted))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_cpu_and_cuda_agree(kernel, pair, rounding):
    """Only the root may differ: with exact sums, half types by a step, float32 by two."""
    for hidden in (64, 1024, 4096, 16384):
        x, weight = integers((9, hidden), pair[0]), weights(hidden, pair[1])
        formula = Formula(x, weight, rounding=rounding)
        on_cpu = kernel.rms_norm(x, weight, rounding=rounding)
        on_cuda = kernel.rms_norm(x.cuda(), weight.cuda(), rounding=rounding).cpu()
        formula.check(on_cpu)
        formula.check(on_cuda)


# The strategies that last_path() names, for rows of that many bfloat16.
CUDA_STRATEGIES = [(64, "warp"), (128, "warp"), (4096, "block"), (262144, "looped")]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("hidden, strategy", CUDA_STRATEGIES)
def test_strategy_of_each_length(kernel, hidden, strategy):
    x = normals((64, hidden), torch.bfloat16).cuda()
    kernel.rms_norm(x)
    device, _, ran, access = kernel.last_path().split()
    assert (device, ran, int(access)) == ("cuda", strategy, 16)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_access_is_as_wide_as_addresses_allow(kernel, dtype):
    """And never wider: 16 bytes where all is aligned, single elements where an address is odd."""
    flat = normals((4 * 1024 + 16,), dtype).cuda()
    for offset in range(16 // dtype.itemsize):
        x = flat[offset : offset + 4096].view(4, 1024)
        y = kernel.rms_norm(x)
        width = int(kernel.last_path().split()[-1])
        limit = 16 if offset == 0 else (offset * dtype.itemsize) & -(offset * dtype.itemsize)
        assert dtype.itemsize <= width <= limit
        if offset == 0:
            assert width == 16
        Formula(x.cpu()).check(y)


@needs_gpu
@pytest.mark.gpu
def test_all_01_current_device_is_not_the_tensors(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, residual, weight = normals((5, 4096)), normals((5, 4096), seed=1), weights(4096)
    with torch.cuda.device(0):
        leaves = [tensor.to("cuda:1").requires_grad_() for tensor in (x, residual, weight)]
        y, total = kernel.fused_add_rms_norm(*leaves)
        (y + total).sum().backward()
        out = torch.empty_like(y)
        with torch.no_grad():
            kernel.rms_norm(total, leaves[2], out=out)
            kernel.fused_add_rms_norm_(leaves[0].clone(), leaves[1].clone(), leaves[2])
        assert torch.cuda.current_device() == 0
    assert all(leaf.grad.device.index == 1 for leaf in leaves)
    Formula(x + residual, weight).check(y)
    assert same_bytes(out, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "device, other", [("cpu", "meta"), ("cpu", "cuda:0"), ("cuda:0", "cpu")], ids=str
)
def test_all_03_tensors_on_another_device_are_refused(kernel, device, other):
    if "cuda:0" in (device, other) and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    here, column = torch.zeros(4, 64, device=device), torch.zeros(64, device=device)
    there, column_there = torch.zeros(4, 64, device=other), torch.zeros(64, device=other)
    for argument, call in (
        ("weight", lambda: kernel.rms_norm(here, column_there)),
        ("bias", lambda: kernel.rms_norm(here, column, bias=column_there)),
        ("out", lambda: kernel.rms_norm(here, out=there)),
        ("residual", lambda: kernel.fused_add_rms_norm(here, there)),
        ("residual", lambda: kernel.fused_add_rms_norm_(here, there)),
        ("weight", lambda: kernel.fused_add_rms_norm_(here, here.clone(), column_there)),
    ):
        words = f"{argument}: must be on the device of x, {device}, got {other}"
        with pytest.raises(RuntimeError, match=words):
            call()


@needs_gpu
@pytest.mark.gpu
def test_a_build_for_one_arch_reports_that_arch(kernel):
    """RMSNORM_TEST_ARCH is set where the build under test holds code of one arch alone."""
    arch = os.environ.get("RMSNORM_TEST_ARCH")
    if arch is None:
        pytest.skip("the build holds code of several archs")
    kernel.rms_norm(torch.zeros(3, 64, device="cuda"))
    assert kernel.last_path().split()[1] == f"sm{arch}"


@needs_gpu
@pytest.mark.gpu
def test_everything_runs_on_the_current_stream(kernel):
    x = torch.zeros(512, 4096, device="cuda")
    leaf, weight = torch.zeros_like(x).requires_grad_(), torch.ones(4096, device="cuda")
    out, first, second = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    weight.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for tensor in (x, leaf, first, second):
                tensor.fill_(3.0)
            y = kernel.rms_norm(x)
            kernel.rms_norm(x, out=out)
            kernel.fused_add_rms_norm_(first, second)
        dweight, dx = torch.autograd.grad(
            kernel.rms_norm(leaf, weight, 0.0), [weight, leaf], torch.ones_like(x)
        )
    stream.synchronize()
    for tensor in (y, out, first):
        torch.testing.assert_close(tensor, torch.ones_like(x))
    assert second.eq(6).all()
    torch.testing.assert_close(dweight, torch.full_like(weight, 512.0))
    torch.testing.assert_close(dx, torch.zeros_like(x), rtol=0, atol=1e-6)


def test_one_module_serves_cpu_and_cuda(kernel, device):
    x = normals((3, 64), torch.bfloat16)
    kernel.rms_norm(x.to(device))
    assert kernel.last_path().startswith(device)
    kernel.rms_norm(x)
    assert kernel.last_path().startswith("cpu")


def test_last_path_tells_of_the_last_call(kernel, device):
    x = normals((3, 64)).to(device).requires_grad_()
    kernel.rms_norm(x).sum().backward()
    for call in (
        lambda: kernel.rms_norm(x),
        lambda: kernel.fused_add_rms_norm(x, x),
        lambda: kernel.rms_norm(x.detach(), out=torch.empty_like(x)),
        lambda: kernel.fused_add_rms_norm_(x.detach().clone(), x.detach().clone()),
    ):
        kernel.rms_norm(torch.empty(0, 64))
        assert kernel.last_path().startswith("cpu")
        call()
        ran_on, arch, strategy, access = kernel.last_path().split()
        assert ran_on == device and arch and strategy and int(access) >= 0
