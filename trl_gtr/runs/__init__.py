"""Run state and output: checkpoints, logs, metrics, diagnostics, callbacks."""
