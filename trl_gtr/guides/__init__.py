"""Teaching thoughts: labels from corrections, the DAgger buffer, data for supervised fine-tuning."""
