"""What `kernels benchmark` runs: the norm of Llama, torch's, and a residual added before."""

import torch
from kernels.benchmark import Benchmark

EPS = 1e-5


class RMSNormBenchmark(Benchmark):
    seed: int = 0

    def _bfloat16(self, rows, hidden):
        # Sums of small integers are exact: equal bits, whatever the order they are summed in.
        shape = (2, rows, hidden)
        numbers = torch.randint(-8, 9, shape, device=self.device)
        self.x, self.residual = numbers.to(torch.bfloat16)
        self.weight = (1 + 0.1 * torch.randn(hidden, device=self.device)).to(torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def _llama_formula(self, x):
        n = x.float()
        n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * n.to(x.dtype)

    def setup_bf16_llama(self):
        self._bfloat16(4096, 4096)

    def benchmark_bf16_llama(self):
        self.kernel.rms_norm(self.x, self.weight, EPS, rounding="input_dtype", out=self.out)

    def verify_bf16_llama(self) -> torch.Tensor:
        return self._llama_formula(self.x)

    def setup_bf16_residual_add(self):
        self._bfloat16(4096, 4096)

    def benchmark_bf16_residual_add(self):
        self.out, _ = self.kernel.fused_add_rms_norm(
            self.x, self.residual, self.weight, EPS, rounding="input_dtype"
        )

    def verify_bf16_residual_add(self) -> torch.Tensor:
        return self._llama_formula(self.x + self.residual)

    def setup_fp32(self):
        self.x = torch.randn(4096, 2048, device=self.device)
        self.weight = 1 + 0.1 * torch.randn(2048, device=self.device)
        self.out = torch.empty_like(self.x)

    def benchmark_fp32(self):
        self.kernel.rms_norm(self.x, self.weight, EPS, out=self.out)

    def verify_fp32(self) -> torch.Tensor:
        return torch.nn.functional.rms_norm(self.x, (2048,), self.weight, EPS)
