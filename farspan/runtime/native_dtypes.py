"""PyTorch's types of the dtypes, and which of them a device computes in hardware."""

from __future__ import annotations

import torch

from farspan.domain.cluster import DType

#: What tensors have; tf32 is fp32 numbers, multiplied otherwise.
TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: NVIDIA's matrix units multiply bf16 from Ampere on (CUDA C++ Programming Guide, "Compute
#: Capabilities"); `torch.cuda.is_bf16_supported` is true also where it is emulated.
BF16_CAPABILITY = (8, 0)
#: AMD's do in CDNA 2 and 3 (MI200, MI300) at fp16's rate, and in RDNA 3 and 4 ("AMD matrix cores",
#: table of instructions).
BF16_GCN = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def has_native_bf16(device: torch.device) -> bool:
    """Return whether a GPU multiplies bf16 on its matrix units."""
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.startswith(BF16_GCN)
    return torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def hardware_dtypes(device: torch.device) -> tuple[DType, ...]:
    """Return the dtypes that a device computes in hardware."""
    if device.type == "mps":
        return ("fp32", "bf16", "fp16")
    if device.type == "cuda":
        return ("fp32", "bf16", "fp16") if has_native_bf16(device) else ("fp32", "fp16")
    # bf16 where the CPU multiplies it in hardware (AVX-512 BF16 or AMX).
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ("fp32", "bf16")
    return ("fp32",)
