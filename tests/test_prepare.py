"""Datasets: tokenizers, what lies in the bins and beside them, and what is refused before anything is written."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from conftest import SHARED, contents
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from hotloop.dataset import BinWriter, dataset_folder, read_meta
from hotloop.host import cores
from hotloop.pretrained import pretrained
from hotloop.sources import files_under, how_to_make, stdlib_files
from hotloop.tokenizer import ByteTokenizer, CharTokenizer, TiktokenTokenizer, encode_marked, tokenizer_from

SHAKESPEARE = os.path.join(SHARED, 'tinyshakespeare.txt')

# lone surrogates apart: text() leaves them out however it is asked
any_text = st.lists(st.characters() | st.integers(0xd800, 0xdfff).map(chr), max_size=40).map(''.join)


@pytest.fixture
def data(tmp_path):
    return tmp_path / 'data'


@pytest.fixture
def notes(tmp_path):
    """Six documents in a folder, with what must not become one."""
    folder = tmp_path / 'notes'
    (folder / 'sub').mkdir(parents=True)
    (folder / '.git').mkdir()
    for i, text in enumerate(('alpha\n' * 50, 'béta\r\n' * 60, 'γ' * 200, '', 'delta 😀\n' * 40)):
        (folder / f'{i}.txt').write_bytes(text.encode())
    (folder / 'sub' / 'five.md').write_bytes(b'\xef\xbb\xbf# five\n' * 1)  # with a byte-order mark
    (folder / 'picture.png').write_bytes(b'\x89PNG\xff')
    (folder / '.hidden.txt').write_text('secret')
    (folder / '.git' / 'config.txt').write_text('secret')
    return folder


NOTES = {'0.txt': 'alpha\n' * 50, '1.txt': 'béta\r\n' * 60, '2.txt': 'γ' * 200, '3.txt': '', '4.txt': 'delta 😀\n' * 40,
         'sub/five.md': '# five\n'}


def run(data, source, **flags):
    """prepare.main; returns the folder and the parsed meta.json."""
    assert prepare.main([str(source), f'--data_dir={data}', *(f'--{k}={v}' for k, v in flags.items())]) in (None, 0)
    name = flags.get('name') or os.path.splitext(os.path.basename(os.path.normpath(source)))[0]
    return data / name, json.loads((data / name / 'meta.json').read_text(encoding='utf-8'))


def ids(folder, split, dtype='<u2'):
    return np.frombuffer((folder / f'{split}.bin').read_bytes(), dtype=dtype).tolist()


# -----------------------------------------------------------------------------
# tokenizers

@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_text)
def test_bytes_round_trip_and_are_the_utf8_of_the_text(text):
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode(text)
    utf8 = text.encode('utf-8', 'surrogatepass')
    assert encoded.tolist() == list(utf8)
    assert tokenizer.decode(encoded.tolist()).decode('utf-8', 'surrogatepass') == text
    assert tokenizer.decode([*encoded.tolist(), tokenizer.eot]) == utf8
    assert tokenizer.sizes[encoded].sum() == len(utf8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_text, st.booleans(), any_text)
def test_chars_round_trip_and_a_stranger_is_named(text, several, other):
    tokenizer = CharTokenizer(''.join(sorted(set(text))), eot=several)
    assert tokenizer.n_vocab == len(set(text)) + several and tokenizer.eot == (len(set(text)) if several else None)
    encoded = tokenizer.encode(text).tolist()
    assert encoded == [sorted(set(text)).index(c) for c in text]
    assert tokenizer.decode(encoded).decode('utf-8', 'surrogatepass') == text
    if several:
        assert tokenizer.decode([*encoded, tokenizer.eot]) == tokenizer.decode(encoded)
    assert tokenizer.sizes[encoded].sum() == len(text.encode('utf-8', 'surrogatepass'))
    strangers = sorted(set(other) - set(text))[:20]
    if strangers:
        with pytest.raises(ValueError) as e:
            tokenizer.encode(other)
        assert repr(''.join(strangers)) in str(e.value)


def test_char_names_unknown_characters_in_and_beyond_its_range():
    with pytest.raises(ValueError, match=r"the characters 'b€😀' do not occur .*3 characters"):
        CharTokenizer('acz').encode('a€bz😀b')
    assert CharTokenizer('acz').encode('zac').tolist() == [2, 0, 1]


@pytest.mark.parametrize('text', ['', 'Hello, world!', 'é€😀', 'def f(x):\n\treturn  x\r\n', '<|endoftext|>',
                                  'a' * 3000])
def test_gpt2_round_trips_and_never_reads_text_as_its_special_token(gpt2, text):
    encoded = gpt2.encode(text)
    assert gpt2.decode(encoded.tolist()).decode() == text
    assert gpt2.eot == 50256 and gpt2.eot not in encoded.tolist() and gpt2.n_vocab == 50257
    assert gpt2.decode([*encoded.tolist(), gpt2.eot, 50300]).decode() == text  # padding of the vocabulary is nothing


def test_token_bytes_of_gpt2_sum_to_the_utf8_length(gpt2):
    table, text = gpt2.sizes, 'Naïve café, 10€ – 😀\n' * 9
    assert table.shape == (50257,) and table.dtype == np.int64 and table[50256] == 0
    assert table[gpt2.encode(text)].sum() == len(text.encode())
    assert table[:50256].min() == 1


@pytest.mark.parametrize('tokenizer', [ByteTokenizer(), CharTokenizer('abc'), CharTokenizer('abc', eot=True),
                                       CharTokenizer('\n \ud800é😀'), CharTokenizer('')])
def test_a_tokenizer_is_rebuilt_from_its_spec_through_json(tokenizer):
    again = tokenizer_from(json.loads(json.dumps(tokenizer.spec())))
    assert type(again) is type(tokenizer) and again.spec() == tokenizer.spec()
    assert (again.n_vocab, again.eot) == (tokenizer.n_vocab, tokenizer.eot)
    text = getattr(tokenizer, 'chars', 'é€😀')
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    every = range(tokenizer.n_vocab)
    assert [again.decode([i]) for i in every] == [tokenizer.decode([i]) for i in every]


def test_gpt2_is_rebuilt_from_its_spec(gpt2):
    again = tokenizer_from(json.loads(json.dumps(gpt2.spec())))
    assert again.spec() == {'kind': 'tiktoken', 'name': 'gpt2'} and again.encode('hi there').tolist() == [5303, 612]


@pytest.mark.parametrize('spec', [None, 3, [], {}, {'kind': 'magic'}, {'kind': 'char'}, {'kind': 'char', 'chars': 'aa'},
                                  {'kind': 'char', 'chars': ['a', 'b']}, {'kind': 'tiktoken'}])
def test_a_spec_that_describes_nothing_is_refused(spec):
    with pytest.raises(ValueError, match='describes no tokenizer'):
        tokenizer_from(spec)


def test_an_unknown_bpe_says_how_to_work_offline():
    with pytest.raises(ValueError, match=r"'no-such-bpe' could not be loaded.*TIKTOKEN_CACHE_DIR"):
        tokenizer_from({'kind': 'tiktoken', 'name': 'no-such-bpe'})


def test_gpt2s_ranks_from_either_copy_that_tiktoken_keeps(gpt2, tmp_path, monkeypatch):
    """One file for r50k_base, two for gpt2: what is cut short is not taken, and where nothing else is, it is said."""
    kept = os.environ['TIKTOKEN_CACHE_DIR']
    one, *two = '0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4', '6d1cbeee0f20b3d9449abfede4726ed8212e3aee', \
        '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6'
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr('requests.get', lambda *args, **kwargs: 1 / 0)  # there is no network
    monkeypatch.setattr('tiktoken.registry.ENCODINGS', {})  # what was loaded before
    hard = "it's  10,000 \u00fcbel\n\n\t<|endoftext|> \U0001f600"
    ids = list(gpt2.encode(hard))

    def keep(*names, cut=0):
        for name in os.listdir(tmp_path):
            os.remove(tmp_path / name)
        for name in names:
            with open(os.path.join(kept, name), 'rb') as f, open(tmp_path / name, 'wb') as g:
                raw = f.read()
                g.write(raw[:len(raw) - (cut if name == one else 0)])
    for names, cut in (([one], 0), (two, 0), ([one, *two], 100)):
        keep(*names, cut=cut)
        monkeypatch.setattr('tiktoken.registry.ENCODINGS', {})
        tokenizer = TiktokenTokenizer('gpt2')
        assert list(tokenizer.encode(hard)) == ids and (tokenizer.n_vocab, tokenizer.eot) == (50257, 50256)
    keep(one, cut=100)
    monkeypatch.setattr('tiktoken.registry.ENCODINGS', {})
    with pytest.raises(ValueError, match=r"'gpt2' could not be loaded.*TIKTOKEN_CACHE_DIR.*openai-whisper"):
        TiktokenTokenizer('gpt2')


def test_a_prompt_may_hold_the_end_of_text():
    byte, char = ByteTokenizer(), CharTokenizer('ab', eot=True)
    assert encode_marked(byte, 'a<|endoftext|>b') == [97, 256, 98]
    assert encode_marked(byte, '<|endoftext|>') == [256]
    assert encode_marked(byte, '<|endoftext|><|endoftext|>a') == [256, 256, 97]
    assert encode_marked(byte, '') == []
    assert encode_marked(char, 'b<|endoftext|>a') == [1, 2, 0]
    # a tokenizer without one reads it as text, and here as strange characters
    with pytest.raises(ValueError, match='do not occur'):
        encode_marked(CharTokenizer('ab'), 'a<|endoftext|>b')
    assert encode_marked(CharTokenizer(''.join(sorted(set('<|endoftext|>')))), '<|endoftext|>')[0] == 0


def test_a_gpt2_prompt_may_hold_the_end_of_text(gpt2):
    assert encode_marked(gpt2, 'hi<|endoftext|> there') == [5303, 50256, 612]


# -----------------------------------------------------------------------------
# what is written

def test_a_file_is_cut_at_a_character_and_the_bins_are_nanogpts(tmp_path, data, capsys):
    """As nanoGPT's shakespeare_char/prepare.py: data[:int(n * 0.9)], uint16, little-endian, no header."""
    text = 'Ünïcode, not bytes, is cut. €' * 37
    (tmp_path / 'book.txt').write_text(text, encoding='utf-8', newline='')
    folder, meta = run(data, tmp_path / 'book.txt', tokenizer='char')
    chars = sorted(set(text))
    n = int(len(text) * (1 - 0.1))
    assert n != round(len(text) * 0.9), 'the cut must round down'
    for split, part in (('train', text[:n]), ('val', text[n:])):
        raw = np.array([chars.index(c) for c in part], dtype='<u2').tobytes()
        assert (folder / f'{split}.bin').read_bytes() == raw
        assert meta['splits'][split] == {'tokens': len(part), 'bytes': len(part.encode()), 'documents': 1,
                                         'sha256': hashlib.sha256(raw).hexdigest()}
    assert meta['tokenizer'] == {'kind': 'char', 'chars': ''.join(chars), 'eot': False}
    assert (meta['format'], meta['dtype'], meta['vocab_size'], meta['eot']) == (1, 'uint16', len(chars), None)
    assert sorted(os.listdir(folder)) == ['meta.json', 'train.bin', 'val.bin'] and os.listdir(data) == ['book']
    out = capsys.readouterr().out
    assert f'train: {n:,} tokens' in out and 'python train.py config/quickstart.py --dataset=book' in out


