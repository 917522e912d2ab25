"""How good the credit itself is: what transports give, against the true advantage found by branching."""
