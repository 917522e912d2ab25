"""`cct run --profile`: where the time goes."""

import gzip
import io
import json
import re

import pytest
import torch
from held import Held
from rich.console import Console
from test_training import tiny

from cct.agent.building import build
from cct.run_folder import RunFolder
from cct.tools.profile import Profile, measured_peak, update_flops
from cct.training.run import train


def test_the_profile_names_each_stage_and_writes_a_trace(tmp_path):
    output, recipe = io.StringIO(), tiny("compo", "training.iterations=3")
    folder = RunFolder.new(tmp_path, "profiled").path
    console = Console(file=output, width=120)
    train(recipe, folder, console=console, callbacks=[Profile(console)])
    text = output.getvalue()
    rows = {
        name: (float(seconds), float(share)) for name, seconds, share in re.findall(r"│ (\w+) +│ +([\d.]+) │ +([\d.]+)%", text)
    }
    assert rows.keys() == {"generate", "evidence", "behaviour", "transport", "update", "all"}
    assert rows["all"][0] == pytest.approx(sum(seconds for name, (seconds, _) in rows.items() if name != "all"), abs=5e-4)
    assert sum(share for name, (_, share) in rows.items() if name != "all") == pytest.approx(100, abs=0.4)
    assert "mean of 2 iterations" in text  # of three; the traced one does not count
    used = re.search(r"update: ([\d.,]+) GFLOP/s, ([\d.]+)% of the ([\d.,]+)", text)
    assert used and float(used[1].replace(",", "")) / float(used[3].replace(",", "")) == pytest.approx(
        float(used[2]) / 100, abs=0.02
    )
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"stage: generate", "stage: behaviour", "stage: update", "aten::mm"} <= names


def test_flops_of_an_update_are_the_products_of_forward_and_backward():
    recipe = tiny("grpo", "training.minibatch_size=16", "training.share_prefix=false")
    agent, tokenizer, reference = build(recipe)
    iteration = Held(recipe, agent, tokenizer, reference).collect(1)
    (batch,) = iteration.updates
    (rows, length), width = batch.input_ids.shape, batch.mask.shape[1]
    config = agent.actor.config
    layers = sum(m.weight.numel() for m in agent.actor.model.layers.modules() if isinstance(m, torch.nn.Linear))
    attention = config.num_hidden_layers * config.num_attention_heads * 2 * length**2 * config.head_dim
    forward = 2 * rows * (length * layers + width * config.hidden_size * config.vocab_size + attention)
    assert update_flops(agent, [iteration.updates]) == 3 * forward


def test_the_peak_is_a_rate():
    assert 1e8 < measured_peak(torch.device("cpu"), torch.float32, seconds=0.1) < 1e15
