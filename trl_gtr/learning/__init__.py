"""Learning from rollouts: scoring, advantages, losses and the update."""
