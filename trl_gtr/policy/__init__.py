"""The model: loading it, encoding its prompts, where thought and action lie, scoring its responses."""
