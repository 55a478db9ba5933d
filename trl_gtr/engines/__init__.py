"""Who generates: the seam `Engine`, and the engine that samples with transformers."""
