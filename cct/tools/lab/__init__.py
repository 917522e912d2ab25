"""The laboratory of credit: how much of what exact credit gains over GRPO another estimator takes."""
