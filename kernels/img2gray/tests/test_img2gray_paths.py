"""Which code ran: instruction sets, architecture paths, strategies, devices and streams."""

import itertools
import os

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def image_of(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(
        0, torch.iinfo(dtype).max + 1, shape, generator=generator, dtype=torch.int32
    ).to(dtype)


def layouts(dtype):
    """Images that reach every strategy, with the layout argument and what last_path() has to say."""
    packed3 = image_of((3, 41, 701, 3), dtype)
    packed4 = image_of((3, 41, 701, 4), dtype)
    planar = image_of((3, 3, 41, 701), dtype)
    videos = image_of((2, 3, 41, 301, 3), dtype)
    return [
        (packed3, "HWC", "packed3"),
        (packed3[:, 1:, 1:], "HWC", "packed3"),
        (packed4, "HWC", "packed4"),
        (packed4[:, :, 3:], "HWC", "packed4"),
        (planar, "CHW", "planar"),
        (planar[..., 1:], "CHW", "planar"),
        (videos[:, :2, 4:, 8:], "HWC", "packed3"),  # no two dims of the crop merge
        (videos.movedim(-1, 2).contiguous()[:, :2, :, 4:, 8:], "CHW", "planar"),
        (planar.transpose(-1, -2), "CHW", "strided"),
        (packed3[..., :5, :], "HWC", "strided"),
    ]


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_all_19_forced_isa_runs_or_is_refused(kernel, monkeypatch, isa):
    image = image_of((3, 33, 129), torch.uint8)
    expected = kernel.img2gray_reference(image)
    monkeypatch.setenv("WARPSMITH_CPU_ISA", isa)
    try:
        gray = kernel.img2gray(image)
    except RuntimeError as error:
        assert f"got {isa}" in str(error)
        return
    assert torch.equal(gray, expected)
    assert kernel.last_path().split()[:3] == ["cpu", isa, "planar"]


@pytest.mark.parametrize(
    "variable, device", [("WARPSMITH_CPU_ISA", "cpu"), ("WARPSMITH_ARCH", "cuda")]
)
def test_unknown_forced_path_is_refused(kernel, monkeypatch, variable, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv(variable, "sse9")
    with pytest.raises(RuntimeError, match=f"{variable}: must be .* got sse9"):
        kernel.img2gray(torch.zeros(3, 2, 2, device=device))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("arch", ["75", "80", "90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_17_all_18_forced_arch_paths_give_the_bytes_of_the_cpu(
    kernel, monkeypatch, strided_copy, arch, dtype
):
    monkeypatch.setenv("WARPSMITH_ARCH", arch)
    for (image, layout, strategy), weights in itertools.product(
        layouts(dtype), ["bt601", "opencv", (0.2, -0.7, 1.6)]
    ):
        expected = kernel.img2gray(image, layout=layout, weights=weights)
        on_gpu = strided_copy(image, "cuda")
        try:
            gray = kernel.img2gray(on_gpu, layout=layout, weights=weights)
        except RuntimeError as error:
            assert "paths up to" in str(error)
            pytest.skip(f"this device or build has no path {arch}")
        device, ran, ran_strategy, _ = kernel.last_path().split()
        assert (device, ran) == ("cuda", f"sm{arch}")
        assert ran_strategy == strategy
        bits = torch.int64 if dtype == torch.float64 else torch.uint8
        assert torch.equal(gray.cpu().view(bits), expected.view(bits))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_vector_width(kernel, dtype):
    """Addresses at every offset from 16 bytes: the widest access up to 8 that they allow, down to single elements."""
    item = dtype.itemsize
    for layout, offset in itertools.product(["CHW", "HWC"], range(16 // item)):
        shape = (3, 40, 1024) if layout == "CHW" else (40, 1024, 3)
        flat = image_of((3 * 40 * 1024 + 16,), dtype)
        image = flat[offset : offset + 3 * 40 * 1024].view(shape)
        on_gpu = flat.cuda()[offset : offset + 3 * 40 * 1024].view(shape)
        gray = kernel.img2gray(on_gpu, layout=layout)
        width = 8 if offset == 0 else (offset * item) & -(offset * item)
        assert int(kernel.last_path().split()[-1]) == width
        assert torch.equal(gray.cpu(), kernel.img2gray(image, layout=layout))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_large_images_of_bytes_use_the_widest_access(kernel, layout):
    width = 2 * 48 * torch.cuda.get_device_properties().multi_processor_count * 512 // 64 + 1
    image = image_of((3, 64, width) if layout == "CHW" else (64, width, 3), torch.uint8)
    gray = kernel.img2gray(image.cuda(), layout=layout)
    assert int(kernel.last_path().split()[-1]) == 16
    assert torch.equal(gray.cpu(), kernel.img2gray(image, layout=layout))


@needs_gpu
@pytest.mark.gpu
def test_all_01_current_device_is_not_the_tensors(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    image = image_of((3, 40, 50), torch.float32)
    with torch.cuda.device(0):
        gray = kernel.img2gray(image.to("cuda:1").requires_grad_())
        gray.sum().backward()
        assert torch.cuda.current_device() == 0
    assert gray.device.index == 1
    assert torch.equal(gray.cpu(), kernel.img2gray(image))


@pytest.mark.gpu
def test_all_03_out_on_another_device_is_refused(kernel):
    pairs = [("cpu", "meta")]
    if torch.cuda.is_available():
        pairs += [("cpu", "cuda:0"), ("cuda:0", "cpu")]
    for device, other in pairs:
        image, out = torch.zeros(3, 4, 4, device=device), torch.zeros(1, 4, 4, device=other)
        with pytest.raises(RuntimeError, match=f"out: must be on .*{device}, got {other}"):
            kernel.img2gray(image, out=out)


@needs_gpu
@pytest.mark.gpu
def test_a_build_for_one_arch_reports_that_arch(kernel):
    """IMG2GRAY_TEST_ARCH is set where the build under test holds code of one arch alone."""
    arch = os.environ.get("IMG2GRAY_TEST_ARCH")
    if arch is None:
        pytest.skip("the build holds code of several archs")
    kernel.img2gray(torch.zeros(3, 4, 4, device="cuda"))
    assert kernel.last_path().split()[1] == f"sm{arch}"


@needs_gpu
@pytest.mark.gpu
def test_runs_on_the_current_stream(kernel):
    image = torch.zeros(3, 2048, 2048, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        image.fill_(1.0)
        gray = kernel.img2gray(image, weights=(0.25, 0.25, 0.25))
    stream.synchronize()
    assert gray.eq(0.75).all()


def test_one_module_serves_cpu_and_cuda(kernel, device):
    image = image_of((3, 64, 64), torch.bfloat16)
    assert torch.equal(kernel.img2gray(image.to(device)).cpu(), kernel.img2gray(image))
    assert kernel.last_path().startswith("cpu")
