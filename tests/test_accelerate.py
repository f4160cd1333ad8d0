"""warpsmith.accelerate, on small models of every family that it has rows for."""

import copy
import functools
import inspect
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn

import warpsmith
from common.tiny_models import FAMILIES
from warpsmith import acceleration, swaps

hf_kernels = pytest.importorskip("kernels")
transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

from diffusers.hooks import HookRegistry, ModelHook  # noqa: E402
from diffusers.models.normalization import MochiRMSNorm, RMSNorm  # noqa: E402
from diffusers.models.transformers.transformer_qwenimage21 import (  # noqa: E402
    QwenImage21ZeroCenterRMSNorm,
)
from diffusers.models.transformers.transformer_stable_audio3 import (  # noqa: E402
    StableAudio3RMSNorm,
)
from transformers.models.falcon_mamba.modeling_falcon_mamba import (  # noqa: E402
    FalconMambaWeightlessRMSNorm,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

Mode = hf_kernels.Mode
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))
on_every_device = pytest.mark.parametrize("device", DEVICES)
ONE_PER_LAYER = ("llama", "gpt_oss", "gemma3", "qwen3_5", "gemma3n", "llama4", "t5", "ltx", "mochi")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they give with tensors of this size."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def kernel():
    return warpsmith.load("rmsnorm")


@pytest.fixture
def calls(kernel, monkeypatch):
    """Counts the calls of the kernel in its layers."""
    counter = SimpleNamespace(count=0)
    rms_norm = kernel.layers.rms_norm

    def counted(*arguments, **options):
        counter.count += 1
        return rms_norm(*arguments, **options)

    monkeypatch.setattr(kernel.layers, "rms_norm", counted)
    return counter


def build(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name].build().eval()
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:  # weights of 1 would hide how they are applied
                for parameter in module.parameters(recurse=False):
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(device)


def inputs(name: str, model: nn.Module) -> dict:
    torch.manual_seed(1)
    parameter = next(model.parameters())

    def place(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)

    return {key: place(value) for key, value in FAMILIES[name].inputs().items()}


def run(name: str, model: nn.Module) -> torch.Tensor:
    return model(**inputs(name, model), return_dict=False)[0]


def layers_of(report) -> dict[str, int]:
    return dict(Counter(finding.layer for finding in report.swapped))


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if acceleration._our_layer(m) is not None]


def reason(module: nn.Module, **options) -> str:
    """Why the one module was left alone."""
    (finding,) = warpsmith.accelerate(module, **options).findings
    assert finding.layer is None and acceleration._our_layer(module) is None
    return finding.reason


# --- every family --------------------------------------------------------------------------------


@on_every_device
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_family(name, device, calls, kernel, monkeypatch):
    family, model = FAMILIES[name], build(name, device)
    exact = run(name, model)
    model.to(torch.bfloat16)
    eager = run(name, model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}

    report = warpsmith.accelerate(model, strict=True)
    assert layers_of(report) == family.layers and not report.left
    assert len(report) == sum(family.layers.values())
    calls.count = 0
    accelerated = run(name, model)
    assert calls.count == family.calls

    limit = 1.1 * (eager.float() - exact).norm() + 1e-6
    assert (accelerated.float() - exact).norm() <= limit
    for key, value in model.state_dict().items():
        assert torch.equal(value, state.pop(key))
    assert not state

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(kernel.layers, "rms_norm", lambda *a, **k: 1 // 0)
        run(name, model)

    warpsmith.restore(model)
    assert attributes == {path: set(vars(module)) for path, module in model.named_modules()}
    calls.count = 0
    assert torch.equal(run(name, model), eager) and calls.count == 0


@on_every_device
@pytest.mark.parametrize("name", ONE_PER_LAYER)
def test_training_and_back(name, device, calls):
    model = build(name, device)
    plain = copy.deepcopy(model).train()
    warpsmith.accelerate(model)
    model.train()
    gradients = []
    for each in (plain, model):
        calls.count = 0
        run(name, each).square().sum().backward()
        gradients.append({key: p.grad for key, p in each.named_parameters() if p.grad is not None})
    assert calls.count == FAMILIES[name].calls
    wanted, got = gradients
    assert wanted.keys() == got.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-3, atol=1e-4, msg=key)
    model.eval()
    calls.count = 0
    run(name, model)
    assert calls.count == FAMILIES[name].calls


