"""Layouts, odd sizes and refusals. Labels in test names are those of docs/failure-modes.md."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FORMULAS = ["bt601", "bt709", "pil", "opencv"]


def colour(r, g, b, device, dtype=torch.uint8):
    return torch.tensor([r, g, b], dtype=torch.int32).to(dtype).reshape(3, 1, 1).to(device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "weights, red, green, blue",
    [("bt601", 76, 149, 29), ("bt709", 54, 182, 18), ("pil", 76, 150, 29), ("opencv", 76, 150, 29)],
)
def test_gray_01_blue_weight(img2gray, device, weights, red, green, blue):
    assert img2gray(colour(255, 0, 0, device), weights=weights).item() == red
    assert img2gray(colour(0, 255, 0, device), weights=weights).item() == green
    assert img2gray(colour(0, 0, 255, device), weights=weights).item() == blue


@pytest.mark.parametrize(
    "weights, expected", [("bt601", 199), ("bt709", 200), ("pil", 200), ("opencv", 200)]
)
def test_gray_02_uint8_sums_do_not_wrap(img2gray, device, weights, expected):
    assert img2gray(colour(200, 200, 200, device), weights=weights).item() == expected


def test_gray_03_rounding_rule_is_pillows(img2gray, device, generator):
    Image = pytest.importorskip("PIL.Image")
    image = torch.randint(0, 256, (1000, 1000, 3), dtype=torch.uint8, generator=generator)
    pillow = Image.fromarray(image.numpy()).convert("L").tobytes()
    gray = img2gray(image.to(device), layout="HWC", weights="pil", keepdim=False)
    assert gray.cpu().numpy().tobytes() == pillow


@pytest.mark.parametrize(
    "layout, shape", [("CHW", (1, 5, 7)), ("HWC", (5, 7, 1)), ("CHW", (2, 1, 5, 7))]
)
@pytest.mark.parametrize("keepdim", [True, False])
def test_gray_04_one_channel_is_copied(img2gray, device, layout, shape, keepdim):
    image = torch.randn(shape).to(device)
    gray = img2gray(image, layout=layout, keepdim=keepdim, weights="bt709")
    channel = -1 if layout == "HWC" else -3
    assert torch.equal(gray, image if keepdim else image.squeeze(channel))
    assert gray.data_ptr() != image.data_ptr()
    gray.zero_()
    assert image.abs().sum() > 0


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_gray_05_alpha_is_ignored(img2gray, device, layout, generator):
    channel = -1 if layout == "HWC" else -3
    shape = (33, 65, 4) if layout == "HWC" else (4, 33, 65)
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    expected = img2gray(image.narrow(channel, 0, 3).contiguous(), layout=layout)
    assert torch.equal(img2gray(image, layout=layout), expected)
    assert torch.equal(img2gray(image.narrow(channel, 0, 3), layout=layout), expected)
    nan_alpha = image.float()
    nan_alpha.select(channel, 3).fill_(torch.nan)
    assert img2gray(nan_alpha, layout=layout).isfinite().all()


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 5, 3), (2, 3, 3, 3), (1, 1, 3, 4, 3)])
def test_gray_06_layout_is_never_guessed(img2gray, reference, device, shape, generator):
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for layout in ("CHW", "HWC"):
        gray = img2gray(image.to(device), layout=layout)
        assert torch.equal(gray.cpu(), reference(image, layout=layout))
        channel = -1 if layout == "HWC" else -3
        assert gray.shape[channel] == 1


@pytest.mark.parametrize(
    "weights, error, words",
    [
        ((0.25, 0.25, 0.25, 0.25), ValueError, ["weights", "three", "4"]),
        ((0.5, 0.5), ValueError, ["weights", "three", "2"]),
        ((float("nan"), 0.5, 0.5), ValueError, ["weights", "finite", "nan"]),
        ((float("inf"), 0.5, 0.5), ValueError, ["weights", "finite", "inf"]),
        ((1e39, 0.5, 0.5), ValueError, ["weights", "finite", "1e+39"]),
        ("rec601", ValueError, ["weights", "bt601", "rec601"]),
        (None, TypeError, ["weights", "None"]),
        (0.3, TypeError, ["weights", "0.3"]),
        ((None, 1.0, 1.0), TypeError, ["weights", "None"]),
        (("a", "b", "c"), TypeError, ["weights", "'a'"]),
        ((10**400, 0, 0), TypeError, ["weights", "1000"]),
        (b"abc", TypeError, ["weights", "abc"]),
        (("0.1", "0.2", "0.7"), TypeError, ["weights", "'0.1'"]),
        ({0.2, 0.7, 0.1}, TypeError, ["weights", "0.7"]),
        (iter([0.1, 0.2, 0.7]), TypeError, ["weights", "iterator"]),
        (torch.rand(3, 2), TypeError, ["weights", "three floats"]),
        (torch.empty(3, device="meta"), TypeError, ["weights", "three floats"]),
        (torch.ones(3, requires_grad=True), ValueError, ["weights", "detach"]),
        ({0.1: 0, 0.2: 0, 0.3: 0}, TypeError, ["weights", "0.2"]),
    ],
)
def test_gray_07_weights_are_checked(img2gray, device, weights, error, words):
    with pytest.raises(error) as caught:
        img2gray(torch.zeros(3, 2, 2, device=device), weights=weights)
    assert all(word in str(caught.value) for word in words)


def test_gray_07_weights_may_sum_to_anything(img2gray, device):
    image = torch.full((3, 1, 1), 100, dtype=torch.uint8, device=device)
    assert img2gray(image, weights=(0.4, 0.4, 0.4)).item() == 120
    assert img2gray(image, weights=torch.tensor([0.4, 0.4, 0.4])).item() == 120


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(layout="NCHW"), ValueError, ["layout", "CHW", "NCHW"]),
        (dict(layout=["HWC"]), ValueError, ["layout", "CHW", "['HWC']"]),
        (dict(channel_order="GBR"), ValueError, ["channel_order", "BGR", "GBR"]),
        (dict(keepdim=1), TypeError, ["keepdim", "bool", "1"]),
        (dict(image=torch.zeros(2, 4, 4)), RuntimeError, ["image", "1, 3 or 4", "2", "[2, 4, 4]"]),
        (dict(image=torch.zeros(4, 4, 5), layout="HWC"), RuntimeError, ["image", "HWC", "5"]),
        (dict(image=torch.zeros(0, 4, 4)), RuntimeError, ["image", "1, 3 or 4", "0"]),
        (dict(image=torch.zeros(3, 4)), RuntimeError, ["image", "3 dims", "[3, 4]"]),
        (
            dict(image=torch.zeros(3, 4, 4, dtype=torch.int32)),
            RuntimeError,
            ["image", "dtype", "int32"],
        ),
        (
            dict(image=torch.zeros(3, 4, 4, dtype=torch.bool)),
            RuntimeError,
            ["image", "dtype", "bool"],
        ),
        (
            dict(image=torch.zeros(3, 4, 4, dtype=torch.complex64)),
            RuntimeError,
            ["image", "dtype", "Complex"],
        ),
        (dict(weights="pil"), RuntimeError, ["weights", "pil", "uint8", "float32"]),
        (dict(image=[1, 2, 3]), TypeError, ["image", "Tensor", "list"]),
        (dict(out=torch.zeros(4, 4)), RuntimeError, ["out", "shape", "[1, 4, 4]", "[4, 4]"]),
        (dict(out=torch.zeros(1, 4, 5)), RuntimeError, ["out", "shape", "[1, 4, 5]"]),
        (
            dict(out=torch.zeros(1, 4, 4, dtype=torch.float16)),
            RuntimeError,
            ["out", "dtype", "float32", "float16"],
        ),
        (
            dict(out=torch.zeros(1, 1, 1).expand(1, 4, 4)),
            RuntimeError,
            ["out", "memory of its own", "[16, 0, 0]"],
        ),
        (dict(out="buffer"), TypeError, ["out", "Tensor", "str"]),
    ],
)
@pytest.mark.kernels_ci
def test_refusals_name_argument_rule_and_value(img2gray, device, arguments, error, words):
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    if "out" in arguments and words[-1] == "[16, 0, 0]":
        arguments["out"] = torch.zeros(1, 1, 1, device=device).expand(1, 4, 4)
        words = words[:-1]
    image = arguments.pop("image", torch.zeros(3, 4, 4, device=device))
    with pytest.raises(error) as caught:
        img2gray(image, **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_out_must_store_its_values(img2gray, device):
    negated = torch.empty(1, 4, 4, dtype=torch.complex64, device=device).conj().imag
    assert negated.is_neg()
    with pytest.raises(ValueError, match="out: must store its values, got a lazily negated view"):
        img2gray(torch.rand(3, 4, 4, device=device), out=negated)
    image = torch.rand(3, 4, 4, dtype=torch.complex64, device=device).conj().imag
    assert torch.equal(img2gray(image), img2gray(image.resolve_neg()))


def test_out_must_not_share_memory_with_image(img2gray, device):
    flat = torch.zeros(8 * 8 * 8, device=device)
    image = flat[: 3 * 64].view(3, 8, 8)
    for out in (image[:1], flat[64:128].view(1, 8, 8), flat[191:255].view(1, 8, 8)):
        with pytest.raises(RuntimeError, match="out: must not share memory with image"):
            img2gray(image, out=out)
    img2gray(image, out=flat[192:256].view(1, 8, 8))


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_out_may_be_another_channel_of_the_same_buffer(img2gray, reference, device, layout):
    channel = -1 if layout == "HWC" else -3
    buffer = torch.rand((2, 6, 9, 4) if layout == "HWC" else (2, 4, 6, 9))
    expected = reference(buffer.narrow(channel, 0, 3), layout=layout)
    buffer = buffer.to(device)
    before = buffer.clone()
    img2gray(buffer.narrow(channel, 0, 3), layout=layout, out=buffer.narrow(channel, 3, 1))
    assert torch.equal(buffer.narrow(channel, 3, 1).cpu(), expected)
    assert torch.equal(buffer.narrow(channel, 0, 3), before.narrow(channel, 0, 3))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_overlap_is_never_missed(kernel, data):
    """Random views of one buffer: whenever a byte is shared, the call is refused."""
    height, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    buffer = torch.zeros(200, dtype=torch.uint8)

    def view(shape, name):
        strides = [data.draw(st.integers(0, 12), label=f"{name} stride") for _ in shape]
        return buffer.as_strided(shape, strides, data.draw(st.integers(0, 60), label=name))

    def places(tensor):
        offsets = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(tensor.shape, tensor.stride()):
            offsets = offsets[..., None] + torch.arange(size) * stride
        return (offsets + tensor.storage_offset()).flatten().tolist()

    image, out = view((3, height, width), "image"), view((1, height, width), "out")
    shared = set(places(image)) & set(places(out))
    itself = len(set(places(out))) < height * width
    try:
        kernel.img2gray(image, out=out)
    except RuntimeError as error:
        assert "share memory" in str(error) or "memory of its own" in str(error)
    else:
        assert not shared and not itself


def test_out_is_written_in_full_and_nowhere_else(img2gray, reference, device, generator):
    image = torch.randint(0, 256, (3, 37, 53), dtype=torch.uint8, generator=generator)
    buffer = torch.full((40, 60), 77, dtype=torch.uint8, device=device)
    img2gray(image.to(device), keepdim=False, out=buffer[1:38, 5:58])
    expected = torch.full((40, 60), 77, dtype=torch.uint8)
    expected[1:38, 5:58] = reference(image, keepdim=False)
    assert torch.equal(buffer.cpu(), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(-1, -2),
        lambda x: x[..., 3:50, 5:64],
        lambda x: x[..., 1:],
        lambda x: x[:, :, ::2, ::3],
        lambda x: x.narrow(0, 0, 1).expand(2, -1, -1, -1),
        lambda x: x[..., :1].expand(-1, -1, -1, 70),
        lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[..., 7:],
    ],
    ids=[
        "channels_last",
        "transposed",
        "roi",
        "offset",
        "steps",
        "expanded",
        "row",
        "hwc_roi",
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64],
)
def test_views_are_taken_as_they_are(
    img2gray, reference, strided_copy, device, view, dtype, generator
):
    image = torch.randint(0, 256, (2, 3, 61, 70), generator=generator, dtype=torch.int32).to(dtype)
    image = view(image)
    expected = reference(image.contiguous())
    result = img2gray(strided_copy(image, device))
    assert result.is_contiguous()
    torch.testing.assert_close(
        result.cpu(), expected, rtol=1e-14 if dtype == torch.float64 else 0, atol=0
    )


@pytest.mark.parametrize(
    "width", [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 511, 512, 513, 1000]
)
@pytest.mark.parametrize("channels", [3, 4])
def test_every_row_length(img2gray, reference, device, width, channels, generator):
    """One row, and rows of a region whose ends are followed by other pixels."""
    for dtype in (torch.uint8, torch.float32):
        wide = torch.randint(
            0, 256, (3, width + 9, channels), dtype=torch.int32, generator=generator
        ).to(dtype)
        for image in (wide[:1, :width].contiguous(), wide[:, :width], wide[:, 5 : 5 + width]):
            gray = img2gray(image.to(device), layout="HWC")
            assert torch.equal(gray.cpu(), reference(image, layout="HWC"))
            planar = image.permute(2, 0, 1).contiguous()
            assert torch.equal(img2gray(planar.to(device)).cpu(), reference(planar))


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 5, 0), (0, 3, 5, 5), (2, 0, 3, 0, 5), (1, 0, 7)])
def test_empty_images(img2gray, kernel, device, shape):
    gray = img2gray(torch.empty(shape, dtype=torch.uint8, device=device))
    assert gray.shape == (*shape[:-3], 1, *shape[-2:])
    assert "empty" in kernel.last_path()
    if device == "cuda":
        torch.cuda.synchronize()


def test_many_leading_dims(img2gray, reference, device):
    image = torch.rand(2, 1, 2, 1, 2, 1, 2, 1, 2, 3, 2, 3)
    scrambled = image.permute(8, 6, 4, 2, 0, 1, 3, 5, 7, 9, 11, 10)
    assert torch.equal(img2gray(scrambled.to(device)).cpu(), reference(scrambled))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float32, torch.float64])
def test_memory_that_is_not_aligned_to_elements_is_refused(img2gray, dtype):
    """torch.frombuffer and DLPack make such tensors; no device reads them as elements."""
    storage = bytearray(1 + 12 * dtype.itemsize)
    image = torch.frombuffer(storage, dtype=dtype, offset=1).view(3, 2, 2)
    with pytest.raises(RuntimeError, match=r"image: must start at a multiple .* leaves 1"):
        img2gray(image)
    with pytest.raises(RuntimeError, match=r"out: must start at a multiple"):
        img2gray(torch.zeros(3, 2, 2, dtype=dtype), out=image[:1])


def test_a_result_too_large_for_memory_says_so(kernel, device):
    image = torch.zeros(3, 1, 1, device=device).expand(3, 1 << 30, 1 << 20)
    error = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    result = r"cannot allocate a result of shape \[1, 1073741824, 1048576\] and dtype float32"
    for needs_grad in (False, True):
        with pytest.raises(error, match=f"{result}: .*(out of|allocate) memory"):
            kernel.img2gray(image.detach().requires_grad_(needs_grad))


def test_strided_images_of_over_two_billion_pixels(img2gray, device):
    """2^31 + 2^16 pixels, all of them the same one: rows that no vector access suits."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    if free < 3 << 30:
        pytest.skip("needs 3 GiB of free memory")
    image = torch.tensor([10, 20, 30], dtype=torch.uint8, device=device).view(3, 1, 1)
    gray = img2gray(image.expand(3, (1 << 15) + 1, 1 << 16), weights="pil")
    assert gray.min() == gray.max() == 18


