"""regard: build a Transformer, train it, see inside it while it runs at full speed, and ship it."""

__version__ = "0.1.0"
