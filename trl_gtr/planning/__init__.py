"""What a run will need before it is started: sizes, memory, tokens, time and money, without a weight loaded."""
