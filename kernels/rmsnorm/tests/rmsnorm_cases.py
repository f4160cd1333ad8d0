"""What the tests share: data, the formula as the judge, and how far a result may be from it."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.product(DTYPES, repeat=2))  # of x, weight
ROUNDINGS = ["once", "input_dtype", "weight_dtype"]
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
LOWEST_EXPONENT = {torch.float32: -149, torch.float16: -24, torch.bfloat16: -133}


def name(value):
    """Of a parameter, where pytest's own is no help."""
    if isinstance(value, torch.dtype):
        return SHORT[value]
    if isinstance(value, tuple):
        return "x".join(map(str, value)) if value else "scalar"
    return None


def pair_name(pair):
    return "-".join(map(name, pair))


def normals(shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def weights(hidden, dtype=torch.float32, seed=1):
    """Around 1, of both signs."""
    return (1 + 0.5 * normals((hidden,), seed=seed)).to(dtype)


def integers(shape, dtype=torch.float32, seed=0):
    """Whose squares have exact sums in float32 in any order, up to 2^18 of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def as_integers(tensor):
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(bits)


def same_bytes(a, b):
    """Equal in every bit, NaN payloads and signs of zero included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_integers(a), as_integers(b))


def strided_copy(tensor, device):
    """A copy with the same strides."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    whole = tensor.as_strided((span,), (1,)).clone().to(device)
    return whole.as_strided(tensor.shape, tensor.stride())


def result_dtype(x_dtype, weight_dtype, rounding):
    if weight_dtype is None or rounding == "once":
        return x_dtype
    return (
        weight_dtype if rounding == "weight_dtype" else torch.promote_types(x_dtype, weight_dtype)
    )


def spacing(values, dtype):
    """Distance of neighbours in dtype at each magnitude, in float64."""
    exponent = (values.double().abs().view(torch.int64) >> 52) - 1023
    exponent = (exponent - (DIGITS[dtype] - 1)).clamp(min=LOWEST_EXPONENT[dtype])
    return ((exponent + 1023) << 52).view(torch.float64)


# Of the root, relative: a float32 sum, and a reciprocal root that is within two steps on GPUs.
ROOT_ERROR = 4 * 2.0**-24


@dataclass
class Formula:
    """The formula on the CPU with the roundings of the mode, the root taken from float64 sums.

    `slack` is how far another right result may be: the error of the root goes through, each float32
    operation may round to the other side, and a value rounded to a half type may become its
    neighbour. `stated` is the same, but at most four steps where all is float32.
    """

    x: torch.Tensor
    weight: torch.Tensor | None = None
    eps: float = 1e-6
    bias: torch.Tensor | None = None
    weight_offset: float = 0.0
    rounding: str = "once"
    rstd: torch.Tensor | None = None  # of the kernel, to follow it bit for bit
    y: torch.Tensor = field(init=False)
    slack: torch.Tensor = field(init=False)
    stated: torch.Tensor = field(init=False)

    def __post_init__(self):
        x = self.x.detach().cpu().float()
        rstd = exact_rstd(x, self.eps).float() if self.rstd is None else self.rstd.cpu()[..., None]
        n = x * rstd
        slack = ROOT_ERROR * n.double().abs() + spacing(n, torch.float32)
        weight_dtype = self.weight.dtype if self.weight is not None else None
        dtype = result_dtype(self.x.dtype, weight_dtype, self.rounding)
        first = {"once": torch.float32, "input_dtype": self.x.dtype, "weight_dtype": weight_dtype}
        first = first[self.rounding]
        if self.weight is None:
            total = product = n
        else:
            w = self.weight.detach().cpu().float() + self.weight_offset
            if first != torch.float32:
                slack = spacing(n, first)
            product = n.to(first).float() * w
            slack = slack * w.double().abs()
            if torch.float32 in (first, dtype):
                slack = slack + spacing(product, torch.float32)
            total = product
            if self.rounding != "once":
                total, slack = rounded(total, slack, dtype)
            if self.bias is not None:
                total = total.float() + self.bias.detach().cpu().float()
                slack = slack + spacing(total, torch.float32)
        self.y, self.slack = rounded(total, slack, dtype)
        self.is_all_float32 = dtype == torch.float32 and first in (None, torch.float32)
        largest = torch.maximum(product.abs(), total.float().abs())
        four = 4 * spacing(largest, torch.float32)
        self.stated = torch.minimum(self.slack, four) if self.is_all_float32 else self.slack

    def check(self, y):
        """Results in half types, or that went through one, are equal to 99.9 %."""
        assert_within(y, self.y, self.slack, None if self.is_all_float32 else 0.999)


def exact_rstd(x, eps):
    """In float64, of the float32 sum that the formula has."""
    mean = x.double().square().mean(-1, keepdim=True).float()
    return 1 / torch.sqrt((mean + torch.tensor(eps, dtype=torch.float32)).double())


def rounded(value, slack, dtype):
    """To dtype, and how far apart two roundings of values within that slack may be."""
    if value.dtype == dtype or dtype == torch.float32:
        return value.to(dtype), slack
    step = spacing(value, dtype)
    return value.to(dtype), torch.ceil(slack / step) * step


def assert_within(result, expected, slack, equal_share=None):
    assert result.dtype == expected.dtype and result.shape == expected.shape
    result, expected = result.detach().cpu(), expected.detach().cpu()
    same = (result == expected) | (result.isnan() & expected.isnan())
    if equal_share is not None:
        # Three are always allowed: a share of few elements says nothing.
        assert (~same).sum() <= max(3, (1 - equal_share) * result.numel()), "too many differ"
    difference = (result.double() - expected.double()).abs()
    far = ~same & ~(difference <= slack)
    assert not far.any(), (
        f"{int(far.sum())} of {result.numel()} too far, the first {result[far][0].item()!r} for "
        f"{expected[far][0].item()!r} with {slack.expand_as(far)[far][0].item():.3g} allowed"
    )


def in_float64(x, weight=None, eps=1e-6, bias=None, weight_offset=0.0):
    """Without any rounding, differentiable."""
    x = x.double()
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return n
    y = n * (weight.double() + weight_offset)
    return y if bias is None else y + bias.double()


@dataclass(frozen=True)
class Replaced:
    """A class of another library, the layer that replaces it, and the op's keywords for it."""

    id: str
    module: str
    cls: str
    layer: str
    options: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)
    has_weight: bool = True

    def make(self, hidden, weight_dtype, eps=1e-6, seed=1, device="cpu"):
        """With random parameters, around what the class starts with."""
        module = pytest.importorskip(self.module)
        shape = () if self.cls == "Llama4TextL2Norm" else (hidden,)
        instance = getattr(module, self.cls)(*shape, eps=eps, **self.arguments)
        for index, (_, parameter) in enumerate(sorted(instance.named_parameters(), reverse=True)):
            with torch.no_grad():
                parameter += 0.5 * normals(parameter.shape, seed=seed + index)
        return instance.to(device, weight_dtype)

    def keywords(self, module):
        """What the op and the formula take for such a module."""
        weight = getattr(module, "gamma" if self.cls == "StableAudio3RMSNorm" else "weight", None)
        if self.cls in ("Krea2RMSNorm", "MuseSparkTextCenteredRMSNorm"):  # round the sum
            weight = weight + 1.0
        return dict(
            weight=weight,
            bias=getattr(module, "bias", None),
            eps=module.eps if hasattr(module, "eps") else module.variance_epsilon,
            **self.options,
        )


