"""
A dataset on disk: bins and masks, meta.json beside them, and the folders that nanoGPT wrote.

    $ python -m hotloop.data.dataset data/mine    # counts, frequent tokens, decoded text
"""

import contextlib
import filecmp
import io
import os
import pickle
import re
import shutil
import sys
import zipfile
from typing import NamedTuple

import numpy as np

from configurator import call_main
from hotloop.data.sources import missing_dataset
from hotloop.data.tokenizer import GPT2_SPEC, same_tokenizer, spec_of, template_of_record, tokenizer_from
from hotloop.system.files import counting, free_number, hash_file, lock, read_json, sync_folder
from hotloop.system.text import counted, shell

FORMAT = 1  # of meta.json
MAX_VOCAB = 2**20  # ids of a tokenizer
COUNT_BLOCK = 1 << 24  # tokens
SPLITS = ('train', 'val')


def read_meta(folder):
    """
    Read a dataset's meta.json, or nanoGPT's meta.pkl, or assume what nanoGPT does without either:
    uint16 ids of GPT-2's BPE. Keys: dtype, vocab_size, tokenizer, template, eot, foreign, splits ({} if
    it is foreign).
    """
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        size = 50304
        tokenizer = GPT2_SPEC
        eot = 50256
        old_path = os.path.join(folder, 'meta.pkl')
        if os.path.exists(old_path):
            size, tokenizer = read_meta_pkl(old_path)
            eot = None
        return {'dtype': 'uint16', 'vocab_size': size, 'tokenizer': tokenizer, 'template': None,
                'eot': eot, 'foreign': True, 'splits': {}}
    try:
        meta = read_json(path)
        known = meta['format'] in (0, FORMAT) and meta['dtype'] in ('uint16', 'uint32')
        sizes = [meta['splits'][split]['tokens'] for split in SPLITS]
        if not known or not 0 < meta['vocab_size'] <= MAX_VOCAB or not meta['tokenizer'] or min(sizes) < 0:
            raise ValueError(f'format {meta["format"]}, {meta["dtype"]}, {meta["vocab_size"]} ids')
        return {**meta, 'tokenizer': spec_of(meta), 'template': template_of_record(meta), 'foreign': False}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'{path} is damaged or from a later version ({type(e).__name__}: {e}); '
                         'prepare the dataset again') from None


class Skipped(dict):
    """Stand in for a tensor, or any other object that is not plain data."""
    def __init__(self, *args):
        super().__init__()


class PlainUnpickler(pickle.Unpickler):
    """Load the plain data of a pickle. It imports nothing, so it cannot run code."""
    def persistent_load(self, storage):
        return None

    def find_class(self, module, name):
        return Skipped