@pytest.mark.parametrize('fraction', [0.25, 0.5, 0.999])
def test_val_fraction_is_the_share_of_characters(tmp_path, data, fraction):
    (tmp_path / 'x.txt').write_text('é' * 1000, encoding='utf-8')
    _, meta = run(data, tmp_path / 'x.txt', val_fraction=fraction)
    cut = int(1000 * (1 - fraction))
    assert [meta['splits'][s]['tokens'] for s in ('train', 'val')] == [2 * cut, 2 * (1000 - cut)]


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path, data):
    (tmp_path / 'x.txt').write_bytes(b'\xef\xbb\xbfa\r\nb\rc\n')
    folder, _ = run(data, tmp_path / 'x.txt')
    assert bytes(ids(folder, 'train') + ids(folder, 'val')) == b'a\r\nb\rc\n'


@pytest.mark.parametrize('tokenizer', ['byte', 'char'])
def test_a_folder_is_a_document_a_file_and_each_ends_with_the_end_of_text(notes, data, tokenizer):
    folder, meta = run(data, notes, tokenizer=tokenizer, val_fraction=0.3)
    rebuilt = tokenizer_from(meta['tokenizer'])
    assert meta['eot'] == rebuilt.eot == rebuilt.n_vocab - 1 and meta['vocab_size'] == rebuilt.n_vocab
    found = {}
    for split in ('train', 'val'):
        all_ids = ids(folder, split)
        assert all_ids[-1] == rebuilt.eot
        documents, start = [], 0
        for i, token in enumerate(all_ids):
            if token == rebuilt.eot:
                documents.append(rebuilt.decode(all_ids[start:i]).decode())
                start = i + 1
        found[split] = documents
        counts = meta['splits'][split]
        assert counts['documents'] == len(documents) and counts['tokens'] == len(all_ids)
        assert counts['bytes'] == sum(len(d.encode()) for d in documents)
        assert counts['sha256'] == hashlib.sha256((folder / f'{split}.bin').read_bytes()).hexdigest()
        assert counts['bytes'] == rebuilt.sizes[all_ids].sum()
    assert sorted(found['train'] + found['val']) == sorted(filter(None, NOTES.values()))  # nothing cut, nothing twice
    held = meta['splits']['val']['bytes']
    assert held >= 0.3 * sum(len(d.encode()) for d in NOTES.values())
    assert found['train'] and found['val']


