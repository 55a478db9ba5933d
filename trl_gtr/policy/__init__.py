"""The model: loading, prompt encoding, thought and action spans, response scoring."""
