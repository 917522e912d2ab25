"""`python -m benchmarks`: what `cct` costs, beside its peers on the same machine."""
