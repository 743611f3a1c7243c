"""A run over lines: it reads ahead, orders lines and joins equal requests."""
