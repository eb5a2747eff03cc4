"""Read and write safetensors files (https://github.com/huggingface/safetensors)."""

import json
import mmap
import struct

import torch

from hotloop.system.files import replacing
from hotloop.system.text import first_line

DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
          'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
          'U8': torch.uint8, 'BOOL': torch.bool}  # as safetensors names them


def read_safetensors(path):
    """
    Map {name: tensor} of a safetensors file: 8 bytes of header length, a JSON header, raw row-major
    bytes. Raises ValueError if it is cut or damaged.
    """
    tensors = {}
    data = b''
    try:
        with open(path, 'rb') as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        first = 8 + struct.unpack_from('<Q', data)[0]  # byte of the tensors
        header = json.loads(data[8:first])
        header.pop('__metadata__', None)
        for name, entry in header.items():
            dtype = DTYPES[entry['dtype']]
            start, end = entry['data_offsets']
            if not 0 <= start < end:  # torch would read a tensor before the first from the header
                raise ValueError(f'{name} is at bytes {start} to {end}')
            count = (end - start) // dtype.itemsize
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=first + start)
            tensors[name] = flat.view(entry['shape'])
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror}') from None
    except Exception as e:  # damaged bytes can raise nearly anything
        if data[:8] == b'version ':
            raise ValueError(f'{path} is a pointer of git-lfs; run git lfs pull in its folder') from None
        raise ValueError(f'{path} is damaged or not a safetensors file: '
                         f'{type(e).__name__}: {first_line(e)}') from None
    return tensors


def write_safetensors(path, tensors):
    """Write {name: tensor}. Larger elements come first, so that all are aligned."""
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    names = {dtype: name for name, dtype in DTYPES.items()}
    header = {'__metadata__': {'format': 'pt'}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {'dtype': names[tensor.dtype], 'shape': list(tensor.shape),
                        'data_offsets': [start, end]}
        start = end
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with replacing(path) as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for tensor in tensors.values():
            f.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
