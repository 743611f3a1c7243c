"""fminfer inside other tools: lm-evaluation-harness and Ray Data."""
