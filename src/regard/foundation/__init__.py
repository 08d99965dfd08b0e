"""What every package stands on, each once: files, JSON, device choice, checks of arguments, plotting style."""
