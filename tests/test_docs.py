"""README and recipe cards are correct: commands parse, files exist, counts are exact."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from configurator import configure
from hotloop.documents import ReadConfig
from hotloop.lora import LoRAConfig
from model import GPT, GPTConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
CARDS = sorted((ROOT / 'config').glob('*.py'))
SETTINGS = {'train.py': (GPTConfig, LoRAConfig, TrainConfig), 'sample.py': (SampleConfig,),
            'prepare.py': (PrepareConfig, ReadConfig)}
NANOGPTS = ('config/train_shakespeare_char.py', '../nanoGPT/config/train_shakespeare_char.py')


def commands(text):
    """Every (script, arguments) in the commands of a text, with variables filled in and comments removed."""
    for name, value, word in re.findall(r'\b([A-Z]+)=(?:"(.*?)"|(\S+))', text):
        text = text.replace(f'${name}', value or word)
    for line in re.sub(r'\\\n#? *', '', text).splitlines():
        line = line.strip().removeprefix('#').strip()
        for command in line.split('&&'):
            found = re.match(r'\s*(?:python|torchrun)\b.*?\b(train|sample|prepare)\.py(?=\s|$)(.*)', command)
            if found:
                yield f'{found[1]}.py', shlex.split(found[2], comments=True)


@pytest.mark.parametrize('path', [ROOT / 'README.md', *CARDS, *(ROOT / script for script in SETTINGS)],
                         ids=lambda path: path.name)
def test_every_command_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(commands(path.read_text(encoding='utf-8')))
    assert found or path.suffix == '.py'
    for script, argv in found:
        argv = [a for a in argv if a not in NANOGPTS]
        configure(*SETTINGS[script], argv=argv, files=script != 'prepare.py')


def test_readme_starts_with_two_commands_and_ci_runs_the_second():
    fenced = re.findall(r'```sh\n(.*?)```', README, re.S)
    first, second = fenced[0].strip(), fenced[1].strip()
    for part in ('-c constraints.txt -r requirements.txt', 'prepare.py', 'config/quickstart.py', 'sample.py'):
        assert part in first
    assert '\n' not in first and '\n' not in second
    assert second in (ROOT / '.ci/run').read_text(encoding='utf-8').splitlines()


def test_readme_names_every_file_and_every_card():
    for path in ROOT.glob('*.py'):
        assert re.search(rf'^{path.name} ', README, re.M), path.name
    for card in CARDS:
        assert card.stem in README, card.name


def test_counts_in_cards_are_exact():
    """Of parameters, and of tokens per step."""
    # of each dataset; otherwise GPT-2's, padded
    vocabulary = {'stdlib': 257, 'shakespeare_char': 65, 'tinystories_4096': 4096}
    found = {'parameters': 0, 'tokens per step': 0}
    for card in CARDS:
        config, _, cfg, *_ = configure(*SETTINGS['train.py'], argv=[str(card)])
        config.vocab_size = vocabulary.get(cfg.dataset, 50304)
        with torch.device('meta'):
            exact = {'parameters': GPT(config).num_params(), 'tokens per step':
                     cfg.batch_size * cfg.gradient_accumulation_steps * config.block_size}
        for what, number in exact.items():
            stated = re.search(rf'([\d,]+) {what}', card.read_text(encoding='utf-8'))
            if stated:
                assert f'{number:,}' == stated[1], card.name
                found[what] += 1
    assert found['parameters'] >= 15 and found['tokens per step'] >= 14


@pytest.mark.parametrize('card', CARDS, ids=lambda c: c.stem)
def test_a_card_names_its_command_its_hardware_and_its_result(card):
    head = card.read_text(encoding='utf-8').split('\n\n')[0].lower()
    assert 'python train.py' in head or 'torchrun' in head
    assert 'hardware:' in head and 'measured' in head


def test_pins_satisfy_the_requirements():
    pins = dict(line.split('==') for line in (ROOT / 'constraints.txt').read_text().split() if '==' in line)
    for file in ('requirements.txt', 'requirements-dev.txt'):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith('#'):
                name, floor = line.split('>=')
                assert [int(n) for n in pins[name].split('.')] >= [int(n) for n in floor.split('.')], name
