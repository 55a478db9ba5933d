"""From scored steps to gradients: losses, advantages and the update."""
