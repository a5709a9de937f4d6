"""Text: tokens from it, it from tokens, and chat messages to token ids."""