def test_held_out_documents_are_a_seeded_choice_of_whole_files(notes):
    documents = files_under(str(notes), ('.txt', '.md'))
    assert [name for name, _ in documents] == sorted(NOTES)
    choices = set()
    for seed in range(20):
        for fraction in (0.01, 0.1, 0.5, 0.99):
            size = {prepare.holdout_hash(name, seed): os.path.getsize(path) for name, path in documents}
            held = prepare.hold_out(size, fraction)
            assert 0 < len(held) < len(documents)
            assert sum(size[n] for n in held) >= fraction * sum(size.values()) or len(held) == len(documents) - 1
            assert held == prepare.hold_out(dict(reversed(size.items())), fraction)
        held = prepare.hold_out(size, 0.1)
        choices.add(frozenset(name for name, _ in documents if prepare.holdout_hash(name, seed) in held))
    assert len(choices) > 3


def test_prepared_twice_the_bytes_are_the_same_and_the_seed_decides_the_split(notes, data, tmp_path):
    first = contents(run(data, notes)[0])
    again = contents(run(tmp_path / 'elsewhere', notes)[0])
    assert first == again and set(first) == {'train.bin', 'val.bin', 'meta.json'}
    others = [contents(run(data, notes, name=f's{seed}', seed=seed)[0])['val.bin'] for seed in range(4)]
    assert len({first['val.bin'], *others}) > 1


