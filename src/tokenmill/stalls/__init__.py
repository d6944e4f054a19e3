"""Where the time of a loop's steps goes.

StallMeter        in a loop: how long it waits for each batch (meter.py)
StepWatch         around a loop, for a window of steps: everything it spends time on (watch.py)
python -m tokenmill.stalls train.py ...    the same for a program as it is (__main__.py)
"""

from __future__ import annotations

from tokenmill.stalls.account import StepAccount
from tokenmill.stalls.meter import DeviceGap, StallMeter, StallReport

__all__ = ["DeviceGap", "StallMeter", "StallReport", "StepAccount"]
