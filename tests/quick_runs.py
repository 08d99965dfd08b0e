"""For every process of the tests, and those that fork for it: what takes long and is not what is tested.

Trainings draw no curves, which take longer than a small run; tests/training/test_report.py draws them and looks. They
await no disk, which takes milliseconds for each of forty files; no test cuts the power.
"""

import os

from regard.training import reporter

reporter.draw_curves = lambda *args: None
os.fsync = lambda descriptor: None