def test_a_vocabulary_beyond_two_bytes_is_written_in_four(tmp_path, data):
    text = ''.join(chr(c) for c in range(0x20000, 0x20000 + 2**16 + 1))
    (tmp_path / 'big.txt').write_text(text, encoding='utf-8')
    folder, meta = run(data, tmp_path / 'big.txt', tokenizer='char')
    assert meta['dtype'] == 'uint32' and meta['vocab_size'] == 2**16 + 1
    assert ids(folder, 'train', '<u4') + ids(folder, 'val', '<u4') == list(range(2**16 + 1))
    (tmp_path / 'less.txt').write_text(text[1:], encoding='utf-8')
    folder, meta = run(data, tmp_path / 'less.txt', tokenizer='char')
    assert meta['dtype'] == 'uint16' and ids(folder, 'val')[-1] == 2**16 - 1


def test_a_file_name_that_is_not_utf8_is_a_file_like_any_other(tmp_path, data):
    """Linux file names are bytes; Python shows the strange ones as lone surrogates."""
    folder = tmp_path / 'old'
    folder.mkdir()
    try:
        for name in (b'caf\xe9.txt', b'b.txt'):
            with open(os.path.join(os.fsencode(folder), name), 'w') as f:
                f.write('words\n')
    except OSError:
        pytest.skip('this file system has no names that are not UTF-8')
    _, meta = run(data, folder)
    assert [meta['splits'][s]['documents'] for s in ('train', 'val')] == [1, 1]


def test_tiny_shakespeare_has_nanogpts_numbers(gpt2, data):
    """nanoGPT's data/shakespeare/readme.md: 301,966 and 36,059 tokens; shakespeare_char: 1,003,854 and 111,540."""
    if not os.path.exists(SHAKESPEARE):
        pytest.skip(f'{SHAKESPEARE} is not there')
    _, meta = run(data, SHAKESPEARE, tokenizer='gpt2')
    assert [meta['splits'][s]['tokens'] for s in ('train', 'val')] == [301_966, 36_059]
    assert meta['vocab_size'] == 50257 and meta['eot'] == 50256 and meta['dtype'] == 'uint16'
    _, meta = run(data, SHAKESPEARE, tokenizer='char')
    assert [meta['splits'][s]['tokens'] for s in ('train', 'val')] == [1_003_854, 111_540]
    assert meta['vocab_size'] == 65


# -----------------------------------------------------------------------------
# whole or not there

@pytest.mark.parametrize('before', [False, True])
def test_an_interruption_leaves_nothing_half_under_the_name(notes, data, monkeypatch, before):
    """Killed midway, the name stays free, or keeps the dataset it had; a rerun needs no cleaning up."""
    if before:
        run(data, notes, name='n', val_fraction=0.5)
        old = contents(data / 'n')
    real, calls = BinWriter.add, []

    def add(self, made):
        calls.append(made)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self, made)

    with monkeypatch.context() as m:
        m.setattr('hotloop.documents.PIECE', 1)  # a batch a document
        m.setattr('hotloop.encode.PIECE', 1)  # a batch a document
        m.setattr(BinWriter, 'add', add)
        with pytest.raises(KeyboardInterrupt):
            run(data, notes, name='n')
    assert len(calls) == 4
    if before:
        assert contents(data / 'n') == old
    else:
        assert not (data / 'n').exists()
    folder, _ = run(data, notes, name='n')
    assert os.listdir(data) == ['n']
    assert contents(folder) == contents(run(data, notes, name='fresh')[0])


