"""Generation: the `Engine` interface and an engine that samples with transformers."""
