"""prepare.py: what is held out, what stands in a dataset, what is refused."""

import hashlib
import json
import os
import shlex

import numpy as np
import pytest
from conftest import SHARED, contents
from test_documents import as_jsonl
from test_tokenizer_source import save

import prepare
from hotloop.data.dataset import read_meta
from hotloop.data.documents import holdout_hash
from hotloop.data.tokenizer import CharTokenizer, tokenizer_from

NOTES = {'0.txt': 'alpha\n' * 50, '1.txt': 'béta\r\n' * 60, '2.txt': 'γ' * 200, '4.txt': 'delta 😀\n' * 40,
         'sub/five.md': '# five\n'}
CHAT = [{'messages': [{'role': 'user', 'content': f'Which number is {i}? <|im_end|>'},
                      {'role': 'assistant', 'content': f'It is {i}.'}]} for i in range(40)]


@pytest.fixture
def notes(tmp_path):
    """Five documents in a folder, and an empty one."""
    folder = tmp_path / 'notes'
    (folder / 'sub').mkdir(parents=True)
    for name, text in {**NOTES, '3.txt': ''}.items():
        (folder / name).write_text(text, encoding='utf-8', newline='')
    return folder


@pytest.fixture
def make(tmp_path):
    """make(*sources, **settings) -> ({split: [text of a document]}, meta)."""
    def run(*sources, **settings):
        settings = {'name': 'x', 'data_dir': tmp_path / 'data', **settings}
        prepare.main([*map(str, sources), *(f'--{k}={v}' for k, v in settings.items())])
        folder = settings['data_dir'] / settings['name']
        meta = read_meta(str(folder))
        tokenizer = tokenizer_from(meta['tokenizer'])
        documents = {}
        for split in ('train', 'val'):
            ids = np.fromfile(folder / f'{split}.bin', dtype=meta['dtype'])
            assert meta['splits'][split]['tokens'] == len(ids)
            ends = [] if tokenizer.eot is None else np.flatnonzero(ids == tokenizer.eot) + 1
            parts = [part.tolist() for part in np.split(ids, ends) if len(part)]
            documents[split] = [tokenizer.decode(part).decode() for part in parts]
        return documents, meta
    return run


def small_pieces(monkeypatch, size):
    monkeypatch.setattr('hotloop.data.documents.PIECE', size)
    monkeypatch.setattr('hotloop.data.encode.PIECE', size)


def test_a_file_is_cut_at_a_character_and_the_bins_are_nanogpts(tmp_path, make, capsys, monkeypatch):
    """
    As nanoGPT's shakespeare_char/prepare.py: data[:int(n * 0.9)], uint16, little-endian, no header. Also
    if it is read in pieces.
    """
    small_pieces(monkeypatch, 100)
    text = 'Ünïcode, not bytes, is cut. €' * 37
    (tmp_path / 'book.txt').write_text(text, encoding='utf-8', newline='')
    _, meta = make(tmp_path / 'book.txt', tokenizer='char', name='book', seed=1)
    chars, n = sorted(set(text)), int(len(text) * 0.9)
    assert n != round(len(text) * 0.9), 'the cut must round down'
    for split, part in (('train', text[:n]), ('val', text[n:])):
        raw = np.array([chars.index(c) for c in part], dtype='<u2').tobytes()
        assert (tmp_path / 'data' / 'book' / f'{split}.bin').read_bytes() == raw
        assert meta['splits'][split] == {'tokens': len(part), 'bytes': len(part.encode()), 'documents': 1,
                                         'sha256': hashlib.sha256(raw).hexdigest()}
    assert meta == {'format': 1, 'dtype': 'uint16', 'vocab_size': len(chars), 'eot': None, 'foreign': False,
                    'tokenizer': CharTokenizer(''.join(chars)).spec(),
                    'source': str(tmp_path / 'book.txt'), 'splits': meta['splits'], 'template': None}
    assert os.listdir(tmp_path / 'data') == ['book']
    out = capsys.readouterr().out
    assert f'tokenizer: char, {len(chars)} ids; ' in out
    command = shlex.split(out.splitlines()[-1].split(': ')[1])
    assert command[:4] == ['python', 'train.py', 'config/quickstart.py', '--dataset=book']