def test_an_interruption_before_meta_json_leaves_the_name_free(notes, data, monkeypatch):
    def dump(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(prepare.json, 'dump', dump)
        with pytest.raises(KeyboardInterrupt):
            run(data, notes)
    assert not (data / 'notes').exists()
    run(data, notes)


def test_an_interruption_between_the_renames_puts_the_old_dataset_back(notes, data, monkeypatch):
    run(data, notes, name='n')
    old, new = contents(data / 'n'), contents(run(data, notes, name='m', tokenizer='char')[0])
    real, calls = os.rename, []

    def rename(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as m:
        m.setattr(prepare.os, 'rename', rename)
        with pytest.raises(KeyboardInterrupt):
            run(data, notes, name='n', tokenizer='char')
    assert contents(data / 'n') == old and sorted(os.listdir(data)) == ['m', 'n']
    assert contents(run(data, notes, name='n', tokenizer='char')[0]) == new


def test_a_dataset_is_replaced_whole(notes, tmp_path, data):
    run(data, notes, name='x')
    (data / 'x' / 'train.mask.bin').write_bytes(b'of the old one')
    (tmp_path / 'other.txt').write_text('abc' * 30)
    folder, meta = run(data, tmp_path / 'other.txt', name='x', tokenizer='char')
    assert meta['vocab_size'] == 3 and sorted(os.listdir(folder)) == ['meta.json', 'train.bin', 'val.bin']
    assert os.listdir(data) == ['x']


def test_a_folder_that_prepare_did_not_make_is_left_alone(notes, data):
    (data / 'notes').mkdir(parents=True)
    (data / 'notes' / 'train.bin').write_bytes(b'ab')
    with pytest.raises(ValueError, match=r'notes exists and was not made by this program: train.bin; choose another'):
        run(data, notes)
    assert contents(data) == {os.path.join('notes', 'train.bin'): b'ab'}
    os.remove(data / 'notes' / 'train.bin')
    run(data, notes)  # an empty folder holds nothing to lose


def test_a_file_under_the_name_is_left_alone(notes, data):
    data.mkdir()
    (data / 'notes').write_text('precious')
    with pytest.raises(ValueError, match='notes'):
        run(data, notes)
    assert contents(data) == {'notes': b'precious'}


def test_a_folder_that_a_user_called_old_survives(notes, data):
    """NAME.old is the name that people give their own copies."""
    run(data, notes)
    os.rename(data / 'notes', data / 'notes.old')
    kept = contents(data / 'notes.old')
    run(data, notes, tokenizer='char')
    assert contents(data / 'notes.old') == kept
    run(data, notes, tokenizer='char')
    assert contents(data / 'notes.old') == kept


# -----------------------------------------------------------------------------
# refused, with a reason, before anything is written

@pytest.mark.parametrize('name', ['../x', '..', 'a/../../x', 'a/..', '/tmp/x', 'a\\..\\x', 'a\0b'])
def test_a_name_that_leads_out_of_data_dir_is_refused(notes, data, name):
    with pytest.raises(ValueError, match='must be a name below data_dir'):
        prepare.main([str(notes), f'--data_dir={data}', f'--name={name}'])
    with pytest.raises(ValueError, match='must be a name below data_dir'):
        dataset_folder(str(data), name)
    assert not data.exists() and os.listdir(data.parent) == ['notes']


def test_a_name_below_data_dir_may_have_folders_and_dots(notes, data):
    assert dataset_folder('data', 'a/b..c') == os.path.join('data', 'a/b..c')
    run(data, notes, name='group/v1..2')
    assert (data / 'group' / 'v1..2' / 'train.bin').exists()
    with pytest.raises(ValueError, match='must be a name below'):
        dataset_folder('data', '')


def test_a_trailing_slash_in_the_name_is_no_other_name(notes, data):
    """What a shell completes to."""
    prepare.main([str(notes), f'--data_dir={data}', '--name=new/'])
    assert set(contents(data)) == {os.path.join('new', f) for f in ('meta.json', 'train.bin', 'val.bin')}


def test_the_current_folder_has_a_name_too(notes, data, monkeypatch):
    monkeypatch.chdir(notes)
    prepare.main(['.', f'--data_dir={data}'])
    assert set(contents(data)) == {os.path.join('notes', f) for f in ('meta.json', 'train.bin', 'val.bin')}


@pytest.mark.parametrize('tokenizer', ['byte', 'char'])
def test_bytes_that_are_not_utf8_are_named_with_their_place(tmp_path, data, tokenizer):
    (tmp_path / 'latin.txt').write_bytes('a café'.encode('latin-1'))
    with pytest.raises(ValueError, match=r'latin\.txt is not UTF-8 text: byte 0xe9 at 5'):
        run(data, tmp_path / 'latin.txt', tokenizer=tokenizer)
    assert not (data / 'latin').exists()


def test_a_folder_without_text_says_so(tmp_path, data):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'empty' / 'x.png').write_bytes(b'x')
    with pytest.raises(ValueError, match=r'empty holds no text files \(\.txt'):
        run(data, tmp_path / 'empty')
    assert not data.exists()


@pytest.mark.parametrize('tokenizer', ['byte', 'char'])
def test_a_file_without_text_says_so(tmp_path, data, tokenizer):
    """It would be a dataset of no tokens, which fails only in training."""
    (tmp_path / 'void.txt').write_text('')
    with pytest.raises(ValueError, match=r'void\.txt'):
        run(data, tmp_path / 'void.txt', tokenizer=tokenizer)
    assert not (data / 'void').exists()


@pytest.mark.parametrize('source', ['nowhere.txt', 'no/such/folder/', 'tinyshakespeare'])
def test_a_source_that_is_not_there_says_so(data, source):
    with pytest.raises(ValueError, match=r'is no file or folder, nor a corpus with a name: stdlib, .*tiny'):
        prepare.main([source, f'--data_dir={data}'])
    assert not data.exists()


def test_a_data_dir_that_is_a_file_says_so(notes, tmp_path):
    (tmp_path / 'taken').write_text('x')
    with pytest.raises(ValueError, match='taken'):
        prepare.main([str(notes), f'--data_dir={tmp_path / "taken"}'])
    assert (tmp_path / 'taken').read_text() == 'x'


@pytest.mark.parametrize('flag, words', [
    ('--tokenizer=gpt9', "tokenizer='gpt9' is unknown; there are byte, char, bpe:SIZE, gpt2"),
    ('--val_fraction=0', 'val_fraction=0.0 must lie between 0 and 1'),
    ('--val_fraction=1', 'val_fraction=1.0 must lie between 0 and 1'),
    ('--val_fraction=-0.1', 'val_fraction=-0.1 must lie between 0 and 1'),
    ('--tokeniser=byte', "unknown setting 'tokeniser'; did you mean 'tokenizer'?"),
    ('another.txt', 'notes another.txt: say what the dataset shall be called, with --name'),
])
def test_settings_that_cannot_work_are_refused(notes, data, flag, words):
    with pytest.raises(ValueError) as e:
        prepare.main([str(notes), f'--data_dir={data}', flag])
    assert words in str(e.value) and not data.exists()


# -----------------------------------------------------------------------------
# the embedded corpus

def test_the_standard_library_comes_without_test_suites_in_a_fixed_order():
    files = stdlib_files()
    names = [name for name, _ in files]
    assert names == sorted(set(names)) and files == stdlib_files()
    assert {'argparse.py', 'json/decoder.py', 'unittest/case.py'} <= set(names)
    parts = {part for name in names for part in name.split('/')}
    assert not parts & {'test', 'tests', 'idle_test', 'site-packages', '__pycache__', 'encodings', 'pydoc_data'}
    assert not [n for n in names if os.path.basename(n).startswith(('test_', '_sysconfigdata'))]
    assert all(n.endswith('.py') for n in names)
    assert 5e6 < sum(os.path.getsize(path) for _, path in files) < 5e7
    for _, path in files:
        with open(path, encoding='utf-8') as f:
            f.read()  # all of it is UTF-8


def test_without_a_source_the_standard_library_is_prepared(data, monkeypatch, tmp_path):
    some = [f for f in stdlib_files() if f[0].startswith(('json/', 'email/'))]
    assert len(some) > 10
    monkeypatch.setattr('hotloop.sources.stdlib_files', lambda: some)
    prepare.main([f'--data_dir={data}'])
    prepare.main(['stdlib', f'--data_dir={tmp_path / "again"}'])
    assert contents(data / 'stdlib') == contents(tmp_path / 'again' / 'stdlib')
    splits = read_meta(str(data / 'stdlib'))['splits']
    total = sum(os.path.getsize(path) for _, path in some)
    assert splits['train']['bytes'] + splits['val']['bytes'] == total
    assert 0.05 * total <= splits['val']['bytes'] < 0.5 * total
    assert splits['train']['documents'] + splits['val']['documents'] == sum(os.path.getsize(p) > 0 for _, p in some)


def test_five_percent_of_the_standard_library_is_held_out():
    files = stdlib_files()
    size = {prepare.holdout_hash(name, 1337): os.path.getsize(path) for name, path in files}
    assert 0.05 <= sum(size[rank] for rank in prepare.hold_out(size, 0.05)) / sum(size.values()) < 0.1


# -----------------------------------------------------------------------------
# what is known of a dataset

def test_meta_of_ours_is_read_back(notes, data):
    folder, meta = run(data, notes)
    assert read_meta(str(folder)) == {**meta, 'foreign': False}


def change(*keys, to):
    """meta.json with the value at these keys replaced, or removed where `to` is ...; the text of it."""
    def damage(meta):
        place = meta
        for key in keys[:-1]:
            place = place[key]
        if to is ...:
            del place[keys[-1]]
        else:
            place[keys[-1]] = to
        return json.dumps(meta)
    return damage


@pytest.mark.parametrize('damage', [
    lambda meta: '', lambda meta: json.dumps(meta)[:-20], lambda meta: '[]', lambda meta: 'null', lambda meta: '3',
    lambda meta: '{}', lambda meta: '[' * 100_000, lambda meta: b'\xff\xfe{}',
    change('format', to=2), change('format', to='1'), change('format', to=...),
    change('dtype', to='int8'), change('dtype', to=...), change('dtype', to=None),
    change('vocab_size', to='257'), change('vocab_size', to=None), change('vocab_size', to=2.5),
    change('splits', to=...), change('splits', to=[]), change('splits', 'val', to=...),
    change('splits', 'train', 'tokens', to=-1), change('splits', 'train', 'tokens', to='many'),
    change('splits', 'train', 'tokens', to=None), change('splits', 'train', 'tokens', to=float('inf')),
    change('tokenizer', to=...), change('tokenizer', to='byte'), change('tokenizer', to={'kind': 'spm'}),
    change('tokenizer', to={'kind': 'char'}), change('tokenizer', to={'kind': 'char', 'chars': 'aa'}),
    change('tokenizer', to={'kind': 'char', 'chars': 7}), change('templates', to=['mine']), change('templates', to=3),
    change('templates', to=[[]]), change('bos', to='a'), change('bos', to=257),
])
def test_a_damaged_meta_json_is_one_sentence(notes, data, damage):
    folder, meta = run(data, notes)
    text = damage(meta)
    (folder / 'meta.json').write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r'meta\.json is damaged or of a later version \(.*\); prepare') as e:
        read_meta(str(folder))
    assert '\n' not in str(e.value)


