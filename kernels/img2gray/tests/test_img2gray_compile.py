"""torch.library and torch.compile: schemas, fakes, no graph breaks, no recompiles, CUDA graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Compiled code is kept by source line, for all devices and tests together."""
    torch._dynamo.reset()


def sample_images(device):
    generator = torch.Generator().manual_seed(5)
    floats = torch.rand((2, 3, 9, 17), generator=generator).to(device)
    return [
        floats,
        floats.to(memory_format=torch.channels_last),
        floats.transpose(-1, -2),
        floats[..., 1:].half(),
        floats.mul(255).to(torch.uint8),
        floats.new_empty(0, 3, 4, 4),
    ]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("keepdim", [True, False])
def test_opcheck(kernel, device, index, keepdim):
    ops = kernel._ops.ops
    image = sample_images(device)[index]
    arguments = (False, 0, keepdim)  # channels_last, formula
    torch.library.opcheck(ops.img2gray_raw.default, (image, *arguments))
    torch.library.opcheck(
        ops.img2gray.default, (image.clone().requires_grad_(image.is_floating_point()), *arguments)
    )
    out = torch.empty_like(kernel.img2gray(image, keepdim=keepdim))
    torch.library.opcheck(ops.img2gray_out.default, (image, out, *arguments))


@pytest.mark.kernels_ci
def test_all_07_compiles_without_graph_breaks(img2gray, device):
    def pipeline(image, buffer):
        gray = img2gray(image * 0.5, layout="HWC", weights="bt709")
        img2gray(image, layout="HWC", out=buffer)
        return gray + buffer, img2gray(image.detach(), layout="HWC", keepdim=False)

    image = torch.rand(5, 7, 3, device=device)
    buffers = torch.zeros(2, 5, 7, 1, device=device)
    expected = pipeline(image, buffers[0])
    compiled = torch.compile(pipeline, fullgraph=True)
    result = compiled(image, buffers[1])
    for a, b in zip((*expected, buffers[0]), (*result, buffers[1])):
        assert torch.equal(a, b)


def test_compiled_gradient(img2gray, device):
    image = torch.rand(3, 5, 7, device=device, requires_grad=True)

    def loss(image):
        return img2gray(image, weights=(0.1, 0.7, 0.2)).square().sum()

    (expected,) = torch.autograd.grad(loss(image), image)
    (result,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(image), image)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_an_exported_program_can_be_trained(kernel, device):
    image = torch.rand(3, 5, 7, device=device)
    program = torch.export.export(kernel.Img2Gray(weights="bt709"), (image,)).module()
    image.requires_grad_()
    program(image).sum().backward()
    expected = torch.tensor([0.2126, 0.7152, 0.0722], device=device)
    assert torch.equal(image.grad, expected[:, None, None].expand_as(image))


@pytest.mark.parametrize("dynamic", [None, True])
def test_weights_may_change_between_compiled_calls(img2gray, device, dynamic):
    image = torch.rand(3, 5, 7, device=device)
    compiled = torch.compile(
        lambda x, a: img2gray(x, weights=(a, 0.2, 0.3)),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for a in (0.1, 0.2, 0.35):
        assert torch.equal(compiled(image, a), img2gray(image, weights=(a, 0.2, 0.3)))


def test_no_recompiles_for_new_sizes(img2gray, device):
    counter = CompileCounter()
    compiled = torch.compile(
        lambda image: img2gray(image) + 1, fullgraph=True, dynamic=True, backend=counter
    )
    for batch, height, width in [(2, 8, 9), (3, 17, 5), (4, 6, 31), (7, 64, 64)]:
        image = torch.rand(batch, 3, height, width, device=device)
        assert torch.equal(compiled(image), img2gray(image) + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("index", range(6))
def test_all_08_fake_has_the_strides_of_the_kernel(kernel, device, index):
    from torch._subclasses.fake_tensor import FakeTensorMode

    image = sample_images(device)[index]
    real = kernel.img2gray(image)
    with FakeTensorMode() as mode:
        fake = kernel.img2gray(mode.from_tensor(image))
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
        real.shape,
        real.stride(),
        real.dtype,
        real.device,
    )


def test_fake_refuses_what_the_kernel_refuses(kernel):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    bad = [
        (dict(image=meta(2, 4, 4)), "channels"),
        (dict(image=meta(3, 4)), "3 dims"),
        (dict(image=meta(3, 4, 4, dtype=torch.int64)), "dtype"),
        (dict(image=meta(3, 4, 4), weights="pil"), "uint8"),
        (dict(image=meta(3, 4, 4), out=meta(4, 4)), "shape"),
        (dict(image=meta(3, 4, 4), out=meta(1, 4, 4, dtype=torch.half)), "dtype"),
    ]
    for arguments, word in bad:
        with pytest.raises(RuntimeError, match=word):
            kernel.img2gray(arguments.pop("image"), **arguments)
    assert kernel.img2gray(meta(3, 4, 5)).shape == (1, 4, 5)


def test_all_09_mutation_is_in_the_schema_and_nothing_is_returned(kernel):
    schema = kernel._ops.ops.img2gray_out.default._schema
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    assert written == ["out"] and list(schema.returns) == []
    for name in ("img2gray", "img2gray_raw"):
        schema = getattr(kernel._ops.ops, name).default._schema
        assert not any(argument.alias_info for argument in (*schema.arguments, *schema.returns))


def test_all_10_one_fake_and_one_kernel_per_device(kernel):
    for name in ("img2gray", "img2gray_raw", "img2gray_out"):
        table = torch._C._dispatch_dump(kernel._ops.add_op_namespace_prefix(name)).splitlines()
        fakes = [line for line in table if line.startswith("Meta")]
        assert len(fakes) == 1 and "library.py" in fakes[0]
        assert len([line for line in table if line.startswith("CPU")]) == 1
        assert not [line for line in table if line.startswith("Composite")]


@pytest.mark.gpu
def test_all_02_cuda_graph_replays_with_new_input(img2gray):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    image = torch.randint(0, 256, (64, 65, 3), dtype=torch.uint8, device="cuda")
    out = torch.empty(64, 65, 1, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    img2gray(image, layout="HWC")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        gray = img2gray(image, layout="HWC")
        img2gray(image, layout="HWC", weights="pil", out=out)
    for _ in range(3):
        image.copy_(torch.randint(0, 256, image.shape, dtype=torch.uint8))
        graph.replay()
        assert torch.equal(gray, img2gray(image, layout="HWC"))
        assert torch.equal(out, img2gray(image, layout="HWC", weights="pil"))
