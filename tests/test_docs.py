"""README and recipe cards are correct: their commands parse, names exist, counts are exact, cells run."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from configurator import configure, parse
from hotloop.data.sources import CORPORA
from hotloop.training.dataloader import share_batch
from hotloop.weights.lora import LoRAConfig
from model import GPT, GPTConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
CARDS = sorted((ROOT / 'config').glob('*.py'))
SETTINGS = {'train.py': (GPTConfig, LoRAConfig, TrainConfig), 'sample.py': (SampleConfig,),
            'prepare.py': (PrepareConfig,)}
NANOGPTS = ('config/train_shakespeare_char.py', '../nanoGPT/config/train_shakespeare_char.py')
SMALL = ('--time_budget=None --max_iters=20 --batch_size=2 --n_layer=1 --n_embd=32 --block_size=64 '
         '--eval_tokens=1024 --device=cpu --compile=False')


def commands(text):
    """Yield the words of each python or torchrun command in lines of shell, comments or docstrings."""
    for line in re.sub(r'\\\n#? *', '', text).splitlines():
        for command in re.split(r'&&|\||;', re.sub(r'^[#!$ ]+', '', line)):
            command = re.sub(r'^\s*(timeout \w+|[A-Z]+=\S+) ', '', command).strip()
            if re.match(r'(python|torchrun)\s', command):
                yield shlex.split(command, comments=True)


def check_command(words):
    """Raise ValueError or OSError unless the script, flags, cards and corpora of a command exist."""
    program, *argv = words
    if program == 'torchrun':
        argv = list(itertools.dropwhile(lambda word: word.startswith('--'), argv)) or ['train.py']
    script, *argv = argv
    argv = [arg for arg in argv if arg not in NANOGPTS]
    if script in SETTINGS:
        is_prepare = script == 'prepare.py'
        _, _, argv = configure(*SETTINGS[script], argv=argv, files=not is_prepare)
        unknown = [word for word in argv if is_prepare and not re.search('[./]|^-$', word)
                   and word.partition(':')[0] not in CORPORA]
    elif script == '-m':
        unknown = [argv[0]] if importlib.util.find_spec(argv[0]) is None else []
    else:
        source = (ROOT / script).read_text(encoding='utf-8')
        flags = [flag[1] for flag in map(re.compile(r'--(\w+)').match, argv) if flag]
        unknown = [flag for flag in flags if not re.search(rf"'--{flag}'|\b{flag}=", source)]
    for word in argv:
        if word.endswith('.py') and not (ROOT / word).is_file():
            unknown.append(word)
    if unknown:
        raise ValueError(f'{" ".join(words)}: {unknown} does not exist')


def is_setting(code):
    """Return whether name, name=value, --name or --name=value is a setting that can have the value."""
    name, equals, value = code.removeprefix('--').partition('=')
    fields = [field for classes in SETTINGS.values() for cls in classes for field in dataclasses.fields(cls)]
    for field in fields:
        if field.name == name:
            with contextlib.suppress(ValueError):
                if equals:
                    parse(value, field.type)
                return True
    return False


def blocks(path):
    """Return the text of a file, of Markdown only its blocks of commands."""
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.md':
        return '\n'.join(re.findall(r'^```(?:sh|python)\n(.*?)^```', text, re.M | re.S))
    return text


@pytest.mark.parametrize('path', [*CARDS, *(ROOT / name for name in ('README.md', *SETTINGS))],
                         ids=lambda p: p.name)
def test_every_command_of_readme_cards_and_scripts_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(commands(blocks(path)))
    for words in found:
        check_command(words)
    assert len(found) > (20 if path.suffix == '.md' else 0)


def inline_code(text):
    """List what stands between single backticks."""
    text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    return [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', text)]


def test_every_name_in_the_text_of_readme_exists(monkeypatch):
    monkeypatch.chdir(ROOT)
    for code in inline_code(README):
        if re.fullmatch(r'(--)?[a-z_]+=\S+|--\w+', code):
            assert is_setting(code) or code in ('--help', 'weights_only=True'), code
        elif re.fullmatch(r'(hotloop|tests|config)/[\w/]+\.\w+', code) and 'NAME' not in code:
            assert (ROOT / code).is_file(), code
        elif code.split()[0] in SETTINGS and ' ' in code:
            check_command(['python', *shlex.split(code)])
        else:
            for words in commands(code):
                check_command(words)


def test_readme_has_at_most_350_lines_and_names_every_file_and_every_card():
    assert README.count('\n') <= 350
    for path in ROOT.glob('*.py'):
        assert re.search(rf'^{path.name} ', README, re.M), path.name
    for card in CARDS:
        assert f'`{card.stem}`' in README, card.name
    for path in re.findall(r'\]\(([^)#]+)[^)]*\)', README):  # links
        assert (ROOT / path).is_file(), path
    tree = README.split('\nhotloop/ ')[1].split('```')[0]
    folders = re.findall(r'^  (\w+)/ .*?(\w+(?:, \w+)+)', tree, re.M)
    assert len(folders) == 6
    for folder, parts in folders:
        for part in parts.split(', '):
            assert (ROOT / f'hotloop/{folder}/{part}.py').is_file(), part


@pytest.mark.parametrize('card', CARDS, ids=lambda card: card.stem)
def test_a_card_resolves_for_any_number_of_gpus_and_counts_that_it_states_are_exact(card):
    """
    One global batch on 1, 2, 4 and 8 GPUs. A card may state counts of parameters and of tokens per step. Its
    head names a command, the hardware and a result.
    """
    text = card.read_text(encoding='utf-8')
    head = text.split('\n\n')[0].lower()
    assert re.search('python train.py|torchrun', head) and 'hardware:' in head and 'measured' in head
    (config, _, cfg), given, _ = configure(*SETTINGS['train.py'], argv=[str(card)])
    assert given
    sequences = cfg.batch_size * cfg.gradient_accumulation_steps
    for world in (1, 2, 4, 8):
        micro, accumulation = share_batch(cfg.batch_size, cfg.gradient_accumulation_steps, world)
        assert micro * accumulation * world == sequences and micro <= cfg.batch_size
    # of each dataset; otherwise GPT-2's, padded
    vocabulary = {'stdlib': 1024, 'shakespeare_char': 65, 'tinystories_4096': 4096}
    with torch.device('meta'):
        model = GPT(dataclasses.replace(config, vocab_size=vocabulary.get(cfg.dataset, 50304)))
    tokens = sequences * config.block_size
    for what, number in (('parameters', model.num_params()), ('tokens per step', tokens)):
        stated = re.search(rf'([\d,]+) {what}', text)
        assert stated is None or stated[1] == f'{number:,}'


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='needs the repository, to clone it')
def test_the_cells_of_readme_run_from_a_fresh_folder(tmp_path, monkeypatch):
    """The clone is local, the packages are those that are here, the drive is a folder, the run is small."""
    drive = tmp_path / 'drive'
    text = re.search(r'^```python\n(!git clone.*?)^```', README, re.M | re.S)[1]
    for old, new in (('URL_OF_YOUR_COPY', str(ROOT)), ('pip install -q -r requirements.txt', 'true'),
                     ('/content/drive/MyDrive', str(drive)), ('quickstart.py', f'quickstart.py {SMALL}'),
                     ('--start="def "', '--start="def " --device=cpu --num_samples=1 --max_new_tokens=20')):
        assert old in text
        text = text.replace(old, new)
    mounted = []

    def mount(place):
        mounted.append(place)
        drive.mkdir()
    colab = types.ModuleType('google.colab')
    colab.drive = types.SimpleNamespace(mount=mount)
    monkeypatch.setitem(sys.modules, 'google', types.ModuleType('google'))
    monkeypatch.setitem(sys.modules, 'google.colab', colab)
    monkeypatch.setenv('PATH', os.pathsep.join((os.path.dirname(sys.executable), os.environ['PATH'])))
    printed = []
    for line in text.splitlines():
        if line.startswith('!'):
            done = subprocess.run(['bash', '-c', line[1:]], cwd=tmp_path, text=True, capture_output=True,
                                  check=False)
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
        else:
            exec(line, {})
    prepared, trained, sampled = printed
    assert 'quickstart' in prepared and 'step 20' in trained and sampled.startswith('def ')
    assert mounted == ['/content/drive'] and (drive / 'run' / 'best.pt').is_file()
