"""What a model, its weights and a step are made of; all arithmetic stands on it."""
