"""Loss and bits per byte of documents: the numbers, what a document is, the output."""

import gzip
import json
import math

import pytest
import torch
from conftest import error_of
from test_sample import CHARS, gpt

from hotloop.data.chat import render
from hotloop.data.encode import encode_parts
from hotloop.data.tokenizer import ByteTokenizer, CharTokenizer
from hotloop.inference.score import print_scores, read_documents, score_documents


@pytest.fixture
def scored(capsys):
    """scored(source, ...) returns the rows that --output=jsonl prints."""
    def run(source, model=None, tokenizer=None, template='none', batch_size=64, output='jsonl'):
        model = model or gpt(257, block_size=256)
        tokenizer = tokenizer or ByteTokenizer()
        documents = read_documents(str(source), tokenizer, template, 'data')
        print_scores(score_documents(model, tokenizer, documents, batch_size), str(source), output)
        captured = capsys.readouterr()
        run.err = captured.err
        lines = captured.out.splitlines()
        return lines if output == 'text' else [json.loads(line) for line in lines]
    return run


def summed_loss(model, ids, T):
    """Compute the reference: each token after the context of its window."""
    nats = 0.0
    for i in range(1, len(ids)):
        start = max(-(-(i - T) // (T // 2)), 0) * (T // 2)
        with torch.no_grad():
            nats -= model(torch.tensor([ids[start:i]]))[0].log_softmax(-1)[ids[i]].item()
    return nats


@pytest.mark.parametrize('eot', [False, True])
def test_scores_are_the_models_log_probabilities(scored, tmp_path, eot):
    """An end-of-text id predicts the first token; without one, the second token is the first target."""
    model, tokenizer = gpt(len(CHARS) + eot, block_size=8), CharTokenizer(CHARS, eot=eot)
    text = 'habcd efgh\nfed cab' * 3
    (tmp_path / 'a.txt').write_text(text)
    first, total = scored(tmp_path / 'a.txt', model, tokenizer)
    ids = [len(CHARS)] * eot + [CHARS.index(c) for c in text]
    targets = len(ids) - 1
    nats = summed_loss(model, ids, 8)
    assert first['tokens'] == first['bytes'] == targets
    assert first['loss'] == pytest.approx(nats / targets, rel=1e-5)
    assert first['bpb'] == pytest.approx(nats / math.log(2) / targets, rel=1e-5)
    assert first['perplexity'] == pytest.approx(math.exp(first['loss']))
    assert {**first, 'document': 'all', 'file': str(tmp_path / 'a.txt')} == total


def test_a_window_of_many_logits_is_scored_in_parts(scored, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_text('habcd efgh' * 60)
    model = gpt(257, block_size=256)
    sizes = []
    before = scored(tmp_path / 'a.txt', model)
    monkeypatch.setattr('hotloop.inference.score.MAX_LOGITS', 257 * 64)
    model.lm_head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel()))
    after = scored(tmp_path / 'a.txt', model)
    assert max(sizes) <= 257 * 64
    assert [row['loss'] for row in after] == pytest.approx([row['loss'] for row in before], rel=1e-5)


def test_documents_are_scored_apart_and_summed(scored, tmp_path):
    """They are separated by <|endoftext|>, or are files. The batch size changes nothing."""
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(b'one\n<|endoftext|>\ntwo two\n'))
    (tmp_path / 'b.txt').write_text('three\n')  # The line end of a single document counts.
    rows = scored(tmp_path)
    assert [(row['document'], row['tokens']) for row in rows] == [(1, 3), (2, 7), (3, 6), ('all', 16)]
    assert [row['file'] for row in rows] == ['a.txt.gz', 'a.txt.gz', 'b.txt', str(tmp_path)]
    assert rows[-1]['loss'] * 16 == pytest.approx(sum(row['loss'] * row['tokens'] for row in rows[:-1]))
    losses = [row['loss'] for row in scored(tmp_path, batch_size=1)]
    assert losses == pytest.approx([row['loss'] for row in rows], rel=1e-5)
    lines = scored(tmp_path, output='text')
    assert [line.split()[0] for line in lines] == ['document', '1', '2', '3', 'all']


@pytest.mark.parametrize('template, expected', [('alpaca', 'alpaca'), ('none', 'chatml')])
def test_rows_are_scored_in_the_template_of_the_models_data(scored, tmp_path, template, expected):
    """Without one, they are scored in the template that suits each. Only the answer counts."""
    row = {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'ho'}]}
    silent = {'messages': row['messages'][:1]}
    (tmp_path / 'a.jsonl').write_text(json.dumps(silent) + '\n' + json.dumps(row))
    model = gpt(257, block_size=256)
    first, _ = scored(tmp_path / 'a.jsonl', model, template=template)
    assert 'skipped 1 row' in scored.err and f'template: {expected}\n' in scored.err
    ids, mask = encode_parts(ByteTokenizer(), render([('user', 'hi'), ('assistant', 'ho')], expected))
    ids, mask = torch.from_numpy(ids).long()[None], torch.from_numpy(mask)[None]
    inputs = torch.cat([torch.tensor([[256]]), ids[:, :-1]], 1)
    with torch.no_grad():
        nats = model(inputs, ids.where(mask > 0, -1)).item()
    assert (first['document'], first['tokens']) == (2, mask.sum())
    assert first['loss'] == pytest.approx(nats / mask.sum().item(), rel=1e-4)


@pytest.mark.parametrize('name, content, words', [
    ('a.txt', b'ab\xffcd', 'a.txt'), ('empty.txt', b'', 'no tokens to score'),
    ('nan.txt', b'ab', 'a loss on nan.txt')])
def test_what_cannot_be_scored_is_refused(scored, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    model = gpt(257)
    if name == 'nan.txt':
        model.lm_head.weight.data[3, 4] = math.nan
    assert words in error_of(scored, tmp_path / name, model)
