"""The library behind the five top-level files, in six folders. Its parts import of them only configurator."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  the scripts import this first; Python 3.9 cannot parse others
    sys.exit(f'error: this program needs Python 3.11 or later, and {sys.executable} is Python '
             f'{sys.version_info[0]}.{sys.version_info[1]}: make a virtual environment with a later one')


def load(source='out', **settings):
    """
    Load a run, a folder of weights or a model of the hub: load('out').generate('ROMEO:'). settings: of
    sample.py, such as device, dtype, quantize, template or temperature. Its `gpt` can be trained,
    unless it is quantized, so its weights are not packed as by sample.py.
    """
    import os

    from hotloop.inference.load import Model, checked
    from model import GPT
    from sample import SampleConfig
    return Model(checked(SampleConfig(init_from=os.fspath(source), **settings)), GPT).prepare(pack=False)
