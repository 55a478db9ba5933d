"""Generation: the `Engine` interface and engines that sample with transformers and with vLLM."""
