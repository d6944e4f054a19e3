"""How long a training loop waits for its data: in anyone's own loop, for two clock reads a step.

meter.py      StallMeter: stands between a loop and its batches
waits.py      what is kept of any number of waits: percentiles, the slowest, a series for plots
device.py     on CUDA: how long the device had nothing to do between two steps
report.py     StallReport: the numbers, and what they mean in words
"""

from tokenmill.stalls.meter import StallMeter
from tokenmill.stalls.report import DeviceGap, StallReport

__all__ = ["DeviceGap", "StallMeter", "StallReport"]
