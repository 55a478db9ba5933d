"""Playing: the collector, vector environments in this process and in workers, pending corrections."""
