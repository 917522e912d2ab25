"""How good credit is: advantages of transports against the true advantage, measured by branching."""
