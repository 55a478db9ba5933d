"""Multiple processes, signals, and the bridge to TRL's PPO trainer."""
