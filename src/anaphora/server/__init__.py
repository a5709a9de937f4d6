"""The HTTP server: OpenAI's API over anything that satisfies ``ServedLLM``."""
