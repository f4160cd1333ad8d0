"""Layers as `kernelize` uses them: on modules of the libraries whose classes they replace."""

import copy
import inspect

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer import use_kernel_forward_from_hub
from rmsnorm_cases import REPLACED, TRANSFORMERS, Formula, normals, same_bytes

LAYERS = sorted({replaced.layer for replaced in REPLACED})
PLAIN = Mode.INFERENCE, Mode.TRAINING
MODES = [*PLAIN, *(mode | Mode.TORCH_COMPILE for mode in PLAIN)]


@pytest.fixture
def swap(build_dir, device):
    """Kernelizes a model, with our layers by hook name; returns the modules that got one."""

    def swap(model, layers, mode=Mode.INFERENCE):
        mapping = {
            hook: {device: LocalLayerRepository(build_dir, layer_name=layer)}
            for hook, layer in layers.items()
        }
        before = {name: module.forward for name, module in model.named_modules()}
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device=device)
        return [name for name, module in model.named_modules() if module.forward != before[name]]

    return swap


def hooked(replaced):
    """A subclass of the class with a hook, so that the class itself stays as it is."""
    module = pytest.importorskip(replaced.module)
    base = getattr(module, replaced.cls)
    return use_kernel_forward_from_hub("RMSNormUnderTest")(type(base.__name__, (base,), {}))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_is_what_kernelize_takes(kernel, layer):
    """forward and the two flags alone, and no attribute that would hide one of the model's."""
    cls = getattr(kernel.layers, layer)
    members = {name for name in vars(cls) if not (name.startswith("__") and name.endswith("__"))}
    assert members == {"forward", "has_backward", "can_torch_compile"}
    assert cls.has_backward is True and cls.can_torch_compile is True
    assert cls.__init__ is torch.nn.Module.__init__ and issubclass(cls, torch.nn.Module)


def test_layers_are_those_listed(kernel):
    assert (
        sorted(
            name
            for name, cls in vars(kernel.layers).items()
            if inspect.isclass(cls) and issubclass(cls, torch.nn.Module)
        )
        == LAYERS
    )


@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.id)
def test_forward_takes_the_keyword_of_the_class(kernel, replaced):
    module = pytest.importorskip(replaced.module)
    theirs = inspect.signature(getattr(module, replaced.cls).forward).parameters
    ours = inspect.signature(getattr(kernel.layers, replaced.layer).forward).parameters
    if replaced.module == "torch.nn":  # its name is not part of torch's interface
        assert len(ours) == len(theirs) == 2
    else:
        assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("replaced", REPLACED, ids=lambda replaced: replaced.id)
def test_kernelize_replaces_the_class(kernel, device, swap, replaced, mode):
    module = replaced.make(64, torch.bfloat16, device=device)
    module.__class__ = hooked(replaced)
    model = torch.nn.ModuleDict(dict(norm=module))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    x = normals((5, 64), torch.bfloat16).to(device)
    expected = module(x)
    model.train(Mode.TRAINING in mode)
    assert swap(model, {"RMSNormUnderTest": replaced.layer}, mode) == ["norm"]
    y = module(x)
    assert same_bytes(y, kernel.rms_norm(x, **replaced.keywords(module)))
    assert y.dtype == expected.dtype
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == {
        key: value.data_ptr() for key, value in module.state_dict(prefix="norm.").items()
    }
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


HOOKED_MODELS = [
    ("llama", "LlamaRMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("mistral", "MistralRMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("qwen2", "Qwen2RMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("qwen3", "Qwen3RMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("phi3", "Phi3RMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("deepseek_v3", "DeepseekV3RMSNorm", "RMSNorm", "LlamaRMSNorm"),
    ("gpt_oss", "GptOssRMSNorm", "RMSNorm", "GptOssRMSNorm"),
    ("olmo2", "Olmo2RMSNorm", "RMSNorm", "GptOssRMSNorm"),
    ("nemotron_h", "NemotronHRMSNorm", "RMSNorm", "GptOssRMSNorm"),
    ("qwen3_5", "Qwen3_5RMSNorm", "RMSNormZeroCentered", "Qwen3_5RMSNorm"),
]


@pytest.mark.parametrize("model, cls, hook, layer", HOOKED_MODELS, ids=lambda value: value)
def test_hooks_of_transformers(device, swap, model, cls, hook, layer):
    """Under the hook that the class has, without touching the class."""
    norm = getattr(pytest.importorskip(TRANSFORMERS(model)), cls)(64)
    norm = torch.nn.Sequential(norm).to(device, torch.bfloat16)
    with torch.no_grad():
        norm[0].weight += normals((64,), torch.bfloat16, seed=1).to(device)
    x = torch.randint(-8, 9, (9, 64)).to(device, torch.bfloat16)
    expected = norm(x)
    assert swap(norm, {hook: layer}) == ["0"]
    assert same_bytes(norm(x), expected)


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_a_model_gives_its_logits_and_gradients(device, swap):
    plain = tiny_llama().to(device)
    ours = copy.deepcopy(plain)
    replaced = swap(ours, {"RMSNorm": "LlamaRMSNorm"}, Mode.TRAINING)
    assert len(replaced) == 5 and all("norm" in name for name in replaced)
    tokens = torch.arange(24, device=device).view(2, 12)
    for model in (plain, ours):
        model.train()
        model(input_ids=tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(
        ours(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-5, atol=1e-5
    )
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_model_with_gradient_checkpointing(device, swap):
    model = tiny_llama().to(device)
    swap(model, {"RMSNorm": "LlamaRMSNorm"}, Mode.TRAINING)
    model.train()
    tokens = torch.arange(24, device=device).view(2, 12)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-5, atol=1e-6)


def test_all_06_a_layer_in_training_keeps_all_gradients(device, swap):
    """In a copy of the model too, whose layers work on the copy's parameters."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), hooked(REPLACED[0])(64), torch.nn.Linear(64, 4)
    ).to(device)
    swap(model, {"RMSNormUnderTest": "LlamaRMSNorm"}, Mode.TRAINING)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[1].weight *= 3
    x = normals((5, 8)).to(device)
    inner = copied[0](x)
    Formula(inner, copied[1].weight, rounding="input_dtype").check(copied[1](inner))
    copied(x).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_kernelized_model_compiles_without_graph_breaks(device, swap):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), hooked(REPLACED[0])(64)).to(device)
    swap(model, {"RMSNormUnderTest": "LlamaRMSNorm"}, Mode.TRAINING | Mode.TORCH_COMPILE)
    x = normals((5, 8)).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert same_bytes(compiled(x), model(x))
    compiled(x).square().sum().backward()
    compiled_gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for a, b in zip(compiled_gradients, model.parameters()):
        torch.testing.assert_close(a, b.grad)


def test_layers_under_autocast_see_what_the_model_gives_them(device, swap):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), hooked(REPLACED[0])(64)).to(device)
    plain = copy.deepcopy(model)
    swap(model, {"RMSNormUnderTest": "LlamaRMSNorm"}, Mode.TRAINING)
    x = normals((5, 8)).to(device)
    with torch.autocast(device, torch.bfloat16):
        assert model(x).dtype == plain(x).dtype
        torch.testing.assert_close(model(x), plain(x), rtol=2.0**-7, atol=0)
        model(x).float().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
