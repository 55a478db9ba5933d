"""Implementation of `trl-gtr …` and the examples: arguments, training, evaluation."""
