"""Hugging Face directories to our models and back, as lists of invertible steps."""
