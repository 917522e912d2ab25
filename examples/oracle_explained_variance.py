"""How much of the return's variance the best possible critic explains on chain arithmetic.

A policy that answers like the noisy expert is simulated. The critic knows the problem, the position and
whether the running value is still right; with `+` and `-` an error is never undone. Run:

    python examples/oracle_explained_variance.py [STEPS] [NOISE]
"""

import random
import sys

import numpy as np

from cct.task.chain_arithmetic import ChainArithmetic


def oracle(task: ChainArithmetic, responses: int = 20_000) -> tuple[float, float]:
    """Success rate, and 1 - Var(return - V) / Var(return) over all tokens of the responses."""
    rng, returns, values = random.Random(0), [], []
    for prompt in task.prompts(0, 0, responses):
        noisy = [int(operand) in task.noisy_operands for operand in prompt.text[2:-1:2]]
        right, outcome_values = True, []
        for step, is_noisy in enumerate(noisy):
            value = lambda first: (1 - task.noise) ** sum(noisy[first:]) if right else 0.0  # noqa: B023, E731
            outcome_values += [value(step)] * (5 if step == 0 else 6)  # ";", "a", "+", "b", "=", and the result itself
            right = right and not (is_noisy and rng.random() < task.noise)
        outcome_values += [float(right)] * 3  # "#", the answer, the end
        values += outcome_values
        returns += [float(right)] * len(outcome_values)
    g, v = np.array(returns), np.array(values)
    return float(g.mean()), float(1 - np.var(g - v) / np.var(g))


if __name__ == "__main__":
    steps, noise = int(sys.argv[1]) if len(sys.argv) > 1 else 6, float(sys.argv[2]) if len(sys.argv) > 2 else 0.7
    success, explained = oracle(ChainArithmetic(steps=steps, noise=noise))
    print(f"steps {steps}, noise {noise}: success {success:.3f}, oracle explained variance {explained:.3f}")
