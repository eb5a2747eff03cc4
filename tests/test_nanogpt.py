"""Against nanoGPT itself, where NANOGPT names a clone of it: weights, text and checkpoints cross in both directions."""

import os

import bench
import pytest
import torch

from hotloop.checkpoint import load_checkpoint, save_checkpoint
from hotloop.generate import generate
from model import GPT, GPTConfig

CLONE = os.environ.get('NANOGPT', '')
pytestmark = pytest.mark.skipif(not (CLONE and os.path.exists(os.path.join(CLONE, 'model.py'))),
                                reason='NANOGPT does not name a clone of karpathy/nanoGPT')
SHAPE = dict(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32, dropout=0.0)


@pytest.fixture(scope='module')
def nanogpt():
    return bench.nanogpt(CLONE)


@pytest.fixture(params=[False, True], ids=['without biases', 'with biases'])
def theirs(request, nanogpt):
    torch.manual_seed(0)
    model = nanogpt.GPT(nanogpt.GPTConfig(**SHAPE, bias=request.param)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


@pytest.fixture
def their_file(theirs, tmp_path):
    """A checkpoint as nanoGPT's train.py writes it."""
    optimizer = theirs.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    theirs.train()(*[torch.zeros(1, 4, dtype=torch.long)] * 2)[1].backward()
    optimizer.step()
    theirs.eval()
    args = SHAPE | {'bias': theirs.config.bias}
    torch.save({'model': theirs.state_dict(), 'optimizer': optimizer.state_dict(), 'model_args': args, 'iter_num': 1,
                'best_val_loss': torch.tensor(3.0), 'config': {'dataset': 'shakespeare_char'}}, tmp_path / 'ckpt.pt')
    return str(tmp_path / 'ckpt.pt')


def test_their_checkpoint_computes_and_writes_the_same(theirs, their_file):
    """Logits to 1e-5; greedy text token for token, as far as the context reaches: there it slides in larger steps."""
    checkpoint = load_checkpoint(their_file)
    ours = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model']).eval()
    idx = torch.randint(65, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = theirs(idx)[0][:, -1]
    assert (ours(idx) - expected).abs().max() < 1e-5 * expected.abs().max()
    text = theirs.generate(idx[:, :3], 14, top_k=1)[:, 3:]
    assert [[told[row][1] for told in generate(ours, idx[:, :3].tolist(), 14, temperature=0)] for row in (0, 1)] == \
        text.tolist()


def test_losses_are_the_same(theirs, their_file):
    checkpoint = load_checkpoint(their_file)
    ours = GPT.from_checkpoint(checkpoint['model_args'], checkpoint['model']).eval()
    x, y = torch.randint(65, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    assert ours(x, y).sum().item() / y.numel() == pytest.approx(theirs(x, y)[1].item(), rel=1e-6)


@pytest.mark.parametrize('bias', [False, True])
def test_they_read_our_checkpoint(nanogpt, tmp_path, bias):
    ours = GPT(GPTConfig(**SHAPE, bias=bias)).eval()
    save_checkpoint(str(tmp_path / 'ckpt.pt'), {'model': ours.state_dict(), 'model_args': ours.config.model_args()})
    checkpoint = torch.load(tmp_path / 'ckpt.pt')
    theirs = nanogpt.GPT(nanogpt.GPTConfig(**checkpoint['model_args'])).eval()
    theirs.load_state_dict(checkpoint['model'])
    idx = torch.arange(16)[None]
    assert (ours(idx) - theirs(idx)[0][:, -1]).abs().max() < 1e-5


def test_weights_start_as_theirs_do(nanogpt):
    """The same standard deviation for every kind of matrix."""
    shape = SHAPE | dict(n_embd=128, vocab_size=512, block_size=64)
    theirs, ours = nanogpt.GPT(nanogpt.GPTConfig(**shape, bias=True)), GPT(GPTConfig(**shape, bias=True))
    own = ours.state_dict()
    assert own.keys() == theirs.state_dict().keys()
    for name, p in theirs.state_dict().items():
        assert own[name].std().item() == pytest.approx(p.std().item(), rel=0.05), name
        assert own[name].mean().item() == pytest.approx(p.mean().item(), abs=1e-3), name
