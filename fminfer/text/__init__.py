"""Text and token ids: tokenizers, detokenizing, how tokens are spelled."""
