"""What a run leaves behind and starts from: checkpoints, logs, metrics, diagnostics, callbacks."""
