"""README, log and recipe cards are correct: commands parse, names exist, messages and counts are exact."""

import ast
import contextlib
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from configurator import configure, fields_of, parse
from hotloop.data.documents import ReadConfig
from hotloop.data.sources import CORPORA
from hotloop.weights.lora import LoRAConfig
from model import GPT, GPTConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
LOG = (ROOT / 'tests/bench/LOG.md').read_text(encoding='utf-8')
CARDS = sorted((ROOT / 'config').glob('*.py'))
SETTINGS = {'train.py': (GPTConfig, LoRAConfig, TrainConfig), 'sample.py': (SampleConfig,),
            'prepare.py': (PrepareConfig, ReadConfig)}
FIELDS = [fields_of(classes) for classes in SETTINGS.values()]
NANOGPTS = ('config/train_shakespeare_char.py', '../nanoGPT/config/train_shakespeare_char.py')
OTHERS = ('nvidia-smi', 'tail', 'tensorboard')  # programs that are not ours
SHELL = (*OTHERS, '.', 'cd', 'done', 'for', 'git', 'pip', 'ruff')
PYTEST_FLAGS = {'-m', '-n', '-q', '-s'}


def logical_lines(text):
    """The lines of shell commands or comments, with variables filled in and continued lines joined."""
    for name, value, word in re.findall(r'\b([A-Z]+)=(?:"(.*?)"|(\S+))', text):
        text = text.replace(f'${name}', value or word)
    return re.sub(r'\\\n#? *', '', text).splitlines()


