"""Imported by the process that forks for sweeps: their runs leave out the picture of their curves."""

from regard.training import reporter

reporter.draw_curves = lambda *args: None
