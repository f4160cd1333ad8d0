"""Values: every formula against the library it names, or against the reference, over all inputs that matter."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
ISAS = ["baseline", "avx2", "avx512"]
CUSTOM = (-0.3, 1.7, 0.25)


def same_bytes(a, b):
    """Equal in every bit, NaN payloads and signs of zero included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_integers(a), as_integers(b))


def as_integers(tensor):
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(bits)


def random_image(shape, dtype, generator, low=-3.0, high=3.0):
    if not dtype.is_floating_point:
        top = torch.iinfo(dtype).max + 1
        return torch.randint(0, top, shape, generator=generator, dtype=torch.int32).to(dtype)
    return (
        torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator).to(dtype)
    )


def expected_close(result, expected):
    # float64: the reference multiplies and adds separately.
    if result.dtype == torch.float64:
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-14, equal_nan=True)
    else:
        assert same_bytes(result, expected)


@pytest.fixture(scope="module")
def all_colours():
    """All 2^24 colours as one 4096 x 4096 HWC image."""
    colour = torch.arange(1 << 24, dtype=torch.int32)
    channels = torch.stack([colour >> 16, (colour >> 8) & 255, colour & 255], -1).to(torch.uint8)
    return rearrange(channels, "(h w) c -> h w c", h=4096)


@pytest.fixture(scope="module")
def expected_of_all_colours(all_colours, reference):
    return {
        weights: reference(all_colours, layout="HWC", weights=weights, keepdim=False)
        for weights in ("pil", "opencv", "bt601", "bt709")
    }


def test_reference_is_pillow_over_all_colours(all_colours, expected_of_all_colours):
    Image = pytest.importorskip("PIL.Image")
    pillow = np.asarray(Image.fromarray(all_colours.numpy()).convert("L"))
    assert np.array_equal(expected_of_all_colours["pil"].numpy(), pillow)


def test_reference_is_opencv_over_all_colours(all_colours, expected_of_all_colours):
    cv2 = pytest.importorskip("cv2")
    opencv = cv2.cvtColor(all_colours.numpy(), cv2.COLOR_RGB2GRAY)
    assert np.array_equal(expected_of_all_colours["opencv"].numpy(), opencv)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch, kernel):
    monkeypatch.setenv("WARPSMITH_CPU_ISA", request.param)
    try:
        kernel.img2gray(torch.zeros(3, 1, 1))
    except RuntimeError as error:
        assert "this machine has up to" in str(error)
        pytest.skip(f"this machine has no {request.param}")
    return request.param


@pytest.mark.parametrize("weights", ["pil", "opencv", "bt601", "bt709"])
def test_all_colours_on_every_isa(
    img2gray, kernel, isa, all_colours, expected_of_all_colours, weights
):
    gray = img2gray(all_colours, layout="HWC", weights=weights, keepdim=False)
    assert kernel.last_path().startswith(f"cpu {isa} packed")
    assert torch.equal(gray, expected_of_all_colours[weights])


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("weights", ["pil", "opencv", "bt601", "bt709"])
def test_all_colours_on_every_device(
    img2gray, device, all_colours, expected_of_all_colours, weights, layout
):
    image = (
        all_colours if layout == "HWC" else rearrange(all_colours, "h w c -> c h w").contiguous()
    )
    gray = img2gray(image.to(device), layout=layout, weights=weights, keepdim=False)
    assert torch.equal(gray.cpu(), expected_of_all_colours[weights])


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_opencv_uint16(img2gray, device, generator, order):
    cv2 = pytest.importorskip("cv2")
    image = random_image((311, 401, 3), torch.uint16, generator)
    image[:2] = 65535
    code = cv2.COLOR_RGB2GRAY if order == "RGB" else cv2.COLOR_BGR2GRAY
    gray = img2gray(
        image.to(device), layout="HWC", weights="opencv", channel_order=order, keepdim=False
    )
    assert np.array_equal(gray.cpu().numpy(), cv2.cvtColor(image.numpy(), code))


