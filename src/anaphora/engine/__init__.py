"""From token ids to token ids: sequences, scheduling, sampling, the step loop."""
