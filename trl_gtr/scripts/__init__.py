"""What `trl-gtr …` and the examples call: arguments, training, evaluation."""