@on_every_device
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "qwen3_5", "t5"])
def test_generated_tokens(name, device, calls):
    model = build(name, device)
    options = {"max_new_tokens": 6, "do_sample": False}
    prompt = inputs(name, model)["input_ids"]
    eager = model.generate(prompt, **options)
    warpsmith.accelerate(model)
    calls.count = 0
    assert torch.equal(model.generate(prompt, **options), eager)
    assert calls.count > FAMILIES[name].calls


def test_hooks_are_active():
    """Or the tests here would not see what transformers does with classes that have one."""
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() and LlamaRMSNorm.kernel_layer_name == "RMSNorm"


# --- every class ---------------------------------------------------------------------------------

UNKNOWN = {
    # round the reciprocal root too, or give that alone
    "DeepseekV4UnweightedRMSNorm",
    "Glm5NextTextUnweightedRMSNorm",
    "HYV4UnweightedRMSNorm",
    # scales before the norm
    "MuseSparkTextInputScaledRMSNorm",
}
HOOKED = {
    "RMSNorm": {"LlamaRMSNorm", "GptOssRMSNorm"},
    "RMSNormZeroCentered": {"Qwen3_5RMSNorm"},
}


def classes_with_rows():
    """The classes of transformers that rows name, and their hooks, without importing all models."""
    package = Path(inspect.getfile(transformers)).parent
    top_level_class = re.compile(r"^(?:@.*\n)*class (\w+Norm)\(.*\n(?:[ #].*\n|\n)*", re.MULTILINE)
    for path in sorted(package.glob("models/*/modeling_*.py")):
        module = ".".join(("transformers", *path.relative_to(package).with_suffix("").parts))
        for match in top_level_class.finditer(path.read_text()):
            name = f"{module}.{match[1]}"
            if not any(swap.names(name) for swap in swaps.SWAPS):
                continue
            hooks = []
            names = {"__name__": module, "torch": torch, "nn": nn}
            names["use_kernel_forward_from_hub"] = lambda name, hooks=hooks: (
                lambda cls: hooks.append(name) or cls
            )
            exec(compile(f"from __future__ import annotations\n{match[0]}", path, "exec"), names)
            yield names[match[1]], hooks


def test_every_class_of_transformers_is_recognised_or_known_not_to_be():
    layers, unknown = Counter(), set()
    for cls, hooks in classes_with_rows():
        sized = list(inspect.signature(cls).parameters)[0] != "eps"
        module = cls(32) if sized else cls()
        (finding,) = warpsmith.accelerate(module).findings
        for hook in hooks:
            assert finding.layer in HOOKED[hook], cls
        if finding.layer is None:
            unknown.add(cls.__name__)
        layers[(finding.layer, *hooks)] += 1
    assert unknown == UNKNOWN
    assert sum(n for (_, *hooks), n in layers.items() if hooks == ["RMSNorm"]) > 120
    assert {layer for layer, *_ in layers} - {None} == {
        "LlamaRMSNorm",
        "GptOssRMSNorm",
        "GemmaRMSNorm",
        "Qwen3_5RMSNorm",
        "Gemma3nRMSNorm",
        "MoshiRMSNorm",
        "MuseSparkTextCenteredRMSNorm",
        "Llama4TextRMSNorm",
        "Llama4TextL2Norm",
        "T5LayerNorm",
    }