@pytest.mark.parametrize('tokenizer', ['byte', 'char', 'bpe:300'])
def test_a_folder_is_a_document_a_file_and_each_ends_with_the_end_of_text(notes, make, tokenizer):
    documents, meta = make(notes, tokenizer=tokenizer, val=0.3)
    assert sorted(documents['train'] + documents['val']) == sorted(NOTES.values()) and documents['train']
    for split, texts in documents.items():
        assert meta['splits'][split]['documents'] == len(texts)
        assert meta['splits'][split]['bytes'] == sum(len(text.encode()) for text in texts)
    assert meta['splits']['val']['bytes'] >= 0.3 * sum(len(text.encode()) for text in NOTES.values())
    assert meta['eot'] == tokenizer_from(meta['tokenizer']).eot == meta['vocab_size'] - 1


def test_the_only_document_among_rows_is_cut_at_a_character(tmp_path, make):
    (tmp_path / 'a.jsonl').write_text('{"text": "0123456789"}\n{"text": ""}\n')
    assert make(tmp_path / 'a.jsonl')[0] == {'train': ['012345678'], 'val': ['9']}
    for row in ('{"prompt": "a", "completion": "b"}\n', '{"text": "equal"}\n{"text": "equal"}\n'):
        (tmp_path / 'a.jsonl').write_text(row)
        with pytest.raises(ValueError, match=r'no text for the val split with val=0\.1'):
            make(tmp_path / 'a.jsonl')


def test_the_same_input_gives_the_same_bytes_and_the_seed_splits(notes, make, tmp_path, monkeypatch):
    def made(name, **settings):
        make(notes, name=name, tokenizer='bpe:300', **settings)
        return contents(tmp_path / 'data' / name)
    small_pieces(monkeypatch, 50)
    assert made('a', num_proc=1) == made('b', num_proc=3)
    assert len({made('c', seed=seed)['val.bin'] for seed in range(9)}) > 1


def test_shakespeare_has_its_known_number_of_tokens(gpt2, tmp_path):
    """That of nanoGPT's data/shakespeare/readme.md."""
    source = os.path.join(SHARED, 'tinyshakespeare.txt')
    prepare.main([source, '--name=x', f'--data_dir={tmp_path}', '--tokenizer=gpt2'])
    splits = read_meta(str(tmp_path / 'x'))['splits']
    assert [splits['train']['tokens'], splits['val']['tokens']] == [301_966, 36_059]


@pytest.mark.parametrize('name, content, is_json', [
    ('chats-0', as_jsonl(CHAT), True), ('frame.json', b'{"text": {"0": "one", "1": "two"}}', True),
    ('list.txt', b'[1] one\n[2] two\n' * 9, False)])
def test_a_note_says_that_json_is_read_as_text(tmp_path, make, capsys, name, content, is_json):
    for number in range(3):
        (tmp_path / f'{number}{name}').write_bytes(content)
    make(tmp_path / f'*{name}', name='mine', tokenizer='byte')
    assert ('looks like JSON' in capsys.readouterr().err) == is_json


@pytest.mark.parametrize('row, flags', [({'prompt': 'Add.', 'completion': 'Yes'}, []),
                                        ({'text': 'Yes'}, ['--pack_rows=False'])])
def test_the_last_line_tunes_the_model_of_the_tokenizer(tmp_path, make, capsys, row, flags):
    run = tmp_path / 'a run'
    save(run / 'best.pt', tokenizer={'kind': 'byte'})
    path = tmp_path / 'rows.jsonl'
    path.write_bytes(as_jsonl([{name: f'{text}{i}' for name, text in row.items()} for i in range(9)]))
    make(path, tokenizer=run, name='mine')
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix('train on it with: '))
    assert command == ['python', 'train.py', 'config/lora.py', f'--init_from={run}', '--dataset=mine', *flags,
                       f'--data_dir={tmp_path / "data"}']


def test_equal_documents_fall_on_one_side_however_many_there_are(tmp_path, make, monkeypatch):
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl([{'text': f'document {i % 1000}'} for i in range(3000)]))
    for many in (100_000, 900):  # by exact size, then each with a probability
        monkeypatch.setattr('hotloop.data.documents.MANY', many)
        documents, _ = make(tmp_path / 'a.jsonl')
        assert len(documents['train']) + len(documents['val']) == 3000
        assert not set(documents['train']) & set(documents['val']) and 210 <= len(documents['val']) <= 390


def test_a_special_id_in_a_text_is_noted(tmp_path, make, capsys):
    for text, notes in (('one <|endoftext|> in a line', 1), ('none', 0)):
        (tmp_path / 'a.txt').write_text(text * 9)
        make(tmp_path / 'a.txt', tokenizer='bpe:300')
        assert capsys.readouterr().out.count('note: <|endoftext|> in the texts') == notes


