"""One run over files: from inputs to ordered answers, with progress and a summary."""
