"""The HTTP server: OpenAI's endpoints on one engine."""