def test_a_validation_source_of_its_own(tmp_path, make):
    for name, text in (('a', 'training'), ('b', 'validation'), ('c', 'more'), ('empty', '')):
        (tmp_path / f'{name}.txt').write_text(text)
    documents, meta = make(tmp_path / 'a.txt', val=tmp_path / 'b.txt')
    assert documents == {'train': ['training'], 'val': ['validation']}
    assert meta['splits']['val']['tokens'] == 10  # a single document has no end
    documents, meta = make(tmp_path / 'a.txt', tmp_path / 'c.txt', val=tmp_path / 'b.txt')
    assert documents['val'] == ['validation'] and meta['splits']['val']['tokens'] == 11
    assert make(f'{tmp_path}/[abc].txt', val=tmp_path / 'b.txt')[0]['train'] == ['training', 'more']
    for val, words in (('a', 'none is left to train on'), ('empty', 'no text for the val split')):
        with pytest.raises(ValueError, match=words):
            make(tmp_path / 'a.txt', val=tmp_path / f'{val}.txt')


def test_a_dataset_is_moved_aside_unless_the_new_one_is_the_same(notes, make, tmp_path, capsys):
    data = tmp_path / 'data'
    make(notes, val=0.5)
    first = contents(data / 'x')
    capsys.readouterr()
    make(notes, val=0.5, num_proc=1)
    assert f'{data}/x: unchanged\n' in capsys.readouterr().out
    assert contents(data / 'x') == first and os.listdir(data) == ['x']
    make(notes, val=0.5, tokenizer='char')
    assert f'{data}/x holds another dataset, which is moved to {data}/x.1\n' in capsys.readouterr().out
    assert contents(data / 'x.1') == first


@pytest.mark.parametrize('template, marks', [
    ('auto', ['<|im_end|>', '<|im_start|>']), ('gemma', ['<end_of_turn>', '<start_of_turn>'])])
def test_marks_of_a_template_are_special_ids_of_a_learned_tokenizer(tmp_path, make, template, marks):
    """Each mark costs one token, the size includes them, and no merge is learned from their names."""
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl(CHAT))
    _, meta = make(tmp_path / 'a.jsonl', tokenizer='bpe:300', template=template)
    tokenizer = tokenizer_from(meta['tokenizer'])
    assert tokenizer.n_vocab == meta['vocab_size'] == 300
    assert list(tokenizer.specials) == [*marks, '<|endoftext|>']
    assert list(tokenizer.specials.values()) == list(range(299 - len(marks), 300))
    assert not any(b'start' in piece for piece in tokenizer.pieces[:-len(marks) - 1])
    ids = np.fromfile(tmp_path / 'data' / 'x' / 'train.bin', '<u2').tolist()
    documents = meta['splits']['train']['documents']
    assert all(ids.count(tokenizer.specials[mark]) >= 2 * documents - 1 for mark in marks)
    assert tokenizer.decode(ids).count(b'? <|im_end|>') == documents  # that of the data is text


def test_rows_with_answers_bring_masks_one_template_and_tasks(tmp_path, make, capsys):
    """The held-out rows are written beside the bins. Rows without an answer are counted and left out."""
    rows = [{'prompt': f'{i} ask', 'completion': ' tell', 'id': i} for i in range(30)]
    (tmp_path / 'a.jsonl').write_bytes(as_jsonl([*rows, {'prompt': 'no answer', 'completion': ''}, CHAT[0]]))
    meta = make(tmp_path / 'a.jsonl', val=0.3)[1]
    assert meta['template'] == 'joined'
    assert 'skipped 2 rows: no text or answer' in capsys.readouterr().out
    folder = tmp_path / 'data' / 'x'
    for split, counts in meta['splits'].items():
        mask = (folder / f'{split}.mask.bin').read_bytes()
        assert len(mask) == counts['tokens'] and sum(mask) == 6 * counts['documents']  # ' tell' and its end
    held = [json.loads(line) for line in (folder / 'val.jsonl').read_text().splitlines()]
    assert len(held) == meta['splits']['val']['documents'] and all(row in rows for row in held)


