"""RMSNorm with the rounding of each transformers and diffusers class, forward and backward."""

from . import layers
from .op import fused_add_rms_norm, fused_add_rms_norm_, last_path, rms_norm
from .reference import fused_add_rms_norm_reference, rms_norm_reference

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_reference",
    "last_path",
    "layers",
    "rms_norm",
    "rms_norm_reference",
]
