"""`regard demo`: one command trains a translator here, evaluates it, looks into it, exports it and shows it."""
