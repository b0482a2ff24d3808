"""What quantizing an adapter cost, end to end: fixed prompts, answered and compared on this worker's engine."""
