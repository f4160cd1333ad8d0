"""Gradients: linear in the image, of any order, and none where none is asked for."""

import pytest
import torch

OPTIONS = [
    dict(),
    dict(layout="HWC", weights="bt709", channel_order="BGR"),
    dict(keepdim=False, weights=(-0.5, 2.0, 0.1)),
    dict(layout="HWC", keepdim=False, weights="opencv"),
]


def image_for(options, channels, dtype=torch.float64, device="cpu"):
    shape = (2, 3, 4, channels) if options.get("layout") == "HWC" else (2, channels, 3, 4)
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_gradcheck_first_and_second_order(img2gray, device, options, channels):
    image = image_for(options, channels, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: img2gray(x, **options), image)
    assert torch.autograd.gradgradcheck(lambda x: img2gray(x, **options), image)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradient_is_the_weight_times_the_incoming_one(img2gray, kernel, device, dtype, options):
    image = image_for(options, 4, dtype, device).requires_grad_()
    gray = img2gray(image, **options)
    incoming = torch.rand(gray.shape, generator=torch.Generator().manual_seed(2)).to(gray)
    gray.backward(incoming)
    weights = options.get("weights", "bt601")
    weights = kernel.op.FORMULAS[weights][:3] if isinstance(weights, str) else weights
    if options.get("channel_order") == "BGR":
        weights = weights[::-1]
    dim = -1 if options.get("layout") == "HWC" else -3
    incoming = incoming if options.get("keepdim", True) else incoming.unsqueeze(dim)
    expected = torch.cat(
        [incoming.float() * weight for weight in weights] + [0 * incoming.float()], dim
    ).to(dtype)
    assert torch.equal(image.grad, expected)


def test_gradient_flows_from_a_view(img2gray, device):
    buffer = torch.rand(5, 6, 7, device=device, requires_grad=True)
    img2gray(buffer[1:4].transpose(1, 2)).sum().backward()
    assert buffer.grad[0].eq(0).all() and buffer.grad[1:4].ne(0).all()


@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_all_04_no_grad_keeps_nothing(img2gray, device_name):
    if device_name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    image = torch.rand(3, 64, 64, device=device_name, requires_grad=True)
    with torch.no_grad():
        gray = img2gray(image)
        assert gray.grad_fn is None
        if device_name == "cuda":
            del gray
            used = torch.cuda.memory_allocated()
            for _ in range(100):
                img2gray(image)
            assert torch.cuda.memory_allocated() == used
    # With a graph, nothing of the image's size is kept either: the op is linear.
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: pytest.fail("saved a tensor"), lambda tensor: tensor
    ):
        img2gray(image).sum()


def test_all_05_gradient_depends_on_the_inputs(img2gray, kernel, device):
    image = torch.rand(3, 8, 8, device=device)
    assert not img2gray(image).requires_grad
    assert img2gray(image.requires_grad_()).requires_grad
    with torch.inference_mode():
        assert not img2gray(image).requires_grad


def test_all_06_training_never_loses_the_gradient(kernel, device):
    layer = torch.nn.Conv2d(3, 3, 1).to(device)
    kernel.Img2Gray()(layer(torch.rand(1, 3, 8, 8, device=device))).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_integers_have_no_gradient(img2gray, device):
    assert not img2gray(torch.zeros(3, 4, 4, dtype=torch.uint8, device=device)).requires_grad


def test_out_with_a_gradient_is_refused(img2gray, device):
    image = torch.rand(3, 4, 4, device=device, requires_grad=True)
    out = torch.empty(1, 4, 4, device=device)
    with pytest.raises(ValueError, match="out: cannot be used where a gradient is needed"):
        img2gray(image, out=out)
    with pytest.raises(ValueError, match="out"):
        img2gray(image.detach(), out=out.clone().requires_grad_())
    with torch.no_grad():
        assert img2gray(image, out=out) is out
