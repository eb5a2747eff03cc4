"""Opens text files of any compression, and standard input. All failures are ValueErrors."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import sys
import zlib

from hotloop.system.files import optional


class ProgressFile(io.FileIO):
    """A file that reports the bytes read from the disk, so that progress is correct for compressed files."""

    def __init__(self, path, progress):
        super().__init__(path)
        self.progress = progress

    def readinto(self, buffer):
        count = super().readinto(buffer)
        if self.progress:
            self.progress.add(count)
        return count


class ZstdFile(io.RawIOBase):
    """A .zst file, decompressed. The package's own reader accepts a truncated file as complete."""

    def __init__(self, raw):
        self.zstandard = optional('zstandard', 'reads .zst files')
        self.raw, self.ready = raw, memoryview(b'')
        self.decompressor = self.zstandard.ZstdDecompressor(max_window_size=2**31)  # of zstd --long=31
        self.frame = self.decompressor.decompressobj()

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.ready and (data := self.frame.unused_data or self.raw.read(1 << 14)):
            if self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(data))
            except self.zstandard.ZstdError as e:
                raise EOFError(e) from None
        if not self.ready and not self.frame.eof:
            raise EOFError('it ends inside a frame')
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def open_zstd(raw):
    return io.BufferedReader(ZstdFile(raw))


@contextlib.contextmanager
def open_text(path, errors='strict', progress=None, encoding='utf-8'):
    """
    Opens a text file for a with statement: decoded without the byte-order mark of UTF-8, decompressed by the
    suffix of its name, line ends unchanged; a line ends with a line feed. errors: a handler of codecs.
    ValueError, also while reading: a file that cannot be read, is damaged or cut, or has another encoding.
    """
    name = 'UTF-8' if codecs.lookup(encoding).name == 'utf-8' else encoding
    openers = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.lzma': lzma.open, '.zst': open_zstd}
    opener = openers.get(os.path.splitext(path)[1].lower())
    try:
        with io.BufferedReader(ProgressFile(path, progress), 1 << 17) as raw:
            data = opener(raw) if opener else raw
            yield io.TextIOWrapper(data, 'utf-8-sig' if name == 'UTF-8' else name, errors, newline='\n')
    except UnicodeError as e:
        reason = str(e)
        if isinstance(e, UnicodeDecodeError):
            before = e.object[max(e.start - 20, 0):e.start].decode(encoding, 'replace')
            reason = f'byte {e.object[e.start]:#04x} after {before!r}'
        raise ValueError(f'{path} is not {name} text: {reason}; convert or omit it, use --bad_utf8=replace, '
                         'or name its encoding to prepare.py, such as --encoding=latin-1 or utf-16') from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
        raise ValueError(f'{path} is damaged or incomplete: {e}; replace it with an intact copy') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None


def open_file(file, reading, progress, counts):
    """open_text() of a file with the encoding and error handling of the settings."""
    def replace(error):
        counts.replaced[file.path] += error.end - error.start
        return '\ufffd', error.end
    errors = 'strict'
    if reading.bad_utf8 == 'replace':
        errors = 'hotloop.count'
        codecs.register_error(errors, replace)  # for all readers, but one file is read at a time
    return open_text(file.path, errors, progress, reading.encoding)


def standard_input():
    """The bytes of standard input as a file. ValueError if it is closed."""
    if sys.stdin is None:
        raise ValueError('standard input is closed; redirect something into it, or name a file')
    return sys.stdin.buffer
