"""What `kernels benchmark` runs: uint8 photographs and fp32 batches against the composed torch formula."""

import torch
from kernels.benchmark import Benchmark


class Img2GrayBenchmark(Benchmark):
    seed: int = 0

    def _frames(self, count, height, width):
        shape = (count, height, width, 3)
        self.image = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        self.out = torch.empty((count, height, width, 1), dtype=torch.uint8, device=self.device)

    def _convert(self):
        self.kernel.img2gray(self.image, layout="HWC", weights="pil", out=self.out)

    def _pillow_formula(self):
        red, green, blue = self.image.int().unbind(-1)
        return (
            ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16)
            .unsqueeze(-1)
            .to(torch.uint8)
        )

    def setup_uint8_1080p(self):
        self._frames(1, 1080, 1920)

    def benchmark_uint8_1080p(self):
        self._convert()

    def verify_uint8_1080p(self) -> torch.Tensor:
        return self._pillow_formula()

    def setup_uint8_4k(self):
        self._frames(1, 2160, 3840)

    def benchmark_uint8_4k(self):
        self._convert()

    def verify_uint8_4k(self) -> torch.Tensor:
        return self._pillow_formula()

    def setup_fp32_batch(self):
        self.image = torch.rand(32, 3, 224, 224, device=self.device)
        self.out = torch.empty(32, 1, 224, 224, device=self.device)

    def benchmark_fp32_batch(self):
        self.kernel.img2gray(self.image, out=self.out)

    def verify_fp32_batch(self) -> torch.Tensor:
        weights = torch.tensor([0.2989, 0.587, 0.114], device=self.device)
        return (self.image * weights[:, None, None]).sum(1, keepdim=True)
