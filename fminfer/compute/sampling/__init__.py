"""From hidden states to tokens and logprobs: logits, draws, scores."""
