"""The exercises of the course: functions to complete, checked against the library itself.

Each exercise is data (`exercises/chapter3.toml`: the task, hints, a solution, typical mistakes with their messages) and
an oracle (`oracles.py`: inputs, and the right answers computed by the library's own functions).
"""

from .checking import Verdict, check

__all__ = ["Verdict", "check"]