def test_every_class_of_diffusers_has_a_row_or_is_known_to_have_none():
    package = Path(inspect.getfile(diffusers)).parent
    without_row = set()
    for path in package.rglob("*.py"):
        module = ".".join(("diffusers", *path.relative_to(package).with_suffix("").parts))
        for name in re.findall(r"^class (\w*RMSNorm)\(", path.read_text(), re.MULTILINE):
            if not any(swap.names(f"{module}.{name}") for swap in swaps.SWAPS):
                without_row.add(name)
    assert without_row == {
        # over channels, which are not the last dim
        "PerChannelRMSNorm",
        "Kandinsky6VAERMSNorm",
        "Kandinsky6SRLatentUpscalerRMSNorm",
        # takes a scale too
        "MochiModulatedRMSNorm",
    }


def test_every_layer_has_a_row(kernel):
    layers = {name for name, value in vars(kernel.layers).items() if isinstance(value, type)}
    assert layers == {row.layer for row in swaps.SWAPS}


@pytest.mark.parametrize(
    "module, layer",
    [
        (nn.RMSNorm(32), "TorchRMSNorm"),
        (nn.RMSNorm(32, eps=1e-5, elementwise_affine=False), "TorchRMSNorm"),
        (nn.RMSNorm((4, 8), eps=1e-5), "TorchRMSNorm"),
        (RMSNorm(32, 1e-6, bias=True), "DiffusersRMSNorm"),
        (RMSNorm(32, 1e-6, elementwise_affine=False), "DiffusersRMSNorm"),
        (MochiRMSNorm(32, 1e-6, elementwise_affine=False), "MochiRMSNorm"),
        (QwenImage21ZeroCenterRMSNorm(32), "QwenImage21ZeroCenterRMSNorm"),
        (StableAudio3RMSNorm(32), "StableAudio3RMSNorm"),
    ],
)
@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variants_of_a_module(module, layer, dtype, device, calls):
    module = copy.deepcopy(module).to(device, dtype)
    x = torch.randn(2, 4, *getattr(module, "normalized_shape", (32,)), device=device, dtype=dtype)
    wanted = module(x)
    assert layers_of(warpsmith.accelerate(module)) == {layer: 1}
    calls.count = 0
    torch.testing.assert_close(module(x), wanted)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(module(x), wanted)
    assert calls.count == 2


# --- what stays as it is -------------------------------------------------------------------------


class Subclass(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


class SubclassWithItsForward(LlamaRMSNorm):
    pass


class OtherFormula(nn.Module):
    """As in the code that comes with a checkpoint."""

    __module__ = "transformers_modules.other.modeling_other"
    __qualname__ = "OtherRMSNorm"

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        mean = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states / (mean.sqrt() + self.variance_epsilon))


class OtherClass(OtherFormula):
    __module__ = "transformers_modules.another.modeling_another"
    __qualname__ = "AnotherRMSNorm"

    forward = LlamaRMSNorm.forward


class TensorSubclass(torch.Tensor):
    pass


def with_another_forward(module):
    module.forward = lambda hidden_states: hidden_states
    return module


def without_weight(module):
    del module.weight
    return module


def with_a_bias(module):
    module.register_parameter("bias", nn.Parameter(torch.zeros(16)))
    module.forward = MethodType(type(module).forward, module)  # as kernelize leaves it
    return module


def with_a_submodule(module):
    module.adapter = nn.Linear(16, 16)
    return module


def with_a_counter(module):
    module.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return module


def with_a_tensor(module):
    module.scale = torch.ones(16)
    return module


def with_hook_of_accelerate(module):
    module._hf_hook = object()
    module._old_forward = module.forward
    return with_another_forward(module)


def with_tensor_subclass(module):
    module._parameters["weight"] = torch.ones(16).as_subclass(TensorSubclass)
    return module


