"""A dataset on disk: meta.json, bins and masks, written aside; nanoGPT's meta.pkl."""

import contextlib
import io
import os
import pickle
import pickletools
import re
import shutil
from itertools import groupby

import numpy as np

from hotloop.chat_template import TEMPLATES
from hotloop.files import hash_file, lock, read_json
from hotloop.sources import how_to_make
from hotloop.tokenizer import MAX_VOCAB, same_tokenizer, tokenizer_from


def open_datasets(cfg):
    """[(name, folder, meta, weight)] of cfg.dataset: one, or several, by the weights after colons or by their size."""
    datasets = []
    for word in cfg.dataset.split(','):
        name, _, weight = word.partition(':')
        folder = dataset_folder(cfg.data_dir, name)
        for path in (folder, os.path.join(folder, 'train.bin'), os.path.join(folder, 'val.bin')):
            if not os.path.exists(path):
                raise ValueError(f'{path} does not exist; make it with: {how_to_make(name)}')
        meta = read_meta(folder)
        if datasets and not same_tokenizer(meta['tokenizer'], datasets[0][2]['tokenizer']):
            raise ValueError(f'the tokenizers of {datasets[0][0]} and {name} differ, so the same ids mean other text; '
                             'prepare one of them with the tokenizer of the other')
        datasets.append((name, folder, meta, weight))
    weights = [float(w) if re.fullmatch(r'\d+\.?\d*|\.\d+', w) else 0.0 for *_, w in datasets]
    if not any(w for *_, w in datasets):
        weights = [float(os.path.getsize(os.path.join(folder, 'train.bin')) // np.dtype(meta['dtype']).itemsize)
                   for _, folder, meta, _ in datasets]
    if not all(weights) and (len(datasets) > 1 or datasets[0][3]):
        raise ValueError(f'dataset={cfg.dataset!r}: give all of them a weight above 0, as in a:0.7,b:0.3, or none')
    return [(name, folder, meta, weight) for (name, folder, meta, _), weight in zip(datasets, weights, strict=True)]


def check_tokenizer(tokenizer, meta):
    """ValueError where a checkpoint's tokenizer (None: unknown) is not the dataset's."""
    if tokenizer and not same_tokenizer(tokenizer, meta['tokenizer']):
        a, b = (f'{t.get("name") or t.get("kind")}' + (f' ({len(t["chars"])} characters)' if 'chars' in t else '')
                for t in (tokenizer, meta['tokenizer']))
        raise ValueError(f'the checkpoint was trained with the tokenizer {a}, the dataset was made with {b}: the same '
                         'ids would mean other text; prepare the data with the tokenizer of the checkpoint')


def byte_table(meta, vocab_size, env):
    """Bytes of every id the model knows, (vocab_size,), or None where the tokenizer cannot be had."""
    try:
        table = tokenizer_from(meta['tokenizer']).sizes
    except ValueError as e:
        env.print_once(f'bits per byte: not reported, {e}')
        return None
    return np.pad(table, (0, max(vocab_size - len(table), 0)))


FORMAT = 1  # of meta.json


class BinWriter:
    """Appends to one bin, and to its mask once there is one, and counts what went in."""

    def __init__(self, folder, name, dtype, before=None):
        self.path, self.mask_path = (os.path.join(folder, f'{name}{end}') for end in ('.bin', '.mask.bin'))
        self.file = open(self.path, 'ab')  # noqa: SIM115
        self.mask = open(self.mask_path, 'ab') if os.path.exists(self.mask_path) else None  # noqa: SIM115
        self.dtype = np.dtype(dtype)
        self.counts = {name: (before or {}).get(name, 0) for name in ('tokens', 'bytes', 'documents')}

    def add(self, made):
        if made.mask is not None:
            self.begin_mask()
        self.file.write(made.ids.tobytes())
        if self.mask:
            self.mask.write(b'\1' * len(made.ids) if made.mask is None else made.mask.tobytes())
        for name, number in (('tokens', len(made.ids)), ('bytes', made.num_bytes), ('documents', made.documents)):
            self.counts[name] += number

    def begin_mask(self):
        """All before the first prompt counts."""
        if not self.mask:
            self.mask = open(self.mask_path, 'wb')  # noqa: SIM115
            for at in range(0, self.counts['tokens'], 1 << 20):
                self.mask.write(b'\1' * min(1 << 20, self.counts['tokens'] - at))

    def move_tail(self, to, counts):
        """Moves what is behind the first counts['tokens'] to another bin."""
        pairs = [(self.file, to.file, self.dtype.itemsize)]
        if self.mask or to.mask:
            self.begin_mask()
            to.begin_mask()
            pairs.append((self.mask, to.mask, 1))
        for mine, other, size in pairs:
            mine.flush()
            with open(mine.name, 'rb') as f:
                f.seek(counts['tokens'] * size)
                shutil.copyfileobj(f, other, 1 << 20)
            mine.truncate(counts['tokens'] * size)
        for name in self.counts:
            to.counts[name] += self.counts[name] - counts[name]
            self.counts[name] = counts[name]

    def close(self):
        """The counts, and hashes of what is on the disk."""
        for f in (self.file, self.mask):
            if f:
                f.flush()
                os.fsync(f.fileno())
                f.close()
        hashes = {'sha256': hash_file(self.path)} | ({'mask_sha256': hash_file(self.mask_path)} if self.mask else {})
        return self.counts | hashes


OWN_FILES = ('train.bin', 'val.bin', 'train.mask.bin', 'val.mask.bin', 'meta.json')


def copy_dataset(folder, partial):
    """Copies the bins of a dataset, proves them whole, and returns its meta."""
    meta = read_meta(folder)
    for s in ('train', 'val'):
        for name, key in ((f'{s}.bin', 'sha256'), (f'{s}.mask.bin', 'mask_sha256')):
            path = os.path.join(partial, name)
            if os.path.exists(os.path.join(folder, name)):
                shutil.copyfile(os.path.join(folder, name), path)
                if hash_file(path) != meta['splits'][s].get(key):
                    raise ValueError(f'{os.path.join(folder, name)} is not what meta.json says of it; prepare it again')
    return meta


def remove(path):
    """A file, or a folder with all that is in it."""
    shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


@contextlib.contextmanager
def partial_folder(folder):
    """The empty folder that a dataset is written into, locked as long as it is."""
    partial = folder + '.partial'
    os.makedirs(partial, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = lock(partial + '.lock')
        if held:
            stack.callback(held.release)
        for entry in os.scandir(partial):  # of a run that was killed
            remove(entry.path)
        try:
            yield partial
        except BaseException:
            remove(partial)
            raise


class PlainUnpickler(pickle.Unpickler):
    """Containers, text and numbers only: a pickle that names anything importable is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f'{module}.{name}')


def dataset_folder(data_dir, dataset):
    """The folder of a dataset by name; a name that leads out of data_dir is refused."""
    parts = dataset.replace('\\', '/').rstrip('/').split('/')
    if os.path.isabs(dataset) or {'', '.', '..'} & set(parts) or '\0' in dataset or ':' in dataset:
        raise ValueError(f'dataset={dataset!r} must be a name below data_dir={data_dir!r}; for another place set '
                         '--data_dir')
    if re.search(r'\.partial(\.|$)', parts[-1]):
        raise ValueError(f'dataset={dataset!r} is a dataset that is being written, or was when it was killed')
    return os.path.join(data_dir, *parts)


def read_meta(folder):
    """
    What is known of a dataset: meta.json, or as much as nanoGPT's meta.pkl says, or as nanoGPT would assume without
    either: uint16 ids of GPT-2's BPE. Keys: dtype, vocab_size, tokenizer, splits ({} when foreign), foreign.
    """
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            meta = read_json(path)
            numbers = [meta['format'], meta['vocab_size'], *(meta['splits'][s]['tokens'] for s in ('train', 'val')),
                       *(meta['splits'][s].get(key, 0) for s in ('train', 'val') for key in ('bytes', 'documents'))]
            if meta['format'] > FORMAT or meta['dtype'] not in ('uint16', 'uint32') or \
                    not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(meta.get('eot'), int | None):
                raise KeyError('format')
            if not set(meta.get('templates', [])) <= TEMPLATES.keys():
                raise KeyError('templates')
            made = tokenizer_from({'kind': 'byte'} if meta['tokenizer']['kind'] == 'tiktoken' else meta['tokenizer'])
            if not made.n_vocab <= meta['vocab_size'] <= MAX_VOCAB:
                raise KeyError('vocab_size')
            if meta.get('bos') is not None and not (type(meta['bos']) is int and 0 <= meta['bos'] < meta['vocab_size']):
                raise KeyError('bos')
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f'{path} is damaged or of a later version ({e}); prepare the dataset again') from None
        return {**meta, 'foreign': False}
    path = os.path.join(folder, 'meta.pkl')
    foreign = {'dtype': 'uint16', 'splits': {}, 'foreign': True}
    if not os.path.exists(path):
        return {**foreign, 'vocab_size': 50304, 'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}}
    try:
        with open(path, 'rb') as f:
            pickled = f.read()
        # a number in a pickle of 7 bytes can ask for a table of 16 GB
        if any(op.name.endswith('PUT') and arg > len(pickled) for op, arg, _ in pickletools.genops(pickled)):
            raise ValueError('it numbers more values than it holds')
        meta = PlainUnpickler(io.BytesIO(pickled)).load()
        chars, size = [meta['itos'][i] for i in range(len(meta['itos']))], int(meta['vocab_size'])
        if not all(isinstance(c, str) and len(c) == 1 for c in chars) or len(set(chars)) < len(chars):
            raise ValueError('itos is not one character an id')
        if not len(chars) <= size <= MAX_VOCAB:
            raise ValueError(f'vocab_size={size} for {len(chars)} characters')
        return {**foreign, 'vocab_size': size, 'tokenizer': {'kind': 'char', 'chars': ''.join(chars), 'eot': False}}
    except Exception as e:  # unpickling arbitrary bytes can raise nearly anything
        raise ValueError(f"{path} is not nanoGPT's meta.pkl of a character dataset ({type(e).__name__}: {e}); "
                         "without that file the bins are read as GPT-2's tokens") from None


def open_bin(path, dtype):
    """A bin as a mapped array of ids; one that is missing or empty has none. ValueError where it cannot be read."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return np.zeros(0, dtype=dtype)
    if os.path.getsize(path) % np.dtype(dtype).itemsize:
        raise ValueError(f'{path} has {os.path.getsize(path):,} bytes, which is no whole number of {dtype}; prepare it '
                         'again')
    try:
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder('<'), mode='r')
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


def count_ids(tokens):
    """How often each id occurs, up to the largest that does; block by block, for a bin may be larger than memory."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        block = np.bincount(tokens[start:start + (1 << 24)], minlength=len(counts))
        block[:len(counts)] += counts
        counts = block
    return counts


def show(tokenizer, ids):
    """Ids as text on one line, ends of documents marked."""
    text = ''
    for end, run in groupby(ids, key=lambda i: i == tokenizer.eot):
        run = list(run)
        text += '<|endoftext|>' * len(run) if end else tokenizer.decode(run).decode('utf-8', 'replace')
    names = {10: '\\n', 13: '\\r', 9: '\\t'}
    return ''.join(c if c.isprintable() else names.get(ord(c), f'\\x{ord(c):02x}') for c in text)
