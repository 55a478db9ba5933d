"""Estimates a run's memory, tokens, time and cost before it starts, without loading any weights."""