def compiled(module):
    module.compile()
    return module


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Subclass(16), "subclass of LlamaRMSNorm with another forward"),
        (lambda: with_a_submodule(LlamaRMSNorm(16)), "state that the layers do not know"),
        (lambda: with_a_counter(LlamaRMSNorm(16)), "state that the layers do not know"),
        (lambda: with_a_tensor(LlamaRMSNorm(16)), "state that the layers do not know"),
        (lambda: OtherFormula(16), "formula is none of rmsnorm's"),
        (lambda: without_weight(LlamaRMSNorm(16)), "formula is none of rmsnorm's"),
        (lambda: LlamaRMSNorm((4, 16)), "formula is none of rmsnorm's"),
        (lambda: T5LayerNorm((4, 16)), "formula is none of rmsnorm's"),
        (lambda: StableAudio3RMSNorm(32, force_fp32=False), "formula is none of rmsnorm's"),
        (lambda: LlamaRMSNorm(16).double(), "dtype is torch.float64"),
        (lambda: GemmaRMSNorm(16).to("meta"), "device is meta"),
        (lambda: with_another_forward(LlamaRMSNorm(16)), "forward was replaced"),
        (lambda: with_hook_of_accelerate(LlamaRMSNorm(16)), "hook of the accelerate library"),
        (lambda: with_tensor_subclass(LlamaRMSNorm(16)), "type TensorSubclass"),
        (lambda: compiled(LlamaRMSNorm(16)), "compiled already"),
    ],
)
def test_left_alone(make, words):
    module = make()
    before = dict(vars(module))
    assert words in reason(module)
    assert vars(module) == before
    with pytest.raises(RuntimeError, match=words):
        warpsmith.accelerate(nn.Sequential(module, LlamaRMSNorm(16)), strict=True)


def norm(self, x, dim=-1, eps=None, gradient=True):
    """What LlamaRMSNorm computes, by default."""
    h = x.float()
    variance = h.pow(2).mean(dim, keepdim=True)
    scale = torch.rsqrt(variance + (eps or self.variance_epsilon))
    return self.weight * (h * (scale if gradient else scale.detach())).to(x.dtype)


DIFFERENT = {  # h has the name of the argument that Llama's class has
    "dimension": lambda self, h: norm(self, h, dim=1),
    "first dimension": lambda self, h: norm(self, h, dim=0),
    "eps": lambda self, h: norm(self, h, eps=1.01e-6),
    "clamp": lambda self, h: norm(self, h).clamp(-4, 4),
    "clamp of the input": lambda self, h: norm(self, h.clamp(-100, 100)),
    "float16": lambda self, h: norm(self, h) * (2 if h.dtype == torch.float16 else 1),
    "training": lambda self, h: norm(self, h) * (2 if self.training else 1),
    "evaluation": lambda self, h: norm(self, h) * (1 if self.training else 2),
    "two results": lambda self, h: (norm(self, h), h),
    "no gradient": lambda self, h: norm(self, h).detach(),
    "no gradient of the weight": lambda self, h: norm(
        SimpleNamespace(weight=self.weight.detach(), variance_epsilon=self.variance_epsilon), h
    ),
    "no gradient of the variance": lambda self, h: norm(self, h, gradient=False),
    "buffer": lambda self, h: norm(self, h) + self.offset.to(h.dtype),
    "private attribute": lambda self, h: norm(self, h) * self._scale,
}


def module_with(formula):
    class FormulaRMSNorm(OtherFormula):
        __module__ = OtherFormula.__module__
        __qualname__ = "FormulaRMSNorm"

        def forward(self, hidden_states):
            return formula(self, hidden_states)

    return FormulaRMSNorm(32)


@pytest.mark.parametrize("name", DIFFERENT)
def test_formulas_that_differ_in_one_case(name):
    module = module_with(DIFFERENT[name])
    module.register_buffer("offset", torch.zeros(32))
    module._scale = 3.0
    assert "formula is none of rmsnorm's" in reason(module)
    assert not module.offset.any()


def test_a_buffer_that_counts_calls():
    module = module_with(lambda self, h: self.calls.add_(1) * 0 + norm(self, h))
    module.register_buffer("calls", torch.zeros(()))
    warpsmith.accelerate(module)
    assert module.calls == 0


