"""What GPUs can do at most: dense bfloat16 multiplications with sums in float32, by data sheet
(float16 where a GPU has no bfloat16). `diagnose` needs it without loading torch.
"""

from __future__ import annotations

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Part of a device's name -> operations per second; the first that fits."""


def peak_of(device_name: str) -> float | None:
    """Of one GPU, by the name that its driver gives; None: a guess would make all of it a guess."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)
