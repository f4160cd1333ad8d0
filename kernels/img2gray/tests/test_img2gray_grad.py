"""Gradients: linear in the image, of any order, and none where none is asked for."""

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch.autograd import forward_ad

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
    with torch.inference_mode():
        inference = torch.empty(1, 4, 4, device=device)
        assert img2gray(image, out=inference) is inference
    with pytest.raises(ValueError, match="out: is an inference tensor"):
        img2gray(image.detach(), out=inference)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="out: .*forward-mode"):
        img2gray(image.detach(), out=out)


def test_autograd_sees_what_out_overwrites(img2gray, device):
    """A graph that saved `out` must not compute with the values written later."""
    weight = torch.rand(1, 4, 4, device=device, requires_grad=True)
    out = torch.rand(1, 4, 4, device=device)
    product = (weight * out).sum()
    img2gray(torch.rand(3, 4, 4, device=device), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("channels", [1, 4])
def test_all_06_transforms_keep_tangents_and_gradients(img2gray, device, options, channels):
    """The op is linear: its tangent is the op of the tangent, its Jacobian one of the gradient."""
    image = image_for(options, channels, device=device)
    tangent = torch.rand_like(image)

    def gray(x):
        return img2gray(x, **options)

    with forward_ad.dual_level():
        result = gray(forward_ad.make_dual(image, tangent))
        assert torch.equal(forward_ad.unpack_dual(result).tangent, gray(tangent))
    value, along = torch.func.jvp(gray, (image,), (tangent,))
    assert torch.equal(value, gray(image)) and torch.equal(along, gray(tangent))
    (expected,) = torch.autograd.grad(gray(image.requires_grad_()).square().sum(), image)
    image = image.detach()
    assert torch.equal(torch.func.grad(lambda x: gray(x).square().sum())(image), expected)
    torch.testing.assert_close(torch.func.jacfwd(gray)(image), torch.func.jacrev(gray)(image))
    batch = torch.stack([image, tangent], 1).requires_grad_()
    torch.vmap(gray, in_dims=1)(batch).square().sum().backward()
    assert torch.equal(batch.grad[:, 0], expected)
    assert torch.equal(
        torch.vmap(gray, in_dims=1)(batch), torch.stack([gray(image), gray(tangent)])
    )


def test_second_derivatives_through_transforms(img2gray, device):
    weights = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64)
    image = torch.rand(3, 1, 1, dtype=torch.float64, device=device)
    square = lambda x: img2gray(x, weights=weights.tolist()).square().sum()  # noqa: E731
    hessian = torch.func.hessian(square)(image).reshape(3, 3).cpu()
    torch.testing.assert_close(hessian, 2 * torch.outer(weights, weights))


def test_a_transform_inside_compile_is_refused_rather_than_wrong(img2gray, device):
    image = torch.rand(3, 4, 4, device=device)
    compiled = torch.compile(
        lambda x: torch.func.jvp(img2gray, (x,), (x,)), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="img2gray inside torch.func transforms"):
        compiled(image)


def test_graphs_of_make_fx_keep_gradients(img2gray):
    """The graph may be differentiated later, though its example needs no gradient."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: img2gray(x))(torch.rand(3, 4, 4))
    image = torch.rand(3, 4, 4, requires_grad=True)
    graph(image).sum().backward()
    expected = torch.tensor([0.2989, 0.587, 0.114]).view(3, 1, 1).expand(3, 4, 4)
    assert torch.allclose(image.grad, expected)