def test_modules_that_differ_in_a_private_attribute():
    module = module_with(DIFFERENT["private attribute"])
    module._scale = 1.0
    other = copy.deepcopy(module)
    other._scale = 3.0
    assert [f.layer for f in warpsmith.accelerate(nn.Sequential(module, other)).findings] == [
        "LlamaRMSNorm",
        None,
    ]


def test_a_formula_written_in_another_way():
    module = module_with(norm)
    module.register_buffer("unused", torch.zeros(32))
    assert layers_of(warpsmith.accelerate(module)) == {"LlamaRMSNorm": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_in_a_buffer_that_the_class_does_not_use(dtype):
    module = FalconMambaWeightlessRMSNorm(32).to(dtype)
    weight = module.weight.clone()
    assert layers_of(warpsmith.accelerate(module)) == {"Llama4TextL2Norm": 1}
    assert torch.equal(module.weight, weight)


def test_subclass_that_keeps_the_forward():
    module = SubclassWithItsForward(16)
    assert layers_of(warpsmith.accelerate(module)) == {"LlamaRMSNorm": 1}
    assert hook_of(SubclassWithItsForward) == {}


def test_another_class_with_a_known_formula():
    assert layers_of(warpsmith.accelerate(OtherClass(16))) == {"LlamaRMSNorm": 1}


def test_a_bias_that_the_class_does_not_use_changes_nothing(calls):
    module = with_a_bias(LlamaRMSNorm(16))
    assert layers_of(warpsmith.accelerate(module)) == {"LlamaRMSNorm": 1}
    warpsmith.restore(module)
    assert "forward" not in vars(module)


def test_inside_a_compiled_model(calls):
    model = torch.compile(nn.Sequential(LlamaRMSNorm(16)), backend="eager")
    assert "compiled already" in warpsmith.accelerate(model).left[0].reason


def test_norm_without_parameters_follows_its_model():
    model = nn.Sequential(nn.Linear(16, 16), RMSNorm(16, 1e-6, elementwise_affine=False)).double()
    (finding,) = warpsmith.accelerate(model).left
    assert finding.path == "1" and finding.reason == "its model's dtype is torch.float64"
    with torch.device("meta"):
        alone = RMSNorm(16, 1e-6, elementwise_affine=False)
        assert layers_of(warpsmith.accelerate(alone)) == {"DiffusersRMSNorm": 1}


def test_norm_that_is_compiled_under_another_name():
    shared = LlamaRMSNorm(16)
    model = nn.ModuleList([shared, compiled(nn.Sequential(shared))])
    assert "compiled already" in warpsmith.accelerate(model).left[0].reason


def test_gated_norms_and_layer_norms_are_not_asked_for():
    model = build("qwen3_5")
    kept = [m for m in model.modules() if type(m).__name__ == "Qwen3_5RMSNormGated"]
    report = warpsmith.accelerate(model)
    assert kept and all("forward" not in vars(m) for m in kept)
    assert not {f.original.rpartition(".")[2] for f in report.findings} & {"Qwen3_5RMSNormGated"}
    assert not warpsmith.accelerate(nn.LayerNorm(16)).findings
    assert not any(swap.names("transformers.models.axk2.AXK2GatedRMSNorm") for swap in swaps.SWAPS)


# --- what else the process has -------------------------------------------------------------------


def hook_of(cls):
    return acceleration._own_hook(cls)


@torch.no_grad()
def test_other_models_and_classes_stay_as_they_are(calls):
    classes = (LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm, RMSNorm)
    before = [hook_of(cls) for cls in classes]
    assert [bool(hook) for hook in before] == [True, False, False, False]
    names = ("llama", "gemma", "flux", "sd3.5")
    models = [build(name) for name in names]
    others = [build(name) for name in names]
    for model in models:
        warpsmith.accelerate(model)
    assert [hook_of(cls) for cls in classes[1:]] == [{}, {}, {}]
    assert LlamaRMSNorm.kernel_layer_name == "RMSNorm"
    calls.count = 0
    others[0].set_use_kernels(True)
    for name, other in zip(names, others):
        run(name, other)
    assert calls.count == 0
    for model in models:
        warpsmith.restore(model)
    assert [hook_of(cls) for cls in classes[1:]] == before[1:]
    assert LlamaRMSNorm.kernel_layer_name == "RMSNorm"
    assert LlamaRMSNorm.kernel_condition(LlamaRMSNorm(16))


@pytest.mark.parametrize("before", [True, False])
@torch.no_grad()
def test_kernelizing_by_transformers_does_not_undo_it(before, calls):
    """set_use_kernels, and with it train and eval, rebind the forward of every class with a hook."""
    model, plain = build("llama"), build("llama")
    if before:
        model.set_use_kernels(True)
        warpsmith.accelerate(model, strict=True)
    else:
        warpsmith.accelerate(model)
        model.set_use_kernels(True)
    for training in (True, False):
        model.train(training)
        calls.count = 0
        run("llama", model)
        assert calls.count == FAMILIES["llama"].calls
    torch.testing.assert_close(run("llama", model), run("llama", plain), rtol=1e-4, atol=1e-5)
    warpsmith.restore(model)
    assert all(LlamaRMSNorm.kernel_condition(m) for m in model.modules())
    model.train()
    assert not norms_of(model)


@torch.no_grad()
def test_works_without_the_hooks(calls, monkeypatch):
    """As with a version of kernels that transformers does not take."""
    for name in acceleration.HOOK:
        monkeypatch.delattr(LlamaRMSNorm, name)
    model = build("llama")
    warpsmith.accelerate(model, strict=True)
    assert hook_of(LlamaRMSNorm) == {}
    calls.count = 0
    run("llama", model)
    assert calls.count == FAMILIES["llama"].calls
    warpsmith.restore(model)


def test_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setattr(hf_kernels.layer.globals, "_DISABLE_KERNEL_MAPPING", True)
    assert "DISABLE_KERNEL_MAPPING" in reason(LlamaRMSNorm(16))


def test_random_numbers_stay_the_same():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    warpsmith.accelerate(module_with(lambda self, h: norm(self, h) + 0 * torch.rand(1)))
    assert torch.equal(torch.rand(4), wanted)


def test_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures = []

    def work(model):
        try:
            warpsmith.accelerate(model, strict=True)
            warpsmith.restore(model)
            warpsmith.accelerate(model, strict=True)
        except Exception as error:
            failures.append(error)

    models = [nn.Sequential(*(GemmaRMSNorm(16) for _ in range(40))) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures and hook_of(GemmaRMSNorm) == {}
    assert [len(norms_of(model)) for model in models] == [40] * 4


def test_binding_that_fails_midway_is_undone(monkeypatch):
    model = nn.Sequential(*(GemmaRMSNorm(16) for _ in range(3)))
    kernelize, count = hf_kernels.kernelize, iter(range(3))

    def failing(*arguments, **options):
        if next(count) == 2:
            raise OSError("disk")
        kernelize(*arguments, **options)

    monkeypatch.setattr(hf_kernels, "kernelize", failing)
    with pytest.raises(OSError, match="disk"):
        warpsmith.accelerate(model)
    assert not norms_of(model) and all("forward" not in vars(module) for module in model)
    assert hook_of(GemmaRMSNorm) == {}


# --- again, copies, restore ----------------------------------------------------------------------


def test_again_gives_the_same_report():
    model = build("qwen3")
    report = warpsmith.accelerate(model)
    forwards = [module.forward for module in norms_of(model)]
    assert warpsmith.accelerate(model, strict=True) == report
    assert [module.forward for module in norms_of(model)] == forwards
    warpsmith.restore(model)
    warpsmith.restore(model)
    assert not norms_of(model)


@torch.no_grad()
def test_copies_keep_the_kernel_and_are_restored_by_themselves(calls):
    model = build("llama")
    warpsmith.accelerate(model)
    duplicate = copy.deepcopy(model)
    assert all(module.forward.__self__ is module for module in norms_of(duplicate))
    warpsmith.restore(model)
    duplicate.set_use_kernels(True)
    calls.count = 0
    torch.testing.assert_close(run("llama", duplicate), run("llama", model), rtol=1e-4, atol=1e-5)
    assert calls.count == FAMILIES["llama"].calls
    warpsmith.restore(duplicate)
    assert not norms_of(duplicate)


def test_restore_of_an_untouched_model():
    model = build("llama")
    attributes = [dict(vars(module)) for module in model.modules()]
    warpsmith.restore(model)
    assert [vars(module) for module in model.modules()] == attributes


def test_restore_under_a_hook_of_accelerate():
    module = LlamaRMSNorm(16)
    warpsmith.accelerate(module)
    with_hook_of_accelerate(module)
    assert layers_of(warpsmith.accelerate(module)) == {"LlamaRMSNorm": 1}
    warpsmith.restore(module)
    assert module._old_forward.__func__ is LlamaRMSNorm.forward


def test_restore_keeps_a_hook_that_came_later(monkeypatch):
    for name in acceleration.HOOK:
        monkeypatch.setattr(LlamaRMSNorm, name, hook_of(LlamaRMSNorm)[name])
    module = LlamaRMSNorm(16)
    warpsmith.accelerate(module)
    hf_kernels.replace_kernel_forward_from_hub(LlamaRMSNorm, "Mine", lambda module: False)
    warpsmith.restore(module)
    assert LlamaRMSNorm.kernel_layer_name == "Mine"
    warpsmith.accelerate(module)
    assert not LlamaRMSNorm.kernel_condition(LlamaRMSNorm(16))


@pytest.mark.parametrize("new_forward", [False, True])
@torch.no_grad()
def test_restore_under_a_hook_of_diffusers(new_forward, calls):
    class Hook(ModelHook):
        pass

    class ForwardHook(ModelHook):
        def new_forward(self, module, *arguments):
            return self.fn_ref.original_forward(*arguments)

    module = nn.RMSNorm(16)
    warpsmith.accelerate(module)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(ForwardHook() if new_forward else Hook(), "first")
    registry.register_hook(Hook(), "second")
    assert len(warpsmith.accelerate(module, strict=True)) == 1
    calls.count = 0
    module(torch.randn(2, 16))
    assert calls.count == 1
    for _ in range(2):
        warpsmith.restore(module)
    module(torch.randn(2, 16))
    assert calls.count == 1
    for name in ("second", "first"):
        registry.remove_hook(name)
    assert module.forward.__func__ is nn.RMSNorm.forward


@pytest.mark.parametrize(
    "wrap",
    [
        lambda forward: lambda x: forward(x),
        lambda forward: functools.wraps(forward)(functools.partial(forward)),
    ],
)
def test_restore_names_what_is_wrapped(wrap):
    model = nn.Sequential(*(nn.RMSNorm(16) for _ in range(3)))
    warpsmith.accelerate(model)
    forward = model[1].forward
    model[1].forward = wrap(forward)
    with pytest.raises(RuntimeError, match="still runs the kernel; undo that first: 1$"):
        warpsmith.restore(model)
    assert not norms_of(model)
    model[1].forward = forward
    warpsmith.restore(model)
    assert all("forward" not in vars(module) for module in model)


# --- arguments and the report --------------------------------------------------------------------


def test_pipeline(calls):
    """A T5 text encoder and a transformer; parts without models are passed over."""
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=build("t5"),
        tokenizer_2=None,
        transformer=build("flux"),
    )
    report = warpsmith.accelerate(pipeline)
    assert layers_of(report) == {"T5LayerNorm": 7, "TorchRMSNorm": 6}
    assert {finding.path.partition(".")[0] for finding in report.findings} == {
        "text_encoder_2",
        "transformer",
    }
    calls.count = 0
    run("flux", pipeline.transformer)
    assert calls.count == FAMILIES["flux"].calls
    warpsmith.restore(pipeline)
    assert not norms_of(pipeline.transformer) + norms_of(pipeline.text_encoder_2)


def test_model_in_two_components():
    model = nn.Sequential(LlamaRMSNorm(16))
    pipeline = SimpleNamespace(components={"a": model, "b": nn.Sequential(model)})
    (finding,) = warpsmith.accelerate(pipeline).findings
    assert finding.path == "a.0"


@pytest.mark.parametrize(
    "mode",
    [
        None,
        Mode.INFERENCE,
        Mode.TRAINING,
        Mode.TORCH_COMPILE,
        Mode.INFERENCE | Mode.TORCH_COMPILE,
        Mode.TRAINING | Mode.TORCH_COMPILE,
    ],
)
def test_modes(mode):
    assert len(warpsmith.accelerate(nn.Sequential(LlamaRMSNorm(16)), mode=mode)) == 1


def test_compiled_without_graph_breaks():
    model = build("gemma")
    eager = run("gemma", model)
    warpsmith.accelerate(model, mode=Mode.TORCH_COMPILE)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run("gemma", compiled), eager, rtol=1e-4, atol=1e-5)


