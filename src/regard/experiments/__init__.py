"""From configs to tables: what things cost, measured."""
