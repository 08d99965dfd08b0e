"""Helpers for all packages: files, JSON, devices, checks of arguments, translation, progress and plotting."""