def nanogpt_meta(chars):
    """As nanoGPT's data/shakespeare_char/prepare.py writes it."""
    return {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_nanogpts_meta_pkl_is_read(tmp_path, protocol):
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta('\n abcé'), protocol))
    meta = read_meta(str(tmp_path))
    assert meta == {'dtype': 'uint16', 'vocab_size': 6, 'splits': {}, 'foreign': True,
                    'tokenizer': {'kind': 'char', 'chars': '\n abcé', 'eot': False}}
    assert tokenizer_from(meta['tokenizer']).encode('éa').tolist() == [5, 2]


def test_meta_json_comes_before_meta_pkl(notes, data):
    folder, _ = run(data, notes)
    (folder / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta('abc')))
    assert read_meta(str(folder))['foreign'] is False


def test_without_meta_nanogpts_assumption_holds(tmp_path):
    assert read_meta(str(tmp_path)) == {'dtype': 'uint16', 'vocab_size': 50304, 'splits': {}, 'foreign': True,
                                        'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}}


class Touch:
    """Unpickled by pickle.load, this makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.parametrize('protocol', [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_meta_pkl_cannot_run_code(tmp_path, protocol):
    target = tmp_path / 'touched'
    evil = pickle.dumps({**nanogpt_meta('abc'), 'extra': Touch(target)}, protocol)
    pickle.loads(evil)['extra'].close()
    assert target.exists(), 'the trap itself must work'
    target.unlink()
    (tmp_path / 'meta.pkl').write_bytes(evil)
    with pytest.raises(ValueError, match=r"meta\.pkl is not nanoGPT's .*UnpicklingError: \w+\.open"):
        read_meta(str(tmp_path))
    assert not target.exists()


@pytest.mark.parametrize('raw', [
    b'', b'not a pickle', pickle.dumps(3), pickle.dumps({}), pickle.dumps(nanogpt_meta('abc'))[:-5],
    *map(pickle.dumps, [{'vocab_size': 2, 'itos': {0: 'ab', 1: 'c'}}, {'vocab_size': 2, 'itos': {0: 'a', 1: 'a'}},
                        {'vocab_size': 2, 'itos': {1: 'a', 2: 'b'}}, {'vocab_size': 'x', 'itos': {0: 'a'}},
                        {'itos': {0: 'a'}}])])
def test_a_damaged_meta_pkl_is_one_sentence(tmp_path, raw):
    (tmp_path / 'meta.pkl').write_bytes(raw)
    with pytest.raises(ValueError, match=r"meta\.pkl is not nanoGPT's meta\.pkl of a character dataset \("):
        read_meta(str(tmp_path))


def test_the_command_that_makes_a_dataset_is_one_that_prepare_understands():
    from configurator import configure
    for dataset in ('stdlib', 'mine'):
        words = how_to_make(dataset).split()
        assert words[:2] == ['python', 'prepare.py']
        cfg, reading, _, sources = configure(prepare.PrepareConfig, prepare.ReadConfig, argv=words[2:], files=False)
        assert len(sources) == 1 and dataset in (cfg.name, sources[0])


# -----------------------------------------------------------------------------
# downloads, from a server of our own

WEIGHTS = bytes(range(256)) * 5000  # more than one chunk of a megabyte
CONFIG = b'{"model_type": "gpt2"}'


def blob_sha1(body):
    return hashlib.sha1(b'blob %d\0' % len(body) + body).hexdigest()


def good(hub):
    hub.serve('config.json', CONFIG, {'ETag': f'"{blob_sha1(CONFIG)}"'})
    hub.serve('model.safetensors', WEIGHTS, {'ETag': f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'})


def test_weights_are_downloaded_once_and_checked(hub, tmp_path):
    """config.json by the SHA-1 of a git blob, weights by SHA-256, as the hub's ETags have it."""
    good(hub)
    folder, _ = pretrained('gpt2', str(tmp_path))
    assert contents(tmp_path) == {os.path.join('pretrained', 'gpt2', 'config.json'): CONFIG,
                                  os.path.join('pretrained', 'gpt2', 'model.safetensors'): WEIGHTS}
    assert folder == os.path.join(str(tmp_path), 'pretrained', 'gpt2')
    assert len(hub.requests) == 2 and 'Authorization' not in hub.requests[0][1]
    assert pretrained('gpt2', str(tmp_path))[0] == folder and len(hub.requests) == 2


def test_the_token_of_the_hub_goes_along(hub, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'hf_abc')
    good(hub)
    pretrained('gpt2', str(tmp_path))
    assert [headers['Authorization'] for _, headers in hub.requests] == ['Bearer hf_abc'] * 2


def test_the_first_answer_of_a_redirect_tells_the_hash(hub, tmp_path):
    """The hub answers 302 with X-Linked-ETag; the ETag of the store behind it is of another kind."""
    good(hub)
    hub.answers['/store'] = (200, {'ETag': '"0123456789abcdef0123456789abcdef-7"'}, WEIGHTS)
    linked = {'Location': '/store', 'X-Linked-ETag': f'"{hashlib.sha256(WEIGHTS).hexdigest()}"',
              'X-Linked-Size': len(WEIGHTS)}
    hub.serve('model.safetensors', b'', linked, status=302)
    pretrained('gpt2', str(tmp_path))
    linked['X-Linked-ETag'] = '"' + 'a' * 64 + '"'
    with pytest.raises(ValueError, match='the hash of what came is'):
        pretrained('gpt2', str(tmp_path / 'again'))


@pytest.mark.parametrize('kind', ['sha256', 'blob'])
def test_a_body_without_a_length_is_checked_by_its_hash_alone(hub, tmp_path, kind):
    """Mirrors stream; the SHA-1 of a git blob begins with the length, which then is the body's own."""
    good(hub)
    etag = hashlib.sha256(CONFIG).hexdigest() if kind == 'sha256' else blob_sha1(CONFIG)
    hub.serve('config.json', CONFIG, {'ETag': f'"{etag}"', 'Content-Length': None, 'Transfer-Encoding': 'chunked'})
    pretrained('gpt2', str(tmp_path))
    assert (tmp_path / 'pretrained' / 'gpt2' / 'config.json').read_bytes() == CONFIG


@pytest.mark.parametrize('headers, status, words', [
    ({}, 404, 'answered 404'),
    ({}, 503, 'answered 503'),
    ({'ETag': '"' + '0' * 64 + '"'}, 200, 'the hash of what came is .*, not 0000'),
    ({'ETag': 'W/"' + '0' * 40 + '"'}, 200, 'the hash of what came is .*, not 0000'),
    ({'etag': '"' + '0' * 64 + '"'}, 200, 'the hash of what came is .*, not 0000'),  # header names have no case
    ({'x-linked-etag': '"' + '0' * 64 + '"'}, 200, 'the hash of what came is .*, not 0000'),
    ({'Content-Length': len(WEIGHTS) + 1}, 200, 'could not be downloaded|bytes came'),
    ({'Content-Length': len(WEIGHTS) + 2**21, 'ETag': f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'}, 200,
     'could not be downloaded|bytes came'),
    ({'Content-Length': None, 'Transfer-Encoding': 'chunked', 'X-Linked-Size': len(WEIGHTS) + 1}, 200, 'bytes came'),
])
def test_a_download_that_fails_leaves_no_file_under_the_name(hub, tmp_path, headers, status, words):
    good(hub)
    hub.serve('model.safetensors', WEIGHTS, headers, status)
    with pytest.raises(ValueError, match=words) as e:
        pretrained('gpt2', str(tmp_path))
    assert 'resolve/main/model.safetensors' in str(e.value) and '\n' not in str(e.value)
    folder = tmp_path / 'pretrained' / 'gpt2'
    assert (folder / 'config.json').read_bytes() == CONFIG and not (folder / 'model.safetensors').exists()
    good(hub)
    pretrained('gpt2', str(tmp_path))  # and the next attempt is not disturbed by the first
    assert (folder / 'model.safetensors').read_bytes() == WEIGHTS


def test_no_server_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr('hotloop.download.PAUSE', 0.001)
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')  # the discard port, where nobody listens
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    with pytest.raises(ValueError, match=r'127\.0\.0\.1:9/openai-community/gpt2/.* could not be downloaded'):
        pretrained('gpt2', str(tmp_path))
    assert contents(tmp_path) == {}


# -----------------------------------------------------------------------------
# the machine

@pytest.mark.parametrize('quota, logical, physical', [(None, 6, 4), ('max 100000', 6, 4), ('250000 100000', 3, 3),
                                                      ('1000 100000', 1, 1), ('nonsense', 6, 4)])
def test_cores_are_those_of_the_affinity_and_of_a_containers_quota(tmp_path, monkeypatch, quota, logical, physical):
    """Six CPUs, of which 0 and 4, and 1 and 5, are one core each; of CPU 3 the system tells nothing."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(6)), raising=False)
    for cpu in (0, 1, 2, 4, 5):
        folder = tmp_path / f'devices/system/cpu/cpu{cpu}/topology'
        folder.mkdir(parents=True)
        (folder / 'thread_siblings_list').write_text({0: '0,4', 1: '1,5', 2: '2'}[cpu % 4] + '\n')
    if quota:
        (tmp_path / 'fs/cgroup').mkdir(parents=True)
        (tmp_path / 'fs/cgroup/cpu.max').write_text(quota + '\n')
    assert cores(system=tmp_path) == logical
    assert cores(physical=True, system=tmp_path) == physical


def test_cores_where_nothing_is_told(tmp_path, monkeypatch):
    """As on Windows and macOS."""
    monkeypatch.delattr(os, 'sched_getaffinity', raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 3)
    assert cores(system=tmp_path) == cores(physical=True, system=tmp_path) == 3