def test_wrong_arguments():
    with pytest.raises(
        TypeError, match="model: must be a torch.nn.Module or a pipeline.* got list"
    ):
        warpsmith.accelerate([])
    with pytest.raises(TypeError, match="got type"):
        warpsmith.restore(nn.Module)
    for kernels in ("rmsnorm", 5, [["rmsnorm"]], [None]):
        with pytest.raises(
            TypeError, match=re.escape(f"must be a list of names or None, got {kernels!r}")
        ):
            warpsmith.accelerate(nn.Linear(2, 2), kernels=kernels)
    with pytest.raises(ValueError, match="kernels: .* among rmsnorm; 'rmsnom' is no kernel"):
        warpsmith.accelerate(nn.Linear(2, 2), kernels=["rmsnorm", "rmsnom"])
    with pytest.raises(ValueError, match="'img2gray' is a kernel without layers for models"):
        warpsmith.accelerate(nn.Linear(2, 2), kernels=["img2gray"])
    with pytest.raises(TypeError, match="mode: must be a kernels.Mode or None, got 'train'"):
        warpsmith.accelerate(nn.Linear(2, 2), mode="train")
    with pytest.raises(ValueError, match="mode: must be made of TRAINING"):
        warpsmith.accelerate(nn.Linear(2, 2), mode=Mode.FALLBACK)


