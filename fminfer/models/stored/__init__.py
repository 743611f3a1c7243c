"""Weight files in every form, read as tables of tensors."""
