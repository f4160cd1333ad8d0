"""warpsmith.accelerate, on small models of every family that it has rows for."""

import copy
import gc
import inspect
import re
from collections import Counter
from fnmatch import fnmatchcase
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

from diffusers.models.normalization import MochiRMSNorm, RMSNorm  # noqa: E402
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
    # round 1 + weight to the weight's dtype; scale before the norm
    "MuseSparkTextCenteredRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
    # no layer has their names of attributes and arguments
    "KyutaiSpeechToTextRMSNorm",
    "MoshiRMSNorm",
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
            if not any(fnmatchcase(name, row) for rows in swaps.SWAPS for row in rows.classes):
                continue
            if match[1] == "AXK2GatedRMSNorm":  # takes a configuration
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
        "Llama4TextRMSNorm",
        "Llama4TextL2Norm",
        "T5LayerNorm",
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
        (lambda: Subclass(16), "subclass of LlamaRMSNorm"),
        (lambda: OtherFormula(16), "formula is none of rmsnorm's"),
        (lambda: without_weight(LlamaRMSNorm(16)), "formula is none of rmsnorm's"),
        (lambda: LlamaRMSNorm((4, 16)), "formula is none of rmsnorm's"),
        (lambda: T5LayerNorm((4, 16)), "formula is none of rmsnorm's"),
        (lambda: LlamaRMSNorm(16).double(), "dtype is torch.float64"),
        (lambda: GemmaRMSNorm(16).to("meta"), "device meta"),
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
    assert finding.path == "1" and "float64" in finding.reason


def test_gated_norms_and_layer_norms_are_not_asked_for():
    model = build("qwen3_5")
    kept = [m for m in model.modules() if type(m).__name__ == "Qwen3_5RMSNormGated"]
    report = warpsmith.accelerate(model)
    assert kept and all("forward" not in vars(m) for m in kept)
    assert not {f.original.rpartition(".")[2] for f in report.findings} & {"Qwen3_5RMSNormGated"}
    assert not warpsmith.accelerate(nn.LayerNorm(16)).findings


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
    assert [hook_of(cls) for cls in classes] == before


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
    gc.collect()  # of models of other tests
    for training in (True, False):
        model.train(training)
        calls.count = 0
        run("llama", model)
        assert calls.count == FAMILIES["llama"].calls
    torch.testing.assert_close(run("llama", model), run("llama", plain), rtol=1e-4, atol=1e-5)
    condition = LlamaRMSNorm.kernel_condition
    warpsmith.restore(model)
    assert LlamaRMSNorm.kernel_condition is not condition
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
    monkeypatch.setenv("DISABLE_KERNEL_MAPPING", "1")
    assert "DISABLE_KERNEL_MAPPING" in reason(LlamaRMSNorm(16))


def test_random_numbers_stay_the_same():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    warpsmith.accelerate(LlamaRMSNorm(16))
    assert torch.equal(torch.rand(4), wanted)


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
    with pytest.raises(ValueError, match="kernels: must be a list of names among .*rmsnorm"):
        warpsmith.accelerate(nn.Linear(2, 2), kernels=["rmsnom"])
    with pytest.raises(ValueError, match="got 'rmsnorm'"):
        warpsmith.accelerate(nn.Linear(2, 2), kernels="rmsnorm")
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
        "left alone: 1 modules",
        f"  1 x {__name__}.Subclass: is a subclass of LlamaRMSNorm (first: c)",
    ]
    assert report and len(report) == 2 and not warpsmith.accelerate(nn.Linear(2, 2))
    first = report.swapped[0]
    assert (first.path, first.kernel, first.layer) == ("a", "rmsnorm", "LlamaRMSNorm")
    assert first.original == name and first.reason is None
