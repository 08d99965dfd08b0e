"""From logits to weights: tasks, the loss, the recipe, one straight loop, checkpoints that are never half written."""
