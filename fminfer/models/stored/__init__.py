"""Where the tensors of a checkpoint's files lie: names, types, shapes, bytes. It needs no torch."""
