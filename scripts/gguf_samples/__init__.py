"""Parts of scripts/make_gguf_samples."""
