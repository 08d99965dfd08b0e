"""The first three minutes: one command trains a translator here, tests it, looks into it, ships it and shows it.

`regard demo` and `make demo` run it. Each stage leaves what it made behind, whole or not at all, so that a demo that
was stopped anywhere, also by kill -9, goes on where it stopped.
"""
