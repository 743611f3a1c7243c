"""The HTTP server: OpenAI's endpoints on one engine, and a page to try them."""
