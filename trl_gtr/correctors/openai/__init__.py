"""A corrector for any OpenAI-compatible server, with a budget, retries and tools."""