def read_plain(path):
    """Read a checkpoint without its tensors and without torch. Raises ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as z:
            record, = (name for name in z.namelist() if name.endswith('/data.pkl'))
            # read() checks the CRC of the record
            return PlainUnpickler(io.BytesIO(z.read(record))).load()
    except Exception as e:  # damaged bytes can raise nearly anything
        raise ValueError(f'{path} is damaged or not a checkpoint ({type(e).__name__}: {e})') from None


def read_meta_pkl(path):
    """
    Read (vocabulary size, tokenizer's spec) of nanoGPT's meta.pkl. Only vocab_size must be there;
    an id without a text in itos has an empty one.
    """
    try:
        with open(path, 'rb') as f:
            meta = PlainUnpickler(f).load()
        vocab_size = int(meta['vocab_size'])
        itos = meta.get('itos', {})
        if isinstance(itos, list):
            itos = dict(enumerate(itos))
        last = max(itos, default=vocab_size - 1)
        if not 0 <= last < vocab_size <= MAX_VOCAB:
            raise ValueError(f'vocab_size={vocab_size} for ids up to {last}')
        chars = [itos.get(i, '') for i in range(last + 1)]
        if all(len(text) == 1 for text in chars):
            chars = ''.join(chars)
        spec = {'kind': 'char', 'chars': chars, 'eot': False}
        tokenizer_from(spec)
    except Exception as e:  # unpickling arbitrary bytes can raise nearly anything
        raise ValueError(f"{path} is not nanoGPT's meta.pkl ({type(e).__name__}: {e}); write it again with "
                         "plain values, of which {'vocab_size': N} is enough to train") from None
    return vocab_size, spec


def open_bin(path, dtype):
    """Map a bin as an array of ids, empty if the file is missing."""
    dtype = np.dtype(dtype).newbyteorder('<')
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if size % dtype.itemsize:
        raise ValueError(f'{path} has {size:,} bytes, not a multiple of {dtype.itemsize}; prepare it again')
    return np.memmap(path, dtype=dtype, mode='r') if size else np.zeros(0, dtype=dtype)


def write_bins(folder, batches, has_rows):
    """
    Write the bins of a dataset from encode.Encoded batches: ids and, for rows, masks and the ends of
    documents (uint64). Returns {split: counts and the SHA-256 of its files}.
    """
    kinds = {'sha256': ''}  # {name of the hash in meta.json: end of the file's name, before .bin}
    if has_rows:
        kinds |= {'mask_sha256': '.mask', 'docs_sha256': '.docs'}
    counts = {split: {'tokens': 0, 'bytes': 0, 'documents': 0} for split in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {}
        for split in SPLITS:
            for key, kind in kinds.items():
                path = os.path.join(folder, f'{split}{kind}.bin')
                files[split, key] = stack.enter_context(open(path, 'wb'))
        for encoded in counting(batches, lambda encoded: encoded.num_bytes):
            count = counts[encoded.split]
            arrays = {'sha256': encoded.ids, 'mask_sha256': encoded.mask,
                      'docs_sha256': (count['tokens'] + encoded.ends).astype('<u8')}
            for key in kinds:
                files[encoded.split, key].write(arrays[key].tobytes())
            count['tokens'] += len(encoded.ids)
            count['bytes'] += encoded.num_bytes
            count['documents'] += len(encoded.ends)
        for (split, key), file in files.items():
            file.flush()
            os.fsync(file.fileno())
            counts[split][key] = hash_file(file.name)
    return counts


@contextlib.contextmanager
def partial_folder(folder):
    """
    Yield an empty folder to write a dataset into, which becomes `folder` when the block ends, unless
    all files are the same. An old one is moved to folder.1, folder.2, ... A kill leaves the old or
    the complete new dataset, or between the two renames the old one with its number. Raises
    ValueError if another process is writing it, or if it cannot be written.
    """
    work = folder + '.partial'
    new = os.path.join(work, 'new')
    try:
        os.makedirs(work, exist_ok=True)
        with lock(os.path.join(work, '.lock')):
            try:
                shutil.rmtree(new, ignore_errors=True)
                os.mkdir(new)
                yield new
                files = os.listdir(new)
                equal, _, _ = filecmp.cmpfiles(folder, new, files, shallow=False)
                if len(equal) == len(files):
                    print(f'{folder}: unchanged')
                    return
                sync_folder(new)
                if os.path.exists(folder):
                    target = free_number(folder)
                    print(f'{folder} holds another dataset, which is moved to {target}')
                    os.rename(folder, target)
                os.rename(new, folder)
                sync_folder(os.path.dirname(folder) or '.')
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except BrokenPipeError:  # of the command's output
        raise
    except OSError as e:  # a full disk, a read-only folder
        raise ValueError(f'{folder} was not written: {e}') from None


class Dataset(NamedTuple):
    """Describe one dataset of a run. weight: its share of a mixture, not normalized."""
    name: str
    folder: str
    meta: dict
    weight: float

    def num_tokens(self):
        """Return the number of training tokens."""
        path = os.path.join(self.folder, 'train.bin')
        return os.path.getsize(path) // np.dtype(self.meta['dtype']).itemsize


def open_datasets(dataset, data_dir):
    """
    Open the Datasets that a setting names: NAME, or a mixture A,B or A:0.7,B:0.3. Without weights,
    each is weighted by its number of training tokens.
    """
    datasets = []
    weighted = ':' in dataset
    for word in dataset.split(','):
        name, _, weight = word.strip().partition(':')
        folder = os.path.join(data_dir, name)
        for path in (folder, os.path.join(folder, 'train.bin'), os.path.join(folder, 'val.bin')):
            if not os.path.exists(path):
                raise ValueError(missing_dataset(path, name, data_dir))
        meta = read_meta(folder)
        if not weighted:
            weight = Dataset(name, folder, meta, 1.0).num_tokens()
        elif not re.fullmatch(r'\d+\.?\d*|\.\d+', weight) or not float(weight):
            raise ValueError(f'dataset={dataset!r}: give each dataset a weight above 0 (a:0.7,b:0.3) or none')
        datasets.append(Dataset(name, folder, meta, float(weight)))
        first = datasets[0]
        if not same_tokenizer(meta['tokenizer'], first.meta['tokenizer']):
            raise ValueError(f'the tokenizers of {first.name} and {name} differ; prepare {name} again with '
                             + shell(f'--tokenizer={first.folder}'))
    return datasets


def check_tokenizer(spec, path, dataset):
    """Raise ValueError if the tokenizer of the checkpoint at this path is known and not the Dataset's."""
    if spec and not same_tokenizer(spec, dataset.meta['tokenizer']):
        raise ValueError(f'the tokenizers of {path} and of dataset={dataset.name} differ; prepare '
                         f'{dataset.meta.get("source", "the data")} again with '
                         + shell(f'--tokenizer={path}'))


def byte_table(meta, vocab_size):
    """Count the UTF-8 bytes of every id of a model, (vocab_size,)."""
    sizes = tokenizer_from(meta['tokenizer']).sizes
    return np.pad(sizes, (0, max(vocab_size - len(sizes), 0)))


def show(tokenizer, ids):
    """Write ids as text on one line, special ids by name."""
    names = {i: name.encode() for name, i in tokenizer.specials.items()}
    parts = [names[i] if i in names else tokenizer.decode([i]) for i in ids]
    return repr(b''.join(parts).decode('utf-8', 'replace'))


def inspect(folder):
    """Print the tokenizer of a dataset, the counts of each split, frequent tokens and decoded text."""
    if not os.path.exists(os.path.join(folder, 'train.bin')):
        raise ValueError(f'{folder} is not the folder of a dataset: it has no train.bin')
    meta = read_meta(folder)
    spec = meta['tokenizer']
    tokenizer = tokenizer_from(spec)
    print(f'{folder}: {spec.get("name", spec["kind"])} tokenizer of {tokenizer.n_vocab:,} ids, '
          f'{meta["dtype"]}, template {meta["template"]}, from {meta.get("source", "nanoGPT")}')
    for split in SPLITS:
        tokens = open_bin(os.path.join(folder, f'{split}.bin'), meta['dtype'])
        mask = open_bin(os.path.join(folder, f'{split}.mask.bin'), 'uint8')
        in_loss = np.count_nonzero(mask) if len(mask) else len(tokens)
        counts = np.zeros(max(int(tokens.max(initial=0)) + 1, tokenizer.n_vocab), dtype=np.int64)
        for start in range(0, len(tokens), COUNT_BLOCK):  # in blocks: a bin may be larger than memory
            counts += np.bincount(tokens[start:start + COUNT_BLOCK], minlength=len(counts))
        num_bytes = counts[:tokenizer.n_vocab] @ tokenizer.sizes  # Larger ids pad the vocabulary.
        print(f'{split}: {counted(len(tokens), "token")}, {in_loss:,} in the loss, '
              f'{num_bytes / max(len(tokens), 1):.2f} bytes per token, '
              f'{counted(np.count_nonzero(counts), "distinct id")}, the ten most frequent:')
        for i in np.argsort(-counts, kind='stable')[:10].tolist():
            print(f'{counts[i]:>12,}  {show(tokenizer, [i])}')
        middle = len(tokens) // 2
        print(f'from {middle:,}: {show(tokenizer, tokens[middle:middle + 200].tolist())}')


if __name__ == '__main__':
    for path in sys.argv[1:] or ['.']:
        call_main(inspect, path)
