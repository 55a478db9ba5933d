"""ALFWorld: household tasks, in words and pictures."""