def test_opencv_float32(img2gray, device, generator):
    cv2 = pytest.importorskip("cv2")
    image = random_image((311, 401, 3), torch.float32, generator, low=0.0)
    gray = img2gray(image.to(device), layout="HWC", weights="opencv", keepdim=False)
    np.testing.assert_allclose(
        gray.cpu().numpy(), cv2.cvtColor(image.numpy(), cv2.COLOR_RGB2GRAY), rtol=1e-6
    )


def test_reference_fma_is_exact(kernel):
    """Correctly rounded fractions are the judge of the emulated fp32 fma."""
    fma = kernel.reference.fma_float32
    draw = random.Random(3)
    a = [np.float32(draw.uniform(-2, 2) * 2.0 ** draw.randint(-70, 40)) for _ in range(20000)]
    b = float(np.float32(0.587))
    # Addends near -a b make the cancellation that double rounding gets wrong.
    c = [np.float32(-x * b * draw.choice([0, 1, 1 + 2.0**-20, 2.0**-24, 2.0**24])) for x in a]
    result = fma(torch.tensor(a, dtype=torch.float64), b, torch.tensor(c, dtype=torch.float64))
    for x, z, got in zip(a, c, result.tolist()):
        assert got == nearest_float32(Fraction(float(x)) * Fraction(b) + Fraction(float(z)))


def nearest_float32(exact):
    if exact == 0:
        return 0.0
    exponent = max(len(bin(abs(exact.numerator))) - len(bin(exact.denominator)) - 24, -149)
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while exponent > -149 and abs(exact) < Fraction(2) ** (exponent + 23):
        exponent -= 1
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def test_float64_is_the_fused_chain(img2gray, device, generator):
    image = random_image((3, 16, 64), torch.float64, generator)
    gray = img2gray(image.to(device), weights=CUSTOM).cpu().flatten()
    red, green, blue = (channel.flatten().tolist() for channel in image)
    for r, g, b, got in zip(red, green, blue, gray.tolist()):
        total = r * CUSTOM[0]
        for value, weight in ((g, CUSTOM[1]), (b, CUSTOM[2])):
            total = float(Fraction(value) * Fraction(weight) + Fraction(total))
        assert got == total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_every_isa_equals_the_reference(
    img2gray, reference, isa, dtype, channels, layout, generator
):
    shape = (2, channels, 41, 67) if layout == "CHW" else (2, 41, 67, channels)
    image = random_image(shape, dtype, generator)
    for weights, order in itertools.product(["bt601", "bt709", "opencv", CUSTOM], ["RGB", "BGR"]):
        options = dict(layout=layout, weights=weights, channel_order=order)
        expected_close(img2gray(image, **options), reference(image, **options))


