"""The agent's JSON response: its format, lenient parsing, and text that is safe to show."""