def simple_commands(line):
    """The words of each command in a line of the shell, without comment, redirection, variables and `do`."""
    lexer = shlex.shlex(re.sub(r'\s>>\s*\S+', '', line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands = [[]]
    for word in lexer:
        if re.fullmatch('[();&|]+', word):
            commands.append([])
        elif commands[-1] or not re.fullmatch('do|[A-Z]+=.*', word):
            commands[-1].append(word)
    return [words for words in commands if words]


def commands(text):
    """The words of each command in the lines of a text that begin with python or torchrun, after # or $."""
    for line in logical_lines(text):
        line = re.sub('^[#$ ]+', '', line)
        if re.match(r'(python|torchrun)\s', line):
            yield from simple_commands(line)


def is_setting(name):
    """Whether name, name=value, --name or --name=value is a setting of a script that can have the value."""
    name, equals, value = name.removeprefix('--').partition('=')
    for fields in FIELDS:
        with contextlib.suppress(KeyError, ValueError):
            kind = fields[name][0]
            if equals:
                parse(value, kind)
            return True
    return False


def check_command(words):
    """ValueError or OSError unless the program, flags, files, cards and corpora of a command exist."""
    program, *argv = words
    if program == 'torchrun':
        if not any(arg.endswith('.py') for arg in argv):
            argv.append('train.py')
        try:
            parser = importlib.import_module('torch.distributed.run').get_args_parser()
            args = parser.parse_args(argv)
        except SystemExit:
            raise ValueError(f'{shlex.join(words)}: torchrun refuses its flags') from None
        check_script(args.training_script, args.training_script_args)
    elif program in ('python', 'python3') and argv[:2] == ['-m', 'pytest']:
        unknown = [arg for arg in argv[2:] if arg.startswith('-') and arg not in PYTEST_FLAGS]
        missing = [arg for arg in argv[2:] if arg.endswith('.py') and not (ROOT / arg).is_file()]
        if unknown or missing:
            raise ValueError(f'pytest has no {unknown}, and there is no {missing}')
    elif program in ('python', 'python3') and argv[0] != '-m':
        check_script(argv[0], argv[1:])
    elif '/' in program:
        check_script(program, argv)
    elif program not in (*SHELL, 'python', 'python3'):
        raise ValueError(f'unknown program {program}')


def check_script(script, argv):
    """The same for a script of ours: one of the three commands, or a bench, whose source names its flags."""
    if script in SETTINGS:
        argv = [arg for arg in argv if arg not in NANOGPTS]
        (cfg, *_), _, words = configure(*SETTINGS[script], argv=argv, files=script != 'prepare.py')
        if script == 'prepare.py' and not cfg.inspect:
            names = [word for word in words if not re.search('[./]|^-$', word)]
            unknown = [name for name in names if name not in (*CORPORA, 'stdlib')]
            if unknown:
                raise ValueError(f'no corpus is named {unknown}')
        return
    source = (ROOT / script).read_text(encoding='utf-8')
    missing = [word for word in argv if word.startswith('config/') and not (ROOT / word).is_file()]
    if missing:
        raise ValueError(f'there is no card {missing}')
    flags = re.findall(r"'--(\w+)'", source)
    for call in re.findall(r'parser_of\((.*?)\)\n', source, re.S):
        flags += re.findall(r'(\w+)=', call)
    for flag in re.findall(r'--(\w+)', ' '.join(argv)):
        if flag not in flags:
            raise ValueError(f'{script} has no flag --{flag}')


@pytest.mark.parametrize('path', [*CARDS, *(ROOT / script for script in SETTINGS)], ids=lambda p: p.name)
def test_every_command_of_a_card_or_script_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(commands(path.read_text(encoding='utf-8')))
    assert found
    for words in found:
        check_command(words)


@pytest.mark.parametrize('text', [README, LOG], ids=['README', 'LOG'])
def test_every_line_of_a_block_is_a_command_that_exists(text, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = []
    for language, block in re.findall(r'^```(\w*)\n(.*?)^```', text, re.M | re.S):
        if language == 'sh':
            lines += logical_lines(block)
        lines += [line[1:] for line in block.splitlines() if line.startswith('!')]  # of a notebook
    found = [words for line in lines for words in simple_commands(line)]
    for words in found:
        check_command(words)
    assert len(found) > 10
    report = (ROOT / 'tests/bench/gpu_report.sh').read_text(encoding='utf-8')
    for part in ' '.join(re.findall('for part in (.*?);', text)).split():
        assert f'\n{part})' in report


def inline_code(text):
    """What stands between single backticks, on one line."""
    text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    return [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', text)]


def test_every_name_in_the_text_of_readme_exists(monkeypatch):
    monkeypatch.chdir(ROOT)
    for code in inline_code(README):
        words = simple_commands(code)[0]
        if words[0] in SETTINGS and len(words) > 1:
            words.insert(0, 'python')
        if words[0] in ('python', 'torchrun'):
            check_command(words)
        elif re.fullmatch(r'(--)?[a-z_]+=\S+|--\w+', code):
            assert is_setting(code) or code in ('--help', 'weights_only=True'), code
        elif re.fullmatch(r'(hotloop|tests|config)/[\w/]+\.\w+', code) and 'NAME' not in code:
            assert (ROOT / code).is_file(), code


def test_every_link_of_readme_leads_somewhere():
    for path, _, anchor in re.findall(r'\]\(([^)#]+)(#([^)]*))?\)', README):
        assert (ROOT / path).is_file(), path
        if anchor:
            headings = re.findall('^## (.*)', (ROOT / path).read_text(encoding='utf-8'), re.M)
            assert anchor in [re.sub(r'[^\w -]', '', h).lower().replace(' ', '-') for h in headings]


@pytest.mark.parametrize('command', [
    'python train.py --nothing=1', 'python nothing.py', 'torchrun --nothing=2 train.py',
    'torchrun --nproc_per_node=2 train.py --nothing=1', 'python -m pytest tests/nothing.py',
    'python -m pytest --nothing', 'python prepare.py wikitext104', 'nothing --flag',
    'python train.py config/nothing.py', 'python tests/bench/profile_step.py config/nothing.py',
    'python tests/bench/step_speed.py --nothing', 'tests/bench/nothing.sh'])
def test_a_command_that_does_not_exist_is_found(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ValueError, OSError)):
        check_command(simple_commands(command)[0])


def clauses(text):
    """The parts of a message between semicolons, colons and full stops."""
    return [part.strip() for part in re.split(r'[;:.]\s', text) if len(part.replace('\0', '')) >= 8]


def clauses_in_source():
    """The clauses of all texts in our sources, with \\0 in place of each value."""
    found = set()
    for path in (*ROOT.glob('*.py'), *(ROOT / 'hotloop').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else '\0' for part in node.values]
                found.update(clauses(''.join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(clauses(node.value))
    return found


def is_clause(text, known):
    """Whether a text is this clause of a source with some values."""
    parts = known.split('\0')
    return all(part in text for part in parts) and re.fullmatch('.+'.join(map(re.escape, parts)), text)


def test_the_messages_in_readme_are_those_of_the_program():
    section = README.split('## Troubleshooting')[1].split('\n## ')[0]
    messages = [code for code in inline_code(section) if len(code) > 30 and not code.startswith('python')]
    assert len(messages) >= 6
    known = clauses_in_source()
    assert not any(is_clause('no source has this message', other) for other in known)
    for message in messages:
        for clause in clauses(message):
            assert any(is_clause(clause, other) for other in known), clause


def test_readme_starts_with_two_commands_and_ci_runs_the_second():
    fenced = re.findall(r'```sh\n(.*?)```', README, re.S)
    first, second = fenced[0].strip(), fenced[1].strip()
    for part in ('-c constraints.txt -r requirements.txt', 'prepare.py', 'config/quickstart.py', 'sample.py'):
        assert part in first
    assert '\n' not in first and '\n' not in second
    assert second in (ROOT / '.ci/run').read_text(encoding='utf-8').splitlines()


def test_readme_has_at_most_300_lines_and_names_every_file_and_every_card():
    assert README.count('\n') <= 300
    for path in ROOT.glob('*.py'):
        assert re.search(rf'^{path.name} ', README, re.M), path.name
    for card in CARDS:
        assert f'`{card.stem}`' in README, card.name
    tree = README.split('\nhotloop/ ')[1].split('```')[0]
    for folder, parts in re.findall(r'^  (\w+)/ +[^:\n]*?(?:: )?([\w, ]+)$', tree, re.M):
        for part in parts.split(', '):
            assert (ROOT / f'hotloop/{folder}/{part}.py').is_file(), part


def test_counts_in_cards_are_exact():
    """Of parameters, and of tokens per step."""
    # of each dataset; otherwise GPT-2's, padded
    vocabulary = {'stdlib': 1024, 'shakespeare_char': 65, 'tinystories_4096': 4096}
    found = {'parameters': 0, 'tokens per step': 0}
    for card in CARDS:
        (config, _, cfg), *_ = configure(*SETTINGS['train.py'], argv=[str(card)])
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
