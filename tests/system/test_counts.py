"""Counts that stand for time on a GPU, taken without one: graphs of a compiled step."""

import pytest
import torch
from test_model import ids, make

WINDOWS = dict(window=100, window_pattern='SL', attn_softcap=5.0)


@pytest.mark.slow
@pytest.mark.parametrize('settings, masked', [
    (dict(mixer='CEKA'), True), ({}, False), (WINDOWS, True)], ids=str)
def test_a_step_is_one_graph_for_all_documents(monkeypatch, settings, masked):
    """With FlexAttention, as on a GPU: nothing breaks the graph, and new documents need no other."""
    monkeypatch.setattr('torch.nn.attention.flex_attention._validate_device', lambda *args: None)
    monkeypatch.setattr('model.FLEX_DEVICES', ('cpu',))
    model, graphs = make('modern', n_layer=4, n_head=2, block_size=256, **settings).train(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: [torch.zeros(2, requires_grad=True)]
    torch._dynamo.reset()
    forward = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    for length in (130, 90, 7):
        documents = (torch.arange(512).view(2, 256) // length) if masked else None
        forward(ids(2, 256), ids(2, 256), documents)
    assert len(graphs) == 1
