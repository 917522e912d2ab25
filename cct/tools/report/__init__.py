"""`cct report`: one self-contained HTML page about a run or a study, and the same numbers as a Markdown table.

It reads files only: metrics.jsonl, samples.jsonl, recipe.yaml, and where they are there tokens.json (`cct replay --save`) and
fidelity.json (`cct fidelity`); of a study its results.json and the runs in its cells.
"""
