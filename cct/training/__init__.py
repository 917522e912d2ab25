"""Training: rollouts in, updates out. One Lightning epoch is one iteration of reinforcement learning."""