SPECIALS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-40,
    6e-8,
    65504.0,
    3e38,
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights", ["bt601", CUSTOM])
def test_special_values_have_the_same_bytes_everywhere(img2gray, reference, device, dtype, weights):
    image = (
        torch.tensor(list(itertools.product(SPECIALS, repeat=3)), dtype=torch.float64)
        .to(dtype)
        .T[:, None]
    )
    gray = img2gray(image.contiguous().to(device), weights=weights)
    assert same_bytes(gray, img2gray(image, weights=weights))
    expected_close(gray.cpu(), reference(image, weights=weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_once(img2gray, device, dtype):
    """All 2^16 values of the type in one channel: float32 inside, one rounding to nearest even."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(1, 256, 256)
    image = torch.cat([values, values.flip(1), values.flip(2)])
    gray = img2gray(image.to(device), weights=(0.25, 0.5, 0.125)).cpu()
    exact = (
        image.double() * torch.tensor([0.25, 0.5, 0.125], dtype=torch.float64)[:, None, None]
    ).sum(0, True)
    sums = exact.float()  # the chain in float32 may round where the sum has more than 24 bits
    inexact = sums.double() != exact
    assert torch.equal(gray[~inexact].nan_to_num(7), sums.to(dtype)[~inexact].nan_to_num(7))
    assert not inexact.all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_integers_round_half_to_even_and_saturate(img2gray, device, dtype):
    top = torch.iinfo(dtype).max
    image = (
        torch.tensor([1, 3, 5, top, 0], dtype=torch.int32)
        .to(dtype)
        .expand(3, 1, 5)
        .contiguous()
        .to(device)
    )

    def gray(*weights):
        return img2gray(image, weights=weights).flatten().tolist()

    assert gray(0.5, 0.0, 0.0) == [0, 2, 2, (top + 1) // 2, 0]
    assert gray(1.0, 1.0, 1.0) == [3, 9, 15, top, 0]
    assert gray(-1.0, 0.0, 0.0) == [0, 0, 0, 0, 0]
    assert gray(3e38, 3e38, 3e38) == [top, top, top, top, 0]
    # 1 * 3e38 - 1 * 3e38 is 0; larger pixels overflow to infinity before the subtraction.
    assert gray(3e38, 0.0, -3e38) == [0, top, top, top, 0]
    assert gray(-3e38, 0.0, 3e38) == [0, 0, 0, 0, 0]


@st.composite
def strided_image(draw):
    """An image of any strides over a larger buffer, with 0 to 3 leading dims."""
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["CHW", "HWC"]))
    channels = draw(st.sampled_from([1, 3, 3, 4]))
    leading = draw(st.lists(st.integers(0, 3), max_size=3))
    height, width = (
        draw(st.integers(0, 9)),
        draw(st.one_of(st.integers(0, 9), st.integers(60, 600))),
    )
    shape = (
        [*leading, channels, height, width]
        if layout == "CHW"
        else [*leading, height, width, channels]
    )
    padded = [size + draw(st.integers(0, 2)) for size in shape]
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    order = (
        draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
    )
    buffer = random_image(
        [padded[dim] * steps[dim] for dim in order],
        dtype,
        torch.Generator().manual_seed(draw(st.integers(0, 99))),
    )
    inverse = [order.index(dim) for dim in range(len(shape))]
    image = buffer.permute(inverse)
    for dim, (size, step) in enumerate(zip(shape, steps)):
        spare = image.shape[dim] - size * step
        start = draw(st.integers(0, spare)) if spare else 0
        image = image.narrow(dim, start, size * step)[
            (slice(None),) * dim + (slice(None, None, step),)
        ]
    for dim in range(len(leading)):
        if shape[dim] > 0 and draw(st.booleans()):
            image = image.narrow(dim, 0, 1).expand(shape)
    assert list(image.shape) == shape
    return image, layout


@pytest.mark.kernels_ci
@pytest.mark.gpu
@settings(max_examples=150, deadline=None)
@given(
    drawn=strided_image(),
    weights=st.sampled_from(["bt601", "bt709", "opencv", CUSTOM]),
    order=st.sampled_from(["RGB", "BGR"]),
    keepdim=st.booleans(),
    use_out=st.booleans(),
)
def test_any_shape_stride_and_dtype(kernel, strided_copy, drawn, weights, order, keepdim, use_out):
    image, layout = drawn
    options = dict(layout=layout, weights=weights, channel_order=order, keepdim=keepdim)
    expected = kernel.img2gray_reference(image, **options)
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        there = strided_copy(image, device)
        before = there.clone()
        out = None
        if use_out:  # every second column of a larger buffer
            buffer = torch.full(
                (*expected.shape[:-1], 2 * expected.shape[-1]), 7, device=device
            ).to(image.dtype)
            out = buffer[..., ::2]
        gray = kernel.img2gray(there, **options, out=out)
        expected_close(gray.cpu(), expected)
        assert gray.is_contiguous() or use_out
        assert same_bytes(there, before)
        if use_out:
            assert gray is out
            assert buffer[..., 1::2].cpu().float().eq(7).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_bytes(img2gray, reference, generator, threads):
    image = random_image((3, 700, 701), torch.uint8, generator)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert same_bytes(img2gray(image), reference(image))
    finally:
        torch.set_num_threads(before)
