"""Imported by the processes that fork for the documents' commands: trainings there draw no curves and await no disk.

Curves are drawn, and looked at, in tests/training/test_report.py.
"""

import os

from regard.training import reporter

reporter.draw_curves = lambda *args: None
os.fsync = lambda descriptor: None
