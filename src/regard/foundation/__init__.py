"""What every room stands on: safe files, JSON, device choice, name suggestions, checks, plotting style. Each once."""
