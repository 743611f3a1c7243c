"""GGUF, llama.cpp's form: a model in one file, told by metadata instead of a config.json."""
