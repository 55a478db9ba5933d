"""A corrector behind any OpenAI-compatible server, with a budget, retries and tools."""