def test_kernels_restricts():
    assert len(warpsmith.accelerate(LlamaRMSNorm(16), kernels=["rmsnorm"])) == 1
    assert not warpsmith.accelerate(LlamaRMSNorm(16), kernels=[]).findings


def test_strict_changes_nothing_when_it_raises():
    model = nn.Sequential(LlamaRMSNorm(16), LlamaRMSNorm(16).double())
    with pytest.raises(
        RuntimeError, match="accelerate\\(strict=True\\) changed nothing.*\n.*\n.*1"
    ):
        warpsmith.accelerate(model, strict=True)
    assert not norms_of(model)
    with pytest.raises(RuntimeError, match="swapped: 0 modules"):
        warpsmith.accelerate(nn.Linear(2, 2), strict=True)


def test_report():
    model = nn.ModuleDict({"a": LlamaRMSNorm(16), "b": LlamaRMSNorm(8), "c": Subclass(16)})
    report = warpsmith.accelerate(model)
    name = f"{LlamaRMSNorm.__module__}.LlamaRMSNorm"
    assert str(report).splitlines() == [
        "swapped: 2 modules",
        f"  2 x {name} -> rmsnorm LlamaRMSNorm (first: a)",
        "left alone: 1 module",
        f"  1 x {__name__}.Subclass: is a subclass of LlamaRMSNorm with another forward (first: c)",
    ]
    assert report and len(report) == 2 and not warpsmith.accelerate(nn.Linear(2, 2))
    first = report.swapped[0]
    assert (first.path, first.kernel, first.layer) == ("a", "rmsnorm", "LlamaRMSNorm")
    assert first.original == name and first.reason is None