def test_negative_bit_is_resolved(img2gray, reference, device):
    image = torch._neg_view(torch.rand(3, 4, 5).to(device))
    assert torch.equal(img2gray(image).cpu(), reference(image.resolve_neg().cpu()))


def test_offsets_past_two_to_the_31(img2gray, device):
    """2^31 + 3 * 4096 elements, uint8: 2 GiB in, 0.7 GiB out."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    needed = 7 << 30
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory")
    pixels = (1 << 31) // 3 + 4096
    image = torch.zeros(1, pixels, 3, dtype=torch.uint8, device=device)
    image[0, -4096:] = 200
    gray = img2gray(image, layout="HWC", weights="pil")
    assert gray[0, -4096:].eq(200).all() and gray[0, :-4096].max() == 0
    planar = image.view(3, 1, pixels)
    planar[:, :, -5:] = 50
    assert img2gray(planar, weights="pil")[0, 0, -5:].eq(50).all()


def available_memory():
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def test_module(kernel, reference, device):
    image = torch.rand(2, 5, 6, 3)
    module = kernel.Img2Gray(layout="HWC", weights="bt709", channel_order="BGR").to(device)
    expected = reference(image, layout="HWC", weights="bt709", channel_order="BGR")
    assert torch.equal(module(image.to(device)).cpu(), expected)
    three = torch.nn.Sequential(kernel.Img2Gray(num_output_channels=3))(
        image.permute(0, 3, 1, 2).to(device)
    )
    assert three.shape == (2, 3, 5, 6) and torch.equal(three[:, 0], three[:, 2])
    assert "bt709" in repr(module)
    for bad in (
        dict(num_output_channels=2),
        dict(num_output_channels=True),
        dict(num_output_channels=3, keepdim=False),
    ):
        with pytest.raises(ValueError, match="num_output_channels"):
            kernel.Img2Gray(**bad)
    with pytest.raises(ValueError, match="weights: .*nonsense"):
        kernel.Img2Gray(weights="nonsense")
    weights = [0.1, 0.2, 0.7]
    fixed = kernel.Img2Gray(weights=weights)
    weights[0] = 5.0
    assert fixed.weights == (0.1, 0.2, 0.7)