TRANSFORMERS = "transformers.models.{0}.modeling_{0}".format
DIFFUSERS = "diffusers.models.normalization"
DIFFUSERS_MODEL = "diffusers.models.transformers.transformer_{0}".format
INPUT, WEIGHT, OFFSET = (
    dict(rounding="input_dtype"),
    dict(rounding="weight_dtype"),
    dict(weight_offset=1.0),
)
REPLACED = [
    Replaced("llama", TRANSFORMERS("llama"), "LlamaRMSNorm", "LlamaRMSNorm", INPUT),
    Replaced("gpt_oss", TRANSFORMERS("gpt_oss"), "GptOssRMSNorm", "GptOssRMSNorm"),
    Replaced("moshi", TRANSFORMERS("moshi"), "MoshiRMSNorm", "MoshiRMSNorm"),
    Replaced("gemma3", TRANSFORMERS("gemma3"), "Gemma3RMSNorm", "GemmaRMSNorm", OFFSET),
    Replaced(
        "muse_spark",
        TRANSFORMERS("muse_spark"),
        "MuseSparkTextCenteredRMSNorm",
        "MuseSparkTextCenteredRMSNorm",
    ),
    Replaced("gemma3n", TRANSFORMERS("gemma3n"), "Gemma3nRMSNorm", "Gemma3nRMSNorm"),
    Replaced(
        "gemma3n_no_scale",
        TRANSFORMERS("gemma3n"),
        "Gemma3nRMSNorm",
        "Gemma3nRMSNorm",
        arguments=dict(with_scale=False),
        has_weight=False,
    ),
    Replaced("qwen3_5", TRANSFORMERS("qwen3_5"), "Qwen3_5RMSNorm", "Qwen3_5RMSNorm", OFFSET),
    Replaced("llama4", TRANSFORMERS("llama4"), "Llama4TextRMSNorm", "Llama4TextRMSNorm", INPUT),
    Replaced(
        "llama4_l2",
        TRANSFORMERS("llama4"),
        "Llama4TextL2Norm",
        "Llama4TextL2Norm",
        has_weight=False,
    ),
    Replaced("t5", TRANSFORMERS("t5"), "T5LayerNorm", "T5LayerNorm", WEIGHT),
    Replaced("torch", "torch.nn", "RMSNorm", "TorchRMSNorm"),
    Replaced(
        "torch_no_weight",
        "torch.nn",
        "RMSNorm",
        "TorchRMSNorm",
        arguments=dict(elementwise_affine=False),
        has_weight=False,
    ),
    Replaced("diffusers", DIFFUSERS, "RMSNorm", "DiffusersRMSNorm", WEIGHT),
    Replaced("diffusers_bias", DIFFUSERS, "RMSNorm", "DiffusersRMSNorm", WEIGHT, dict(bias=True)),
    Replaced(
        "diffusers_no_weight",
        DIFFUSERS,
        "RMSNorm",
        "DiffusersRMSNorm",
        WEIGHT,
        dict(elementwise_affine=False),
        has_weight=False,
    ),
    Replaced("mochi", DIFFUSERS, "MochiRMSNorm", "MochiRMSNorm"),
    Replaced(
        "mochi_no_weight",
        DIFFUSERS,
        "MochiRMSNorm",
        "MochiRMSNorm",
        arguments=dict(elementwise_affine=False),
        has_weight=False,
    ),
    Replaced("krea2", DIFFUSERS_MODEL("krea2"), "Krea2RMSNorm", "Krea2RMSNorm"),
    Replaced(
        "qwenimage21",
        DIFFUSERS_MODEL("qwenimage21"),
        "QwenImage21ZeroCenterRMSNorm",
        "QwenImage21ZeroCenterRMSNorm",
        OFFSET,
    ),
    Replaced(
        "stable_audio3",
        DIFFUSERS_MODEL("stable_audio3"),
        "StableAudio3RMSNorm",
        "StableAudio3RMSNorm",
    ),
]


def replaced_with_dtypes():
    """Every class with every pair of dtypes of x and weight."""
    return [
        pytest.param(
            replaced,
            x_dtype,
            weight_dtype,
            id=f"{replaced.id}-{name(x_dtype)}-{name(weight_dtype)}",
        )
        for replaced in REPLACED
        for x_dtype in DTYPES
        for weight_dtype in (DTYPES if replaced.has_weight else [x_dtype])
    ]
