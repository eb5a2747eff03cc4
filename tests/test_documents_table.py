"""The table of the documents: what it names exists, figures have a source, no heading is missing."""

import re
from pathlib import Path

import pytest
from test_docs import CARDS, LOG, OTHERS, README, ROOT, check_command, is_setting, simple_commands

TABLE = Path(__file__).with_name('DOCUMENTS.md')
TEXT = TABLE.read_text(encoding='utf-8')
REFERENCE = ROOT.parent / 'shared' / 'reference'
NO_FEATURE = 'Headings without a feature of their own: '


def sections():
    """{number of a document: the lines of its section}."""
    parts = re.split(r'^## (\d{3}): ', TEXT, flags=re.M)
    return {number: body.splitlines() for number, body in zip(parts[1::2], parts[2::2], strict=True)}


def rows_of(lines):
    """The rows of the table in these lines: [heading or '', feature, here, measured]."""
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')]
    return cells[2:]  # below the names of the columns


def names_in(text):
    """What stands between backticks."""
    return list(dict.fromkeys(re.findall(r'`([^`]+)`', text)))


def numbers_in(text):
    return set(re.findall(r'\d+(?:,\d{3})*(?:\.\d+)?', text))


def what_is_wrong(name, run):
    """A sentence about what stands between backticks, or None. run: the folder of a run."""
    if name.startswith(('python ', 'torchrun ')):
        try:
            check_command(simple_commands(name)[0])
        except (ValueError, OSError) as e:
            return f'{name}: {e}'
    elif name.startswith('out_dir/'):
        if not (run / name.removeprefix('out_dir/')).exists():
            return f'{name}: a run does not write it'
    elif re.search(r'\.(py|md|txt)$', name):
        if not (ROOT / name).is_file():
            return f'{name}: there is no such file'
    elif name.split()[0] not in OTHERS and not is_setting(name):
        return f'{name}: not a setting with this value, a card or a command'
    return None


def test_all_that_it_names_exists(train_tiny, tmp_path, monkeypatch):
    train_tiny()
    monkeypatch.chdir(ROOT)
    found = [what_is_wrong(name, tmp_path / 'out') for name in names_in(TEXT)]
    wrong = [sentence for sentence in found if sentence]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('name', [
    'learnin_rate', 'dtype=bfloat17', '--d_model=8', 'config/nothing.py', 'out_dir/nothing', 'pruning',
    'python train.py --nothing=1'])
def test_a_name_that_does_not_exist_is_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert what_is_wrong(name, tmp_path)


def test_rows_are_complete_and_their_figures_come_from_readme_log_or_cards():
    known = numbers_in(README) | numbers_in(LOG)
    for card in CARDS:
        known |= numbers_in(card.read_text(encoding='utf-8'))
    for number, lines in sections().items():
        for row in rows_of(lines):
            assert len(row) == 4 and all(row[1:]), (number, row)
            assert numbers_in(row[3]) <= known, (number, row)


def plain(heading):
    """A heading without its marks, number and pictures, which some documents have in a broken encoding."""
    text = re.sub(r'[^\x20-\x7e]+', ' ', heading).replace('**', '')
    return ' '.join(re.sub(r'^#+\s*(\d+\.\s)?', '', text).split()).rstrip(':')


def headings_of(text):
    """The headings of a document, in order, without comments in its blocks of code."""
    outside = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
    return [plain(line) for line in outside.splitlines() if line.startswith('#')]


def test_no_heading_of_a_document_is_left_out():
    if not REFERENCE.is_dir():
        pytest.skip(f'{REFERENCE} with the reference documents is not there')
    documents = {path.name[:3]: path.read_text(encoding='utf-8') for path in sorted(REFERENCE.glob('*.txt'))}
    tables = sections()
    assert tables.keys() == documents.keys()
    for number, text in documents.items():
        title, *headings = headings_of(text)
        assert tables[number][0].startswith(title)
        lines = [line for line in tables[number] if line.startswith(NO_FEATURE)]
        without = lines[0].removeprefix(NO_FEATURE).rstrip('.').split('; ') if lines else []
        rows = [row[0] for row in rows_of(tables[number]) if row[0]]
        left = [heading for heading in headings if heading not in without]
        assert rows == left, f'document {number}'
        assert set(without) <= set(headings), f'document {number}'