def test_functions_of_a_file_are_held_out_together(tmp_path, make, capsys):
    """The held-out files are those of the same texts, so a model of the texts has not seen them."""
    (tmp_path / 'code').mkdir()
    for i in range(20):
        body = ''.join(f'def f{n}():\n    """File {i}."""\n    return {n}\n' for n in range(1 + i % 3))
        (tmp_path / 'code' / f'm{i}.py').write_text(body)
    (tmp_path / 'code' / 'not.py').write_text('print "2"')
    make(tmp_path / 'code', format='functions')
    assert 'code/not.py is left out, because it is not Python' in capsys.readouterr().err
    lines = (tmp_path / 'data' / 'x' / 'val.jsonl').read_text().splitlines()
    files = [json.loads(line)['prompt'].split('File ')[1].split('.')[0] for line in lines]
    hashes = sorted(holdout_hash(f'm{i}.py', 1337) for i in range(20))
    assert files and {holdout_hash(f'm{i}.py', 1337) for i in files} <= set(hashes[:5])
    assert all(files.count(i) == 1 + int(i) % 3 for i in files)


def test_files_of_one_name_in_several_folders_are_documents_of_their_own(tmp_path, make):
    """A file that two sources name counts once."""
    paths = [tmp_path / 'books' / name / 'text.txt' for name in ('alice', 'bob', 'carol', 'dan')]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(f'the text of {path.parent.name}')
    documents, _ = make(tmp_path / 'books', *paths)
    assert len(documents['train']) + len(documents['val']) == 4 and documents['val']


def test_a_test_split_in_a_folder_is_noted(tmp_path, make, capsys):
    for name in ('train', 'test'):
        (tmp_path / 'imdb' / name).mkdir(parents=True)
        (tmp_path / 'imdb' / name / 'a.txt').write_text(f'a {name}')
    make(tmp_path / 'imdb')
    assert 'note: test is text to train on, too; --val=SOURCE' in capsys.readouterr().out


def test_the_names_that_datasets_get(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, name in (('notes/', 'notes'), ('book.txt.gz', 'book'), ('.', tmp_path.name),
                         ('https://x.org/a/pages.jsonl.xz?raw=1', 'pages'), ('fineweb_edu:1', 'fineweb_edu')):
        assert prepare.default_name([source]) == name
    for sources in (['a.txt', 'b.txt'], ['*.txt'], ['-']):
        with pytest.raises(ValueError, match='give the dataset a name with --name'):
            prepare.default_name(sources)


@pytest.mark.parametrize('settings, words', [
    (dict(tokenizer='gpt9'), "tokenizer='gpt9' is not one of"), (dict(tokenizer='bpe:256'), 'is not one of'),
    (dict(val=0), r'val=0\.0 must be between 0 and 1'),
    (dict(name='a:b'), "name='a:b' must not"), (dict(num_proc=-1), 'num_proc=-1 must be'),
    (dict(val='shakespeare'), 'prepared alone'), (dict(name='nano'), 'nano exists and was not created by'),
    ('a', 'no text for the train split')])
def test_settings_that_would_do_nothing_or_harm_are_refused(tmp_path, make, settings, words):
    """So is a source, given here instead of settings, that has too little text."""
    nano = tmp_path / 'data' / 'nano'
    nano.mkdir(parents=True)
    (nano / 'train.bin').write_bytes(b'ab')
    is_text = isinstance(settings, str)
    (tmp_path / 'a.txt').write_text(settings if is_text else 'text ' * 9)
    with pytest.raises(ValueError, match=words):
        make(tmp_path / 'a.txt', **({} if is_text else settings))
    assert contents(tmp_path / 'data') == {'nano/train.bin': b'ab'}


@pytest.mark.parametrize('sources, settings, resolved', [
    ('stdlib', {}, ('stdlib', 'bpe:1024', 0.05)), ('a.txt', dict(name='b'), ('b', 'byte', 0.1)),
    ('tinystories', {}, ('tinystories', 'gpt2', None)),
    ('tinystories', dict(val=0.2), ('tinystories', 'gpt2', 0.2))])
def test_settings_are_the_users_then_the_corpuss(sources, settings, resolved):
    """A corpus with validation files of its own holds nothing out."""
    cfg = prepare.resolve(prepare.PrepareConfig(**settings), [sources])
    assert (cfg.name, cfg.tokenizer, cfg.val) == resolved


def test_every_template_holds_out_the_same_rows(tmp_path, make):
    rows = [{'system': ' Brief. ', 'question': f'{i} ', 'context': 'c', 'answer': 'a'} for i in range(40)]
    (tmp_path / 'rows.jsonl').write_bytes(as_jsonl([*CHAT, *rows]))
    held_out = set()
    for template in ('plain', 'alpaca', 'chatml', 'gemma', 'llama3'):
        make(tmp_path / 'rows.jsonl', template=template)
        held_out.add((tmp_path / 'data/x/val.jsonl').read_text())
    assert len(held_out) == 1
