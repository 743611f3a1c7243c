"""An HTTP server on the engine: OpenAI's endpoints, a page to try them, and their documentation."""
